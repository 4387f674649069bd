"""Files whose copy did not end: of full size, with zeros or holes where weights should be, or too short."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, NotFound, Unreadable
from ckpt_cli.hub.text_assets import unmarked

ROWS = 600
SIGNS = ("zero-tail", "sparse-file", "unwritten-weights")


def model(folder: Path, **more: torch.Tensor) -> Path:
    folder.mkdir(parents=True)
    tensors = {f"layers.{i}.proj.weight": torch.randn(ROWS, 1000) for i in range(3)} | more
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tear(path: Path, share: float, *, hole: bool = False) -> None:
    """Let a file keep its size, but nothing from a share of it on."""
    size = path.stat().st_size
    at = int(size * share) // 4096 * 4096
    with path.open("r+b") as file:
        if hole:
            file.truncate(at)
            file.truncate(size)
        else:
            file.seek(at)
            file.write(bytes(size - at))


def warnings(result: object) -> list[str]:
    return [note.code for note in result.notes if note.level == "warning" and note.code in SIGNS]  # type: ignore[attr-defined]


class TestATornFile:
    @pytest.mark.parametrize(
        ("share", "code"),
        [(0.1, "zero-tail"), (0.5, "zero-tail"), (0.95, "zero-tail"), (0.7, "sparse-file"), (0.1, "unwritten-weights")],
    )
    def test_is_named_by_merge_and_verify(self, share: float, code: str, tmp_path: Path) -> None:
        hole = code != "zero-tail"
        source = model(tmp_path / "model")
        tear(source / "model.safetensors", share, hole=hole)
        merged = ckpt_cli.merge(source, tmp_path / "out").outputs[0]
        (note,) = [note for note in merged.notes if note.code == code]
        assert note.level == "warning"
        assert note.text.startswith("model.safetensors: ")
        with pytest.raises(CkptError, match="strict"):
            ckpt_cli.merge(source, tmp_path / "strict", strict=True)
        found = {item.code: item.severity for item in ckpt_cli.verify(source, full=True).findings}
        assert found["zero-tail"] == "warning"
        headers = {item.code: item.severity for item in ckpt_cli.verify(source).findings if item.code in SIGNS}
        assert headers == ({code: "warning" if code == "sparse-file" else "error"} if hole else {})

    def test_that_was_never_written_where_a_norm_should_be(self, tmp_path: Path) -> None:
        """The smaller part of a model, whose other weights are whole: zeros that were trained would end at the norm."""
        source = model(
            tmp_path / "model", **{"layers.2.input_layernorm.weight": torch.ones(500), "layers.3.o.weight": torch.randn(300, 1000)}
        )
        tear(source / "model.safetensors", 0.7, hole=True)
        (found,) = [item for item in ckpt_cli.verify(source).findings if item.code in SIGNS]
        assert (found.code, found.severity) == ("sparse-file", "warning")
        tear(source / "model.safetensors", 0.55, hole=True)
        (found,) = [item for item in ckpt_cli.verify(source).findings if item.code in SIGNS]
        assert (found.code, found.severity) == ("unwritten-weights", "error")
        assert "layers.2.input_layernorm.weight" in found.message

    def test_is_named_by_average(self, tmp_path: Path) -> None:
        first, second = model(tmp_path / "a"), model(tmp_path / "b")
        tear(second / "model.safetensors", 0.5)
        result = ckpt_cli.average([first, second], tmp_path / "out", method="uniform")
        assert warnings(result.outputs[0]) == ["zero-tail"]

    def test_of_ranks(self, tmp_path: Path) -> None:
        """One rank's file of distributed safetensors was not copied to the end."""
        source = tmp_path / "model"
        source.mkdir()
        for part in (1, 2):
            tensors = {f"layers.{part}.proj.weight": torch.randn(ROWS, 100)}
            save_file(tensors, source / f"model-0000{part}-of-00002.safetensors", metadata={"format": "pt"})
        tear(source / "model-00002-of-00002.safetensors", 0.5)
        index = {"weight_map": {f"layers.{part}.proj.weight": f"model-0000{part}-of-00002.safetensors" for part in (1, 2)}}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
        (note,) = [note for note in ckpt_cli.merge(source, tmp_path / "out").outputs[0].notes if note.code == "zero-tail"]
        assert note.text.startswith("model-00002-of-00002.safetensors: ")
        assert "layers.2.proj.weight" in note.text


