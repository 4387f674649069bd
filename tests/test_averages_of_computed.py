"""Averages of weights that torch computes from several tensors whenever they are used: some of these have no mean."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import ckpt_cli
from ckpt_cli.errors import Unsupported
from tests.tensors import load


def old(of: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Without torch's warning that there is a newer one."""

    def made(module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return of(module)

    return made


def saved(path: Path, model: nn.Module) -> Path:
    torch.save(model.state_dict(), path)
    return path


def trained(path: Path, seed: int, change: Callable[[nn.Module], nn.Module]) -> Path:
    """A layer after some passes of a training, of values that ``seed`` decides."""
    torch.manual_seed(seed)
    model = change(nn.Linear(8, 4)).train()
    for _ in range(2):
        model(torch.randn(2, 8))
    return saved(path, model)


def told(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in result.outputs[0].notes if note.level == "warning"}


def test_masks_of_pruning_are_to_be_equal(tmp_path: Path) -> None:
    kept = torch.ones(4, 8).tril()
    one, like, other = (
        saved(tmp_path / f"{number}.pt", prune.custom_from_mask(nn.Linear(8, 4), "weight", mask))
        for number, mask in enumerate((kept, kept, kept.flip(1)))
    )
    with pytest.raises(Unsupported, match="other masks") as caught:
        ckpt_cli.average([one, other], tmp_path / "out")
    assert caught.value.tensor == "weight_mask"
    ckpt_cli.average([one, other], tmp_path / "last", method="weighted", weights=(0, 1))
    ckpt_cli.average([one, like], tmp_path / "out")
    assert torch.equal(load(tmp_path / "out")["weight_mask"], kept)


@pytest.mark.parametrize(
    ("norm", "names", "remove"),
    [
        (old(nn.utils.spectral_norm), "weight_u, weight_v: ", "remove_spectral_norm"),
        (parametrizations.spectral_norm, "parametrizations.weight.0._u, parametrizations.weight.0._v: ", "remove_parametrizations"),
    ],
    ids=["old", "new"],
)
def test_vectors_of_spectral_norms_are_told(norm: Any, names: str, remove: str, tmp_path: Path) -> None:
    paths = [trained(tmp_path / f"{seed}.pt", seed, norm) for seed in (1, 2)]
    text = told(ckpt_cli.average(paths, tmp_path / "out"))["spectral-vectors"]
    assert text.startswith(names)
    assert "forward passes in training mode" in text
    assert remove in text
    again = saved(tmp_path / "again.pt", nn.Linear(1, 1))
    torch.save(torch.load(paths[0]), again)
    assert "spectral-vectors" not in told(ckpt_cli.average([paths[0], again], tmp_path / "equal"))


@pytest.mark.parametrize("norm", [old(nn.utils.weight_norm), parametrizations.weight_norm, parametrizations.orthogonal])
def test_parameters_of_other_parametrizations_are_averaged(norm: Any, tmp_path: Path) -> None:
    paths = [trained(tmp_path / f"{seed}.pt", seed, norm) for seed in (1, 2)]
    assert "spectral-vectors" not in told(ckpt_cli.average(paths, tmp_path / "out"))
