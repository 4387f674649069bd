"""Optimizers beside a state dict that keep the weights in fp32: those of the model are read, and that is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli

WEIGHT = torch.randn(4, 4)
STATE = {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(4, 4)}}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "apex": ({"fp32_from_fp16": [[WEIGHT]], "optimizer_state_dict": {"state": STATE}}, "optimizer.fp32_from_fp16"),
    "flat": ({"fp32_groups_flat": [WEIGHT.ravel()]}, "optimizer.fp32_groups_flat"),
    "fused": ({"state": {0: {**STATE[0], "master_param": WEIGHT}}}, "optimizer.state.N.master_param"),
    "plain": ({"state": STATE, "param_groups": [{"lr": 1e-3, "params": [0]}]}, ""),
}


@pytest.mark.parametrize("kind", KINDS)
def test_are_named(tmp_path: Path, kind: str) -> None:
    optimizer, where = KINDS[kind]
    torch.save({"model": {"q.weight": WEIGHT.bfloat16()}, "optimizer": optimizer}, tmp_path / "checkpoint.pt")
    result = ckpt_cli.merge(tmp_path / "checkpoint.pt", tmp_path / "out")
    said = [note.text for note in result.checkpoint.notes if (note.level, note.code) == ("info", "masters")]
    assert len(said) == bool(where)
    assert not said or said[0].startswith(f"{where} may be the weights in fp32")
