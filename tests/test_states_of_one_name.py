"""Training state that is there twice under one name: nothing of it is lost without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli

MODEL = {"w": torch.ones(3, 2)}


def extracted(path: Path) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """The state in one dict, the files beside it, and the notes by code with their level."""
    out = path.parent / "out"
    notes = ckpt_cli.extract_state(path, out).notes
    return torch.load(out / "extra_state_merged.pt"), [file.name for file in out.iterdir()], {note.code: note.level for note in notes}


@pytest.mark.parametrize(
    ("first", "second", "level"),
    [
        ("scheduler.bin", "scheduler.pt", "warning"),
        ("scaler.bin", "scaler.pt", "warning"),
        ("random_states_0.pkl", "rng_state.pth", "info"),
    ],
)
def test_of_two_programs_in_one_folder_both_are_passed_on(tmp_path: Path, first: str, second: str, level: str) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    save_file(MODEL, folder / "model.safetensors")
    for number, name in enumerate((first, second)):
        torch.save({"last_epoch": number, "cpu": torch.full((4,), number)}, folder / name)
    _, names, codes = extracted(folder)
    assert second in names
    assert codes["second-state"] == level


def test_of_two_programs_that_is_equal_is_no_news(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    save_file(MODEL, folder / "model.safetensors")
    for name in ("scheduler.bin", "scheduler.pt"):
        torch.save({"last_epoch": 5}, folder / name)
    _, names, codes = extracted(folder)
    assert "scheduler.pt" not in names
    assert "second-state" not in codes


def test_several_random_states_of_a_file_are_kept(tmp_path: Path) -> None:
    states = {"rng_state": torch.arange(4), "torch_rng_state": torch.arange(5), "rng_states": [torch.arange(6)]}
    torch.save({"model": MODEL, **states}, tmp_path / "model.pt")
    extra, _, _ = extracted(tmp_path / "model.pt")
    assert torch.equal(extra["rng_rank_0"]["rng_state"], states["rng_state"])
    assert torch.equal(extra["torch_rng_state"], states["torch_rng_state"])
    assert torch.equal(extra["rng_states"][0], states["rng_states"][0])


def test_several_random_states_of_each_rank_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    torch.save({**MODEL}, folder / "pytorch_model.bin")
    for rank in (0, 1):
        torch.save({"rng": {"cpu": torch.arange(4)}, "torch_rng_state": torch.full((3,), rank)}, folder / f"extra_state_rank_{rank}.pt")
    extra, _, _ = extracted(folder)
    assert [extra[f"torch_rng_state_rank_{rank}"][0].item() for rank in (0, 1)] == [0, 1]


def test_values_of_the_weights_file_and_of_ranks_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    torch.save({"model": MODEL, "epoch": 9}, folder / "pytorch_model.bin")
    for rank in (0, 1):
        torch.save({"epoch": 2}, folder / f"extra_state_rank_{rank}.pt")
    extra, _, codes = extracted(folder)
    assert (extra["epoch"], extra["epoch_rank_0"], extra["epoch_rank_1"]) == (9, 2, 2)
    assert "ranks-differ" in codes


def test_values_of_the_weights_file_and_of_one_beside_it_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    torch.save({"model": MODEL, "epoch": 9, "note": "same"}, folder / "pytorch_model.bin")
    torch.save({"epoch": 2, "note": "same"}, folder / "trainer_state.pt")
    extra, _, codes = extracted(folder)
    assert {name: extra[name] for name in extra if name.startswith(("epoch", "note"))} == {
        "epoch": 2,
        "epoch_with_weights": 9,
        "note": "same",
    }
    assert codes["second-state"] == "warning"


def test_a_value_called_like_what_is_made_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    torch.save({"model": MODEL, "rng": {"cpu": torch.arange(4)}}, folder / "pytorch_model.bin")
    torch.save({"cpu": torch.arange(3)}, folder / "rng_state_0.pth")
    extra, _, _ = extracted(folder)
    assert torch.equal(extra["rng"]["cpu"], torch.arange(3))
    assert torch.equal(extra["rng_as_saved"]["cpu"], torch.arange(4))


def test_what_lies_around_a_model_further_down_is_kept(tmp_path: Path) -> None:
    """As composer has it: everything is under ``state``, and random states beside that."""
    state = {
        "model": MODEL,
        "optimizers": {"Adam": {"state": {}, "param_groups": []}},
        "schedulers": {"last_epoch": 3},
        "timestamp": {"batch": 7},
    }
    torch.save({"state": state, "rng": {"cpu": torch.arange(4)}, "timestamp": 5}, tmp_path / "model.pt")
    extra, _, _ = extracted(tmp_path / "model.pt")
    assert (extra["lr_scheduler"], extra["timestamp"], extra["state.timestamp"]) == ({"last_epoch": 3}, 5, {"batch": 7})
    assert "optimizers" not in extra
    assert "rng_rank_0" in extra
