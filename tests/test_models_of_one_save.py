"""Several models in one ``save_state`` of accelerate: each is a component, and none is left out without a word."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

import ckpt_cli
from ckpt_cli.errors import NotFound


@pytest.fixture(params=[True, False], ids=["safetensors", "bin"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """Three models as accelerate saves them."""
    models = [torch.nn.Linear(4, 3) for _ in range(3)]
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(*models)
    accelerator.save_state(str(tmp_path / "step"), safe_serialization=request.param)
    return tmp_path / "step", [dict(model.state_dict()) for model in prepared]


def test_are_components_with_numbers(saved: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path) -> None:
    folder, states = saved
    found = ckpt_cli.detect(folder).checkpoint
    assert [component.name for component in found.components] == ["model", "model_1", "model_2"]
    assert "model_1, model_2 are other models" in {note.code: note.text for note in found.notes}["other-models"]
    for number, state in enumerate(states):
        out = tmp_path / str(number)
        ckpt_cli.merge(folder, out, type=f"model_{number}" if number else None)
        held = load_file(out / "model.safetensors")
        assert held.keys() == state.keys()
        assert all(torch.equal(held[name], state[name]) for name in held)
    assert len(ckpt_cli.merge(folder, tmp_path / "all", type="all").outputs) == 3


def test_the_second_is_not_taken_for_the_first(saved: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path) -> None:
    folder, _ = saved
    first = next(path for path in folder.iterdir() if path.name in ("model.safetensors", "pytorch_model.bin"))
    first.unlink()
    next(path for path in folder.iterdir() if "model_2" in path.name).unlink()
    notes = {note.code: note.text for note in ckpt_cli.merge(folder, tmp_path / "out").checkpoint.notes}
    assert "number 0 is not here" in notes["no-first-model"]


def test_without_the_marks_of_accelerate_they_could_be_the_model(saved: tuple[Path, list[dict[str, torch.Tensor]]], tmp_path: Path) -> None:
    folder, _ = saved
    shutil.copytree(folder, tmp_path / "plain", ignore=shutil.ignore_patterns("random_states*"))
    with pytest.raises(NotFound):
        ckpt_cli.merge(tmp_path / "plain", tmp_path / "out", type="model_1")
    notes = {note.code for note in ckpt_cli.merge(tmp_path / "plain", tmp_path / "out").checkpoint.notes}
    assert "other-model" in notes
