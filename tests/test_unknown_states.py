"""Files that are called like training state, under names that no known trainer has: what is not read is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import NotFound


def step(folder: Path, *names: str) -> Path:
    folder.mkdir()
    save_file({"w": torch.ones(3, 2)}, folder / "model.safetensors")
    for name in names:
        torch.save({"last_epoch": 5}, folder / name)
    return folder


def test_beside_known_ones_are_told(tmp_path: Path) -> None:
    folder = step(tmp_path / "checkpoint-5", "scheduler.pt", "optimizer.pt", "rng.pt", "train_state.pt")
    (note,) = [note for note in ckpt_cli.extract_state(folder, tmp_path / "out").notes if note.code == "unknown-state"]
    assert (note.level, note.text.partition(":")[0]) == ("warning", "rng.pt, train_state.pt")


def test_alone_are_named_where_nothing_is_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as refused:
        ckpt_cli.extract_state(step(tmp_path / "checkpoint-5", "lr_scheduler.pt"), tmp_path / "out")
    assert any(text.startswith("lr_scheduler.pt: called like training state") for text in refused.value.details)


def test_none_are_no_news(tmp_path: Path) -> None:
    names = ("scheduler.pt", "optimizer.pt", "scaler.pt", "training_args.bin", "rng_state.pth", "sampler.bin", "data.pt")
    notes = ckpt_cli.extract_state(step(tmp_path / "checkpoint-5", *names), tmp_path / "out").notes
    assert "unknown-state" not in {note.code for note in notes}