class TestZerosThatSayNothing:
    @pytest.mark.parametrize(
        ("name", "zeros"),
        [
            ("z.embed_tokens.weight", 100),  # a padded vocabulary
            ("zz.lm_head.weight", 300),
            ("z.proj.bias", 0),
        ],
    )
    def test_are_not_named(self, name: str, zeros: int, tmp_path: Path) -> None:
        last = torch.randn(ROWS, 1000) if zeros else torch.zeros(20_000)
        if zeros:
            last[-zeros:] = 0
        source = model(tmp_path / "model", **{name: last})
        assert warnings(ckpt_cli.merge(source, tmp_path / "out").outputs[0]) == []
        found = {item.code: item.severity for item in ckpt_cli.verify(source, full=True).findings}
        assert "zero-tail" not in found
        assert ("zero-rows" in found) == bool(zeros)
        assert [code for code, severity in found.items() if severity == "warning"] == ["lacks-config"]

    @pytest.mark.parametrize("name", ["layers.1.o_proj.weight", "z.lora_B.weight", "z.embed_tokens.weight"])
    def test_holes_of_a_sparse_copy(self, name: str, tmp_path: Path) -> None:
        """``cp --sparse=always`` of layers that were added as zeros, of adapters before their first step, and of padding."""
        rows = 600 if "o_proj" in name else 3000
        source = model(tmp_path / "model", **{name: torch.zeros(rows, 1000)})
        path = source / "model.safetensors"
        content = path.read_bytes()
        path.unlink()
        with path.open("wb") as file:
            for start in range(0, len(content), 4096):
                block = content[start : start + 4096]
                file.seek(start)
                file.write(block if any(block) else b"")
            file.truncate(len(content))
        assert path.read_bytes() == content
        assert "unwritten-weights" not in {item.code for item in ckpt_cli.verify(source).findings}

    def test_small_holes(self, tmp_path: Path) -> None:
        """``cp`` leaves out blocks of zeros that were trained."""
        source = model(tmp_path / "model", **{"a.proj.bias": torch.zeros(100_000)})
        shutil.copytree(source, tmp_path / "copy")
        path = tmp_path / "copy" / "model.safetensors"
        content = path.read_bytes()
        with path.open("wb") as file:
            start = content.index(bytes(400_000)) // 4096 * 4096 + 4096
            file.write(content[:start])
            file.seek(start + 300_000 // 4096 * 4096)
            file.write(content[file.tell() :])
        assert path.read_bytes() == content
        assert warnings(ckpt_cli.merge(tmp_path / "copy", tmp_path / "out").outputs[0]) == []


class TestTexts:
    @pytest.mark.parametrize("name", ["config.json", "generation_config.json", "chat_template.jinja", "tokenizer_config.json"])
    def test_lose_their_byte_order_mark(self, name: str, tmp_path: Path) -> None:
        source = model(tmp_path / "model")
        content = b'{"model_type": "own"}' if name.endswith("json") else b"{{ messages }}"
        (source / name).write_bytes(b"\xef\xbb\xbf" + content)
        wanted = "damaged-config" if name == "config.json" else "damaged-side-file"
        assert wanted in {item.code for item in ckpt_cli.verify(source).findings}
        merged = ckpt_cli.merge(source, tmp_path / "out").outputs[0]
        assert "byte-order-mark" in {note.code for note in merged.notes}
        assert not (tmp_path / "out" / name).read_bytes().startswith(b"\xef\xbb\xbf")
        assert wanted not in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}

    def test_that_cannot_be_opened_are_errors_of_ours(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound):
            unmarked(tmp_path / "none.json")
        (tmp_path / "folder.json").mkdir()
        with pytest.raises(Unreadable):
            unmarked(tmp_path / "folder.json")

    def test_that_no_loader_reads_are_named(self, tmp_path: Path) -> None:
        source = model(tmp_path / "model")
        (source / "tokenizer.json").write_text('{"model": {')
        merged = ckpt_cli.merge(source, tmp_path / "out").outputs[0]
        (note,) = [note for note in merged.notes if note.code == "damaged-asset"]
        assert (note.level, "tokenizer.json" in note.text) == ("warning", True)
        assert ckpt_cli.verify(tmp_path / "out").exit_code == 1


class TestARankFileThatEndsTooEarly:
    """What it should have is known from the files of the other ranks, if they are there and alike."""

    @pytest.fixture
    def step(self, layouts: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(layouts / "lmms-run" / "run" / "checkpoint-200", tmp_path / "step"))

    @pytest.mark.parametrize(("length", "there"), [(8000, "8,000 bytes are there, its end is missing"), (0, "the file is empty")])
    def test_is_compared_with_those(self, step: Path, length: int, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(step.parent)
        ranks = sorted((step / "pytorch_model_fsdp_0").glob("*.pt"))
        whole = ranks[1].stat().st_size
        os.truncate(ranks[1], length)
        for path in (step, Path("step")):
            with pytest.raises(CorruptFile, match=there) as caught:
                ckpt_cli.inspect(path)
            assert Path(str(caught.value.path)).name == ranks[1].name
            assert caught.value.expected == f"about {whole:,} bytes, as the files of the other ranks have"

    def test_is_not_where_none_is_whole_or_none_is_beside_it(self, step: Path, tmp_path: Path) -> None:
        for path in (step / "pytorch_model_fsdp_0").glob("*.pt"):
            os.truncate(path, 8000)
        with pytest.raises(CorruptFile) as caught:
            ckpt_cli.inspect(step)
        assert caught.value.expected is None
        torch.save({"a": torch.ones(5000)}, tmp_path / "model.pt")
        os.truncate(tmp_path / "model.pt", 8000)
        with pytest.raises(CorruptFile, match="8,000 bytes are there") as caught:
            ckpt_cli.inspect(tmp_path / "model.pt")
        assert caught.value.expected is None
