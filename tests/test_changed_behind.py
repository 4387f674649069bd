"""What stands behind `open`: a file that is not the one that was opened any more gives an error, never values of both."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import SourceChanged
from ckpt_cli.files.source import FileSource
from ckpt_cli.progress import Silent
from tests import tiny
from tests.conftest import Copy


def rewritten(path: Path) -> None:
    """In place, with size and mtime kept: only its ctime tells."""
    time.sleep(0.02)  # ctime counts in ticks of the kernel
    status, content = path.stat(), path.read_bytes()
    with path.open("r+b") as file:
        file.write(content[:-8] + bytes(byte ^ 1 for byte in content[-8:]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replaced(path: Path) -> None:
    """By another file of the same size, as `os.replace` does at the end of a save."""
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def removed(path: Path) -> None:
    path.unlink()


def led_elsewhere(path: Path) -> None:
    """A link in its place, to a file with the same content."""
    path.rename(path.with_name("moved"))
    path.with_name("copy").write_bytes(path.with_name("moved").read_bytes())
    path.symlink_to("copy")


CHANGES: list[Callable[[Path], None]] = [rewritten, replaced, removed, led_elsewhere]
READERS: list[Callable[[Any], Any]] = [
    lambda tensor: tensor.numpy(),
    lambda tensor: tensor.to("fp16").torch(),
    lambda tensor: tensor[:1].torch(),
    numpy.asarray,
]


@pytest.mark.parametrize("change", CHANGES)
class TestAFileThatChanged:
    @pytest.mark.parametrize("closed", [False, True])
    @pytest.mark.parametrize("reader", range(len(READERS)))
    def test_is_noticed_when_a_tensor_is_read(self, change: Callable[[Path], None], reader: int, closed: bool, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        save_file({"a": torch.ones(4, 4), "b": torch.ones(4, 4)}, path)
        checkpoint = ckpt_cli.open(path)
        assert READERS[reader](checkpoint["a"]).sum() == (4 if reader == 2 else 16)
        if closed:
            checkpoint.close()
        change(path)
        for name in ("a", "b"):
            with pytest.raises(ckpt_cli.CkptError) as caught:
                READERS[reader](checkpoint[name])
            assert caught.value.code in ("source-changed", "not-found")
            assert caught.value.path == str(path)

    def test_is_noticed_among_many(self, change: Callable[[Path], None], copy: Copy) -> None:
        run = copy("layouts", "verl-run", "run")
        checkpoint = ckpt_cli.open(run)
        step = Path(checkpoint.path) / "actor"
        change(step / "model_world_size_4_rank_2.pt")
        with pytest.raises(SourceChanged):
            checkpoint["model.embed_tokens.weight"].numpy()

    def test_is_noticed_where_it_is_only_computed_from(self, change: Callable[[Path], None], tmp_path: Path) -> None:
        base = tiny.folder(tmp_path / "base", tiny.weights(1), tiny.unknown())
        adapter = tiny.adapter(tmp_path / "adapter", tiny.factors(), base)
        checkpoint = ckpt_cli.open(adapter, base=base)
        fused, other = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
        assert checkpoint[fused].numpy().shape == (16, 16)
        change(adapter / "adapter_model.safetensors")
        with pytest.raises(SourceChanged):
            checkpoint[fused].numpy()
        assert checkpoint[other].numpy().shape == (16,), "nothing of it lies in that file"

    def test_is_noticed_by_who_reads_everything(
        self, change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "model.safetensors"
        save_file({"a": torch.ones(4, 4), "b": torch.ones(4, 4)}, path)
        read, count = FileSource.read_at, [0]

        def changing(source: FileSource, offset: int, buffer: memoryview) -> None:
            read(source, offset, buffer)
            count[0] += len(buffer) == 64
            if count[0] == 1 and len(buffer) == 64:
                change(path)

        monkeypatch.setattr(FileSource, "read_at", changing)
        calls: list[Callable[[], Any]] = [
            lambda: ckpt_cli.load_state_dict(path),
            lambda: ckpt_cli.show(path, "a", part=":"),
            lambda: ckpt_cli.load_into(_model(), path),
        ]
        for call in calls:
            path.unlink(missing_ok=True)
            save_file({"a": torch.ones(4, 4), "b": torch.ones(4, 4)}, path)
            count[0] = 0
            with pytest.raises(SourceChanged):
                call()


def _model() -> torch.nn.Module:
    model = torch.nn.Module()
    for name in ("a", "b"):
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(4, 4)))
    return model


def test_state_is_of_the_same_save_as_the_weights_beside_it(copy: Copy, tmp_path: Path) -> None:
    run = copy("layouts", "verl-run", "run")

    class Saving(Silent):
        def start(self, total_bytes: int, label: str) -> None:
            for path in run.rglob("extra_state_*_rank_1.pt"):
                replaced(path)

    for call in (ckpt_cli.merge, ckpt_cli.extract_state):
        how: dict[str, Any] = {"with_state": True} if call is ckpt_cli.merge else {"optimizer": True}
        with pytest.raises(SourceChanged) as caught:
            call(run, tmp_path / "out", progress=Saving(), **how)  # type: ignore[operator]
        assert "extra_state" in str(caught.value.path)
        assert not (tmp_path / "out").exists()


def test_items_that_are_inflated_are_watched_too(copy: Copy) -> None:
    folder = copy("layouts", "dcp-options", "zstd")
    checkpoint = ckpt_cli.open(folder)
    name = max(checkpoint, key=lambda each: checkpoint[each].size)
    checkpoint[name].numpy()
    for path in folder.rglob("*.distcp"):
        os.utime(path, ns=(1, 1))
    with pytest.raises(SourceChanged):
        checkpoint[name].numpy()


def test_a_manifest_lists_the_files_that_items_are_inflated_from(copy: Copy, tmp_path: Path) -> None:
    """each once and as it is, so that nobody says of them that they changed."""
    folder = copy("layouts", "dcp-options", "zstd")
    ckpt_cli.merge(folder, tmp_path / "out")
    listed = json.loads((tmp_path / "out" / "ckpt-manifest.json").read_text())["sources"]
    assert [(each["path"], each["size"]) for each in listed] == [
        (str(path), path.stat().st_size) for path in sorted(folder.rglob("*.distcp"))
    ]
    (written,) = (tmp_path / "out").glob("*.safetensors")
    written.write_bytes(written.read_bytes()[:-4] + b"\x01\x02\x03\x04")
    codes = {item.code for item in ckpt_cli.verify(tmp_path / "out", against=folder).findings}
    assert codes
    assert "changed-source" not in codes


def test_what_did_not_change_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4, 4)}, path)
    checkpoint = ckpt_cli.open(path)
    for _ in range(2):
        assert checkpoint["a"].numpy().sum() == 16
        assert checkpoint["a"][:0].numpy().shape == (0, 4)
        checkpoint.close()
