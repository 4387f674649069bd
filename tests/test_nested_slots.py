"""Optimizers that keep lists and dicts of tensors of a parameter: SOAP, PSGD-Kron, Distributed Shampoo.

The lines of docs/state.md build them again, and an optimizer that computes with them takes its step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import ckpt_cli
from ckpt_cli.errors import CorruptFile, Inconsistent, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
LINES = (Path(__file__).parents[1] / "docs" / "state.md").read_text()
LARGE = 260
"""A side of a matrix with more elements than optimizer.json takes."""


class Soap(torch.optim.Optimizer):
    """What SOAP does with its state: it projects with the matrices of ``Q``, of which a dimension may have none."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3, "growth": float("inf"), "scales": [torch.ones(2), torch.tensor([0.5, float("inf")])]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            slots, moved = self.state[parameter], torch.ones_like(parameter)
            for matrix in slots["Q"]:
                if len(matrix):
                    moved = torch.tensordot(moved, matrix, dims=[[0], [0]])
            slots["exp_avg"].add_(moved.reshape(parameter.shape) * slots["blocks"]["0"]["left"].sum() * slots["pair"][1])
            parameter.sub_(slots["exp_avg"], alpha=self.param_groups[0]["scales"][1][0].item())


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(4, LARGE, bias=False)
        self.norm = torch.nn.LayerNorm(4)


def slots_of(parameter: torch.Tensor) -> dict[str, Any]:
    matrices = [torch.randn(side, side) for side in parameter.shape] if parameter.dim() > 1 else [[]]
    blocks = {"0": {"left": torch.randn(3, 3), "none": {}}}
    pair = [torch.randn(2, dtype=torch.bfloat16), 2.0]
    return {"exp_avg": torch.zeros_like(parameter), "count": 1, "Q": matrices, "blocks": blocks, "pair": pair}


