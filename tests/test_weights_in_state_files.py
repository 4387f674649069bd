"""Averages, other models and statistics that lie in files called like training state: left out, and said to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli

SCHEDULER = {"last_epoch": 3, "_last_lr": [0.1], "base_lrs": [0.1]}


def told(folder: Path) -> list[str]:
    return [note.text for note in ckpt_cli.detect(folder).checkpoint.notes if note.code == "other-weights" and note.level == "warning"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.save({"lin.weight": torch.ones(4, 4), "lin.bias": torch.ones(4)}, tmp_path / "pytorch_model.bin")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["trainer_state.pt", "train_state.bin", "extra_state.pt", "extra_state_world_size_1_rank_0.pt", "training_state.pt"]
)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ema", {"lin.weight": torch.ones(4, 4), "lin.bias": torch.ones(4)}),
        ("teacher", {"lin.weight": torch.ones(4, 4)}),
        ("obs_rms", {"mean": torch.ones(3), "var": torch.ones(3)}),
        ("reward_scaler", 3.5),
    ],
)
def test_are_told_whatever_the_file_is_called(name: str, key: str, value: Any, run: Path) -> None:
    torch.save({"lr_scheduler": SCHEDULER, "step": 3, key: value}, run / name)
    (text,) = told(run)
    assert name in text
    assert key in text


def test_of_the_files_of_ranks_the_first_tells(run: Path) -> None:
    for rank in range(2):
        torch.save({"ema": {"lin.weight": torch.ones(4, 4)}}, run / f"extra_state_world_size_2_rank_{rank}.pt")
    assert len(told(run)) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trainer_state.pt", {"optimizer": {"state": {0: {"exp_avg": torch.ones(4, 4)}}, "param_groups": []}, "lr_scheduler": SCHEDULER}),
        ("extra_state.pt", {"rng": {"cpu": torch.zeros(64, dtype=torch.uint8)}, "step": torch.tensor(3), "grad_scaler": {"scale": 2.0}}),
        ("train_state.pt", {"losses": torch.ones(9), "mean_loss": 0.5, "dataloader": {"order": torch.ones(4, 4)}}),
        ("scaler.pt", {"scale": 65536.0, "growth_factor": 2.0}),
        ("rng_state_0.pth", {"cpu": torch.zeros(64, dtype=torch.uint8), "numpy": ("MT19937", [1, 2], 3)}),
        ("optimizer.pt", {"state": {0: {"exp_avg": torch.ones(4, 4)}}, "param_groups": []}),
    ],
)
def test_training_state_is_no_news(name: str, content: Any, run: Path) -> None:
    torch.save(content, run / name)
    assert told(run) == []
