"""Modules that are called like training state, in a DCP folder of a model's own names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_cli
from tests.tensors import Tensors, load

MODEL = {"embed.weight": torch.ones(6, 4), "layers.0.norm.weight": torch.ones(4)}


def merged(tmp_path: Path, held: Tensors) -> Tensors:
    dcp.save(dict(held), checkpoint_id=tmp_path / "run", no_dist=True)
    ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
    return load(tmp_path / "out")


@pytest.mark.parametrize("name", ["scheduler.betas", "optim.scale", "random.freqs", "data_loader.mean"])
def test_that_hold_vectors_alone_are_whole(tmp_path: Path, name: str) -> None:
    held = {**MODEL, name: torch.rand(5), f"{name.partition('.')[0]}.timesteps": torch.arange(3)}
    assert merged(tmp_path, held).keys() == held.keys()


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("rng_state", torch.ones(16, dtype=torch.uint8)),
        ("optim.state.embed.weight.master", torch.ones(4)),
        ("optim.exp_avg.layers.0.norm.weight", torch.ones(4)),
        ("scheduler.last_epoch", torch.tensor(3.0)),
    ],
)
def test_state_is_no_module(tmp_path: Path, name: str, state: torch.Tensor) -> None:
    assert merged(tmp_path, {**MODEL, name: state}).keys() == MODEL.keys()
