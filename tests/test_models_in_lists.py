"""State dicts in lists of a DCP save: each has a name that a person understands, and that --type takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_cli
from tests.tensors import load

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def model(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return dict(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)).state_dict())


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "one each": ({"model": model(0), "emas": [model(1)], "critics": [model(2)]}, ["model", "critics", "emas"]),
    "several": ({"model": model(0), "emas": [model(1), model(2)]}, ["model", "emas", "emas_1"]),
    "nothing else": ({"models": [model(0), model(1), model(2)]}, ["models", "models_1", "models_2"]),
    "further down": ({"app": {"nets": [model(0), model(1)]}}, ["nets", "nets_1"]),
    "blocks of one model": ({"blocks": [model(0), model(1)]}, ["model"]),
}


@pytest.mark.parametrize("case", CASES)
def test_have_names(tmp_path: Path, case: str) -> None:
    state, names = CASES[case]
    dcp.save(state, checkpoint_id=str(tmp_path / "run"))
    assert [component.name for component in ckpt_cli.detect(tmp_path / "run").checkpoint.components] == names


def test_are_merged_by_name(tmp_path: Path) -> None:
    models = [model(seed) for seed in range(3)]
    dcp.save({"model": models[0], "emas": models[1:]}, checkpoint_id=str(tmp_path / "run"))
    for name, wanted in zip((None, "emas", "emas_1"), models, strict=True):
        ckpt_cli.merge(tmp_path / "run", tmp_path / str(name), type=name)
        held = load(tmp_path / str(name))
        assert held.keys() == wanted.keys()
        assert all(torch.equal(held[key], wanted[key]) for key in wanted)
