"""What lies beside the weights must stay as it is while an output is made, as the weights must: what was compared is what is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import NotFound, SourceChanged
from ckpt_cli.progress import Silent
from tests import tiny
from tests.conftest import Copy


class Held(Silent):
    """A run that is held when its first bytes are written, until something has changed."""

    def __init__(self, change: Callable[[], object]) -> None:
        self._changes = [change]

    def advance(self, done_bytes: int, label: str = "") -> None:
        while self._changes:
            self._changes.pop()()


def with_other(**changes: Any) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **changes})) and None


def same_size(path: Path) -> None:
    """Another content, with size and mtime kept."""
    status, content = path.stat(), path.read_bytes()
    path.write_bytes(content.replace(b"t0", b"tx"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def same_index(path: Path) -> None:
    """Another order of the same tensors: only its times tell."""
    status, content = path.stat(), json.loads(path.read_text())
    content["weight_map"] = dict(reversed(content["weight_map"].items()))
    path.write_text(json.dumps(content, indent=2) + "\n")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def removed(path: Path) -> None:
    path.unlink()


CHANGES = [
    ("config.json", with_other(rope_theta=99999.0)),
    ("tokenizer.json", same_size),
    ("tokenizer_config.json", removed),
    ("generation_config.json", with_other(eos_token_id=7)),
]
each_change = pytest.mark.parametrize(("name", "change"), CHANGES, ids=[name for name, _ in CHANGES])
GENERATION = {"generation_config.json": {"eos_token_id": 1}}


def refused(call: Callable[..., object], path: Path, change: Callable[[Path], None], out: Path, *args: Any, **how: Any) -> None:
    with pytest.raises(NotFound if change is removed else SourceChanged) as caught:
        call(*args, out, progress=Held(lambda: change(path)), **how)
    assert caught.value.path == str(path)
    assert not out.exists()


@each_change
class TestWhatIsCopied:
    def test_in_a_merge(self, name: str, change: Callable[[Path], None], tmp_path: Path) -> None:
        home = tiny.verl(tmp_path / "run", tiny.weights(1), tiny.classless(), GENERATION)
        refused(ckpt_cli.merge, home / "huggingface" / name, change, tmp_path / "out", tmp_path / "run", dtype="bf16")

    def test_in_an_average(self, name: str, change: Callable[[Path], None], tmp_path: Path) -> None:
        paths = [tiny.folder(tmp_path / str(i), tiny.weights(i), tiny.classless(), GENERATION) for i in (1, 2)]
        refused(ckpt_cli.average, paths[1] / name, change, tmp_path / "out", paths)

    def test_in_a_part(self, name: str, change: Callable[[Path], None], tmp_path: Path) -> None:
        home = tiny.verl(tmp_path / "run", tiny.weights(1), tiny.classless(), GENERATION)
        path = home / "huggingface" / name
        refused(ckpt_cli.merge, path, change, tmp_path / "out", tmp_path / "run", part="0/1")
        with pytest.raises(ckpt_cli.CkptError):
            ckpt_cli.publish(tmp_path / "out")


class TestWhatDecides:
    """without being copied."""

    def test_the_config_of_another_source(self, tmp_path: Path) -> None:
        paths = [tiny.folder(tmp_path / str(i), tiny.weights(i), tiny.classless()) for i in (1, 2)]
        refused(ckpt_cli.average, paths[0] / "config.json", with_other(rope_theta=1.0), tmp_path / "out", paths)

    def test_the_config_of_the_base(self, tmp_path: Path) -> None:
        tiny.verl(tmp_path / "run", tiny.weights(1), tiny.classless())
        base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.classless())
        refused(ckpt_cli.merge, base / "config.json", with_other(rope_theta=1.0), tmp_path / "out", tmp_path / "run", base=base)

    def test_the_scale_of_an_adapter(self, tmp_path: Path) -> None:
        base = tiny.folder(tmp_path / "base", tiny.weights(1), tiny.classless())
        path = tiny.adapter(tmp_path / "adapter", tiny.factors(), base)
        refused(ckpt_cli.merge, path / "adapter_config.json", with_other(lora_alpha=64), tmp_path / "out", path, base=base)

    @pytest.mark.parametrize("as_base", [False, True])
    def test_an_index(self, tmp_path: Path, as_base: bool) -> None:
        for name in ("run", "base"):
            tiny.folder(tmp_path / name, tiny.weights(1 if name == "run" else 2), tiny.classless())
            ckpt_cli.merge(tmp_path / name, tmp_path / "split" / name, max_shard_size="1KB")
        run, base = tmp_path / "split" / "run", tmp_path / "split" / "base"
        how = {"base": base} if as_base else {}
        path = (base if as_base else run) / "model.safetensors.index.json"
        refused(ckpt_cli.merge, path, same_index, tmp_path / "out", run, **how)

    def test_the_manifest_of_an_output(self, tmp_path: Path) -> None:
        """It says which adapters are in it, and what was left out."""
        for name in ("run", "base"):
            tiny.folder(tmp_path / name, tiny.weights(1 if name == "run" else 2), tiny.classless())
            ckpt_cli.merge(tmp_path / name, tmp_path / "made" / name)
        run, base = tmp_path / "made" / "run", tmp_path / "made" / "base"
        for folder in (run, base):
            path, change = folder / "ckpt-manifest.json", with_other(fused_adapters=["0"])
            refused(ckpt_cli.merge, path, change, tmp_path / "out", run, base=base)
            refused(ckpt_cli.average, path, change, tmp_path / "out", [run, run], base=base)

    def test_the_metadata_of_dcp(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("layouts", "torchtitan")
        path = next(folder.rglob(".metadata"))
        refused(ckpt_cli.merge, path, lambda each: each.write_bytes(each.read_bytes()) and None, tmp_path / "out", path.parent)

    def test_the_backend_of_megatron(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("megatron", "llama-tp1")
        path = next(folder.rglob("metadata.json"))
        refused(ckpt_cli.merge, path, with_other(sharded_backend="zarr"), tmp_path / "out", path.parent, names="native")

    def test_the_heads_of_meta(self, tmp_path: Path) -> None:
        path = tmp_path / "run" / "consolidated.00.pth"
        path.parent.mkdir()
        torch.save({"layers.0.attention.wo.weight": torch.ones(8, 4)}, path)
        params = path.with_name("params.json")
        params.write_text(json.dumps({"n_heads": 2, "head_dim": 2}))
        refused(ckpt_cli.merge, params, with_other(n_heads=4), tmp_path / "out", path)

    def test_files_of_deepspeed_without_weights(self, copy: Copy, tmp_path: Path) -> None:
        folder = copy("deepspeed", "z3-bf16-w2", "run")
        path = max(folder.rglob("*_model_states.pt"))
        refused(ckpt_cli.merge, path, lambda each: each.write_bytes(each.read_bytes()) and None, tmp_path / "out", folder)

    def test_a_file_of_the_training_state(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """that changes right after it was parsed."""
        run = tiny.folder(tmp_path / "run" / "checkpoint-1", tiny.weights(1), tiny.classless(), {"trainer_state.json": {"global_step": 1}})
        real = json.dumps

        def dumps(*args: Any, **how: Any) -> str:
            (run / "trainer_state.json").write_text('{"global_step": 2}')
            return real(*args, **how)

        monkeypatch.setattr("ckpt_cli.state.folder.json.dumps", dumps)
        with pytest.raises(SourceChanged):
            ckpt_cli.extract_state(tmp_path / "run", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_what_another_step_is_given_meanwhile_is_no_change(tmp_path: Path) -> None:
    home = tiny.verl(tmp_path / "run", tiny.weights(1), tiny.classless())
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("1")

    def save() -> None:
        tiny.verl(tmp_path / "run", tiny.weights(2), tiny.classless(), step=2)
        (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")

    ckpt_cli.merge(tmp_path / "run", tmp_path / "out", progress=Held(save))
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (home / "huggingface" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda path: os.link(path, path.with_name("snapshot")), "its ctime is another, its size and mtime are the same"),
        (lambda path: os.utime(path, ns=(1, 1)), "its mtime is another"),
        (lambda path: path.write_bytes(path.read_bytes() + b"more"), "bytes, not "),
        (lambda path: path.with_name("new").write_bytes(path.read_bytes()) and path.with_name("new").replace(path), "another file is in"),
    ],
    ids=["a link", "a time", "a size", "a file"],
)
def test_what_changed_is_said(change: Callable[[Path], object], told: str, tmp_path: Path) -> None:
    tiny.folder(tmp_path / "run", tiny.weights(1), tiny.classless())
    with ckpt_cli.open(tmp_path / "run") as opened:
        path = tmp_path / "run" / "model.safetensors"
        change(path)
        with pytest.raises(SourceChanged) as caught:
            opened["model.norm.weight"].numpy()
    assert told in caught.value.message