def trained() -> tuple[Model, Soap]:
    model = Model()
    optimizer = Soap(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = slots_of(parameter)
    return model, optimizer


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [dict, *(leaf for key, item in value.items() for leaf in (key, *leaves(item)))]
    return [type(value), *(leaf for item in value for leaf in leaves(item))] if isinstance(value, (list, tuple)) else [value]


def same(first: Any, second: Any) -> bool:
    pairs = zip(leaves(first), leaves(second), strict=True)
    return all(torch.equal(a, b) and a.dtype == b.dtype if torch.is_tensor(a) else a == b for a, b in pairs)


def sorted_keys(value: Any) -> Any:
    """Dicts in the order of their keys, without the empty ones, which DCP does not write."""
    if isinstance(value, list):
        return [sorted_keys(item) for item in value]
    return {key: sorted_keys(value[key]) for key in sorted(value) if value[key] != {}} if isinstance(value, dict) else value


def in_a_file(folder: Path, model: Model, state: Any) -> Path:
    torch.save({"model": model.state_dict(), "optimizer": state}, folder / "ckpt.pt")
    return folder / "ckpt.pt"


def in_dcp(folder: Path, model: Model, state: Any) -> Path:
    save_dcp({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def loaded(state: Path, model: Model, optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The lines of the documentation, as they are, and what they name."""
    (lines,) = (block.partition("```")[0] for block in LINES.split("```python\n")[1:] if "optimizer.json" in block)
    monkeypatch.chdir(state.parent)
    named = {"model": model, "optimizer": optimizer}
    exec(lines, named)
    return named


@pytest.mark.parametrize("write", [in_a_file, in_dcp])
def test_are_built_again_and_the_optimizer_takes_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, Model, Any], Path]
) -> None:
    model, optimizer = trained()
    wanted = optimizer.state_dict()
    result = ckpt_cli.extract_state(write(tmp_path, model, wanted), tmp_path / "state", optimizer=True)
    assert result.not_represented == ()
    other = Soap(model.parameters())
    built = loaded(tmp_path / "state", model, other, monkeypatch)
    assert same(sorted_keys(built["state"]), sorted_keys(wanted["state"]))
    for option in ("scales", "growth"):
        assert same(other.param_groups[0][option], wanted["param_groups"][0][option])
    oracle = Soap(model.parameters())
    oracle.load_state_dict(wanted)
    oracle.step()
    other.step()
    assert same(sorted_keys(other.state_dict()["state"]), sorted_keys(oracle.state_dict()["state"]))


def test_tuples_and_keys_that_are_numbers_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    for slots in optimizer.state.values():
        slots |= {"pair": tuple(slots["pair"]), "numbered": {0: torch.ones(2), 1: {"tensor": "state.up.weight.exp_avg"}}}
    wanted = optimizer.state_dict()
    ckpt_cli.extract_state(in_a_file(tmp_path, model, wanted), tmp_path / "state", optimizer=True)
    built = loaded(tmp_path / "state", model, torch.optim.SGD(model.parameters()), monkeypatch)
    assert same(sorted_keys(built["state"]), sorted_keys(wanted["state"]))


@pytest.mark.parametrize("change", ["an option", "an array", "a key"])
def test_what_no_file_takes_is_told(tmp_path: Path, change: str) -> None:
    model, optimizer = trained()
    content = optimizer.state_dict()
    if change == "an option":
        content["param_groups"][0]["basis"] = [torch.randn(LARGE, LARGE)]
    elif change == "an array":
        content["state"][0]["history"] = np.zeros((LARGE, LARGE))
    else:
        content["state"][0]["blocks"] = {(0, 1): torch.ones(2)}
    result = ckpt_cli.extract_state(in_a_file(tmp_path, model, content), tmp_path / "state", optimizer=True)
    assert len(result.not_represented) == 1
    assert "only in the .pt file" not in (tmp_path / "state" / "optimizer.json").read_text()


@pytest.mark.parametrize("content", [lambda s: [s, s], lambda s: {"offloaded": [s, s], "on-device": None}], ids=["list", "offloaded"])
def test_several_optimizers_are_called_several(tmp_path: Path, content: Callable[[Any], Any]) -> None:
    model, optimizer = trained()
    with pytest.raises(Unsupported, match="the states of 2 optimizers"):
        ckpt_cli.extract_state(in_a_file(tmp_path, model, content(optimizer.state_dict())), tmp_path / "state", optimizer=True)


def test_places_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    content = optimizer.state_dict()
    content["state"][0]["blocks"] = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    with pytest.raises(CorruptFile, match="cannot be told from others"):
        ckpt_cli.extract_state(in_a_file(tmp_path, model, content), tmp_path / "state", optimizer=True)


def test_a_state_with_a_dot_in_its_name_is_no_damage(tmp_path: Path) -> None:
    """torchrec's have the name of a table in front: ``t_0.momentum1``."""
    model, optimizer = trained()
    content = optimizer.state_dict()
    content["state"][0]["t_0.momentum1"] = torch.ones(2)
    with pytest.raises(Unsupported, match=r"'t_0\.momentum1'"):
        ckpt_cli.extract_state(in_a_file(tmp_path, model, content), tmp_path / "state", optimizer=True)


@pytest.mark.parametrize(("side", "fits"), [(4, True), (2, False)], ids=["whole", "a part"])
def test_matrices_that_several_ranks_hold_alike_are_whole_by_their_sides(tmp_path: Path, side: int, fits: bool) -> None:
    """Equal on all ranks may be replicas, or what each made of its own part."""
    folder = tmp_path / "global_step_7"
    folder.mkdir()
    slots = {"exp_avg": torch.zeros(4, 6), "Q": [torch.eye(side), torch.eye(6)]}
    for rank in range(2):
        torch.save({"w": torch.ones(4, 6)}, folder / f"model_world_size_2_rank_{rank}.pt")
        torch.save({"state": {"w": slots}, "param_groups": [{"params": ["w"]}]}, folder / f"optim_world_size_2_rank_{rank}.pt")
    if not fits:
        with pytest.raises(Inconsistent, match="shape"):
            ckpt_cli.extract_state(folder, tmp_path / "state", optimizer=True)
        return
    ckpt_cli.extract_state(folder, tmp_path / "state", optimizer=True)
    content = json.loads((tmp_path / "state" / "optimizer.json").read_text())
    assert content["state"]["w"]["Q"] == [{"tensor": "state.w.Q.0"}, {"tensor": "state.w.Q.1"}]
