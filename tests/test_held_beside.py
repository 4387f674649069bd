"""Tensors that are lacking may lie beside what was read: the error names the file, and what its hint says works."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, LfsPointer, MissingShard, MissingTensors
from tests import tiny
from tests.live_models import Tree
from tests.tensors import Tensors, differences, load

WHOLE = tiny.weights()
PART = dict(list(WHOLE.items())[:5])
REST = {name: tensor for name, tensor in WHOLE.items() if name not in PART}
CARRY = "--carry-from-base"


def shards(folder: Path, tensors: Tensors, stem: str, suffix: str) -> Path:
    """A model in two files with an index, as `save_pretrained` writes it."""
    names, listed = list(tensors), dict[str, str]()
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        name = f"{stem}-{number:05d}-of-00002{suffix}"
        held = {each: tensors[each].clone() for each in part}
        torch.save(held, folder / name) if suffix == ".bin" else save_file(held, folder / name, metadata={"format": "pt"})
        listed |= dict.fromkeys(part, name)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = folder / f"{stem}{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": listed}))
    return index


def passed(hint: str | None) -> Path:
    """The path that a hint says to pass."""
    found = re.search(r"pass (\S+|'[^']+')( if that is meant|$)", str(hint))
    assert found is not None, hint
    return Path(shlex.split(found[1])[0])


def refused(path: Path, out: Path, kind: type[CkptError] = MissingTensors, **options: object) -> str:
    with pytest.raises(kind) as caught:
        ckpt_cli.merge(path, out, **options)  # type: ignore[arg-type]
    assert not out.exists()
    return str(caught.value.advice)


@pytest.mark.parametrize("form", ["shards", "bin", "file", "folder", "verl"])
def test_a_whole_form_is_named_and_can_be_merged(form: str, tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "a model", PART)
    if form == "shards":
        shards(folder, WHOLE, "pytorch_model", ".bin")
    elif form == "bin":
        torch.save(WHOLE, folder / "pytorch_model.bin")
    elif form == "file":
        torch.save(WHOLE, folder / "epoch1.pt")
    elif form == "folder":
        tiny.folder(folder / "huggingface", WHOLE)
    else:
        folder = tiny.verl(tmp_path / "a run", PART)
        tiny.folder(folder / "huggingface", WHOLE)
    hint = refused(folder, tmp_path / "out")
    assert "has all of them, and the others with the same values" in hint
    assert CARRY not in hint
    ckpt_cli.merge(passed(hint), tmp_path / "out")
    assert differences(WHOLE, load(tmp_path / "out")) == []


def test_other_values_are_told_and_nothing_is_decided(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "model", PART)
    torch.save(tiny.weights(seed=1), folder / "pytorch_model.bin")
    hint = refused(folder, tmp_path / "out")
    assert hint.startswith("pytorch_model.bin beside it has all of them, but ")
    assert " with other values, so that one of the two may be of another step: pass " in hint
    assert CARRY in hint.partition("if that is meant; if not, ")[2]
    assert passed(hint) == folder / "pytorch_model.bin"


@pytest.mark.parametrize("name", ["rest.safetensors", "lm_head.pt"])
def test_the_rest_in_a_file_of_its_own_is_named(name: str, tmp_path: Path) -> None:
    rest = REST if name == "rest.safetensors" else {"lm_head.weight": WHOLE["lm_head.weight"]}
    folder = tiny.folder(tmp_path / "model", {key: tensor for key, tensor in WHOLE.items() if key not in rest})
    save_file(rest, folder / name) if name.endswith("safetensors") else torch.save(rest, folder / name)
    hint = refused(folder, tmp_path / "out")
    held = "all of them" if len(rest) > 1 else "lm_head.weight"
    assert hint.startswith(f"{name} beside it has {held}: if both are of one save, join them")
    assert CARRY in hint
    tiny.folder(tmp_path / "joined", {**load(folder), **rest})
    ckpt_cli.merge(tmp_path / "joined", tmp_path / "out")
    assert differences(WHOLE, load(tmp_path / "out")) == []


def test_the_larger_part_of_two_is_named(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "model", PART)
    torch.save({"lm_head.weight": WHOLE["lm_head.weight"]}, folder / "lm_head.pt")
    torch.save(WHOLE, folder / "pytorch_model.bin")
    assert refused(folder, tmp_path / "out").startswith("pytorch_model.bin beside it has all of them, and")


@pytest.mark.parametrize("case", ["average", "shape", "damaged", "nothing"])
def test_what_does_not_help_is_not_proposed(case: str, tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "model", {name: tensor for name, tensor in WHOLE.items() if name != "lm_head.weight"})
    if case == "average":
        save_file(WHOLE, folder / "ema.safetensors")
    elif case == "shape":
        torch.save({"lm_head.weight": WHOLE["lm_head.weight"][:-1].clone()}, folder / "lm_head.pt")
    elif case == "damaged":
        (folder / "pytorch_model.bin").write_bytes(b"PK\3\4 no more")
    assert refused(folder, tmp_path / "out").startswith("--base DIR with --carry-from-base 'lm_head.weight'")


def test_in_an_average_of_several(tmp_path: Path) -> None:
    folders = [tiny.folder(tmp_path / f"checkpoint-{number}", PART) for number in (1, 2)]
    for folder in folders:
        torch.save(WHOLE, folder / "pytorch_model.bin")
    with pytest.raises(MissingTensors) as caught:
        ckpt_cli.average(folders, tmp_path / "out", method="linear")
    assert passed(caught.value.hint) == folders[0] / "pytorch_model.bin"


def test_for_a_live_model(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "model", PART)
    torch.save(WHOLE, folder / "pytorch_model.bin")
    model = Tree({name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}, {})
    with pytest.raises(MissingTensors) as caught:
        ckpt_cli.load_into(model, folder)
    ckpt_cli.load_into(model, passed(caught.value.hint))
    assert differences(WHOLE, {name: tensor.detach() for name, tensor in model.named_parameters()}) == []


@pytest.mark.parametrize("case", ["lost", "cut", "pointer"])
def test_beside_files_that_cannot_be_read(case: str, tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "model", None if case == "lost" else WHOLE)
    kind: type[CkptError] = MissingShard
    if case == "lost":
        shards(folder, WHOLE, "model", ".safetensors")
        (folder / "model-00002-of-00002.safetensors").unlink()
    else:
        kind, file = (CorruptFile, folder / "model.safetensors") if case == "cut" else (LfsPointer, folder / "model.safetensors")
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 12345\n".encode()
        file.write_bytes(file.read_bytes()[:20000] if case == "cut" else pointer)
    before = refused(folder, tmp_path / "out", kind)
    assert "pass " not in before
    index = shards(folder, WHOLE, "pytorch_model", ".bin")
    hint = refused(folder, tmp_path / "out", kind)
    other = f"{index.name} beside it is another form of the model and can be read: pass {index}"
    assert hint == f"{before}, or, if it is of the same step: {other}"
    ckpt_cli.merge(passed(hint), tmp_path / "out")
    assert differences(WHOLE, load(tmp_path / "out")) == []


class TestWhatHasTheTensorsAnyway:
    """A hint proposed to join a checkpoint with the base that the same command was given, or with an output of ckpt beside it."""

    @pytest.fixture
    def part(self, tmp_path: Path) -> Path:
        (tmp_path / "run").mkdir()
        torch.save(
            {f"{part}.{name}": tensor for part in ("student", "teacher") for name, tensor in WHOLE.items()}, tmp_path / "run" / "last.pt"
        )
        return tmp_path / "run" / "last.pt"

    def test_is_not_the_base(self, part: Path, tmp_path: Path) -> None:
        base = tiny.folder(part.parent / "base", WHOLE)
        assert "beside it" not in refused(part, tmp_path / "out", base=base)

    def test_is_not_an_output_of_ckpt(self, part: Path, tmp_path: Path) -> None:
        base = tiny.folder(tmp_path / "base", WHOLE)
        ckpt_cli.merge(base, part.parent / "merged")
        assert "beside it" not in refused(part, tmp_path / "out", base=base)

    def test_may_be_another_model_there(self, part: Path, tmp_path: Path) -> None:
        base = tiny.folder(tmp_path / "base", WHOLE)
        tiny.folder(part.parent / "model", WHOLE)
        assert "model/ beside it" in refused(part, tmp_path / "out", base=base)
