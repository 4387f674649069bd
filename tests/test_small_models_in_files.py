"""A model in a trainer's file is found by its key, and beside random states that are larger than it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli

MODEL = {f"conv.{layer}.weight": torch.full((4, 4), float(layer)) for layer in range(3)}
OPTIMIZER = torch.optim.Adam(torch.nn.Linear(2, 2).parameters()).state_dict()


def joey(model: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A file as JoeyNMT saves it (``training.py``)."""
    counts = {"steps": 100, "total_tokens": 5, "best_ckpt_score": 1.0, "best_ckpt_iteration": 100, "total_correct": 3}
    state = {"optimizer_state": OPTIMIZER, "scaler_state": None, "scheduler_state": {}, "train_iter_state": torch.get_rng_state()}
    return {**counts, "model_state": model, **state}


class TestASmallModel:
    @pytest.mark.parametrize("key", ["train_iter_state", "rng_state", "data_state", "random_state"])
    @pytest.mark.parametrize("model", ["model_state", "model_state_dict", "network"])
    def test_is_read_beside_a_larger_state(self, tmp_path: Path, model: str, key: str) -> None:
        torch.save({"steps": 1, model: MODEL, key: torch.get_rng_state()}, tmp_path / "100.ckpt")
        assert ckpt_cli.load_state_dict(tmp_path / "100.ckpt").keys() == MODEL.keys()

    def test_of_joeynmt_is_merged_and_averaged(self, tmp_path: Path) -> None:
        first, second = tmp_path / "100.ckpt", tmp_path / "200.ckpt"
        torch.save(joey(MODEL), first)
        torch.save(joey({name: tensor + 2 for name, tensor in MODEL.items()}), second)
        ckpt_cli.merge(first, tmp_path / "out")
        ckpt_cli.average([first, second], tmp_path / "mean")
        mean = ckpt_cli.load_state_dict(tmp_path / "mean")
        assert all(torch.equal(mean[name], tensor + 1) for name, tensor in MODEL.items())

    def test_is_not_looked_for_below_loose_weights(self, tmp_path: Path) -> None:
        """What may be the model itself, beside a smaller dict, is not left out for it."""
        torch.save({"embedding.weight": torch.rand(9, 9), "model_state": MODEL}, tmp_path / "model.pt")
        with pytest.raises(ckpt_cli.CkptError):
            ckpt_cli.load_state_dict(tmp_path / "model.pt")
