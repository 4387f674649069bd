"""A checkpoint with one tensor in two forms, fused and split: refused, unless one of them is left out by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from tests.architectures import MODELS, answered_here, build
from tests.tensors import differences, load

LAYER = "model.layers.0.mlp.experts."


@pytest.fixture(autouse=True)
def asked_here(quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers answers in this process, which has it already."""
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with its experts fused, and what `save_pretrained` makes of it in ``right``."""
    kind, model_type, options = MODELS["qwen3_moe"]
    built = build(kind, model_type, options)
    built.save_pretrained(tmp_path / "right")
    (tmp_path / "two").mkdir()
    built.config.save_pretrained(tmp_path / "two")
    add(tmp_path / "two", dict(built.state_dict()))
    return tmp_path / "two"


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    before = load(folder) if path.exists() else {}
    save_file({name: tensor.clone().contiguous() for name, tensor in {**before, **tensors}.items()}, path, metadata={"format": "pt"})


def split(folder: Path, names: list[str]) -> list[str]:
    """Add tensors of single experts, as they are on the hub but for one."""
    right = load(folder.parent / "right")
    add(folder, {name: right[name] + 1 for name in names})
    return names


@pytest.mark.parametrize("names", [["0.gate_proj"], ["1.up_proj"], ["0.down_proj"]])
def test_a_single_part_beside_the_fused_one(model: Path, tmp_path: Path, names: list[str]) -> None:
    (name,) = split(model, [f"{LAYER}{each}.weight" for each in names])
    with pytest.raises(Inconsistent, match="get the same name on the hub") as caught:
        ckpt_cli.merge(model, tmp_path / "out")
    assert f"exclude={name!r}" in str(caught.value.hint) or f"--exclude {name}" in str(caught.value.hint)
    output = ckpt_cli.merge(model, tmp_path / "out", exclude=name).outputs[0]
    assert output.dropped[name] == "left out by --exclude"
    assert differences(load(tmp_path / "right"), load(tmp_path / "out")) == []
    assert ckpt_cli.verify(tmp_path / "out", against=model).exit_code == 0


def test_a_pattern_that_matches_both_forms_leaves_out_both(model: Path, tmp_path: Path) -> None:
    split(model, [f"{LAYER}0.gate_proj.weight"])
    ckpt_cli.merge(model, tmp_path / "out", exclude=f"{LAYER}*")
    right = load(tmp_path / "right")
    assert load(tmp_path / "out").keys() == {name for name in right if not name.startswith(LAYER)}


def test_where_nothing_is_there_twice_patterns_are_for_the_names_of_the_output(model: Path, tmp_path: Path) -> None:
    result = ckpt_cli.merge(model, tmp_path / "out", exclude=f"{LAYER}gate_up_proj")
    assert [note.code for note in result.outputs[0].notes if note.code == "unused-pattern"] == ["unused-pattern"]
    assert load(tmp_path / "out").keys() == load(tmp_path / "right").keys()
