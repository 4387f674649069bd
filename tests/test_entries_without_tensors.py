"""Something else where a parameter's tensor is expected: its name is there, so that no count of names misses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from tests.conftest import Copy
from tests.formats.test_deepspeed import changed
from tests.tensors import load


def warned(path: Path, out: Path) -> list[str]:
    result = ckpt_cli.merge(path, out)
    notes = [*result.checkpoint.notes, *result.outputs[0].notes]
    return [note.text for note in notes if (note.level, note.code) == ("warning", "left-out")]


def one_file(folder: Path, state: dict[str, Any]) -> Path:
    torch.save(state, folder / "model.pt")
    return folder / "model.pt"


def rank_files(folder: Path, state: dict[str, Any]) -> Path:
    for rank in range(2):
        torch.save(state, folder / f"model_world_size_2_rank_{rank}.pt")
    return folder


@pytest.mark.parametrize("save", [one_file, rank_files])
@pytest.mark.parametrize(("instead", "told"), [(None, "None"), (3, "3"), ([1.0, 2.0], "list of 2")])
def test_is_a_warning(save: Callable[[Path, dict[str, Any]], Path], instead: object, told: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    path = save(tmp_path / "run", {"embed.weight": torch.ones(3, 2), "norm.weight": instead})
    (text,) = warned(path, tmp_path / "out")
    assert text.startswith(f"norm.weight ({told}): ")
    assert set(load(tmp_path / "out")) == {"embed.weight"}


@pytest.mark.parametrize("beside", [{"norm.kind": None}, {"lora.bias": "none"}, {"bias": None}, {"norm.weight": True}])
def test_settings_are_none(beside: dict[str, Any], tmp_path: Path) -> None:
    assert warned(one_file(tmp_path, {"embed.weight": torch.ones(3, 2), **beside}), tmp_path / "out") == []


def test_of_deepspeed_counts_only_where_the_optimizer_lacks_it_too(copy: Copy, tmp_path: Path) -> None:
    run = copy("deepspeed", "universal-z1-w3", "run")
    with changed(run / "global_step3/mp_rank_00_model_states.pt") as content:
        content["module"] |= {"layers.0.up.weight": None, "tower.weight": None}
    (text,) = warned(run, tmp_path / "out")
    assert text.startswith("tower.weight (None): ")
    assert "layers.0.up.weight" in load(tmp_path / "out")
