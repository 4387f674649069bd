"""Moments of experts, pipelines and tensor parallelism by parameter, against weights that DeepSpeed itself gathered.

An optimizer of DeepSpeed keeps its moments beside the fp32 weights, element for element. So copies of the saves are given moments that
are functions of the weights at the same place, and what `extract_state` finds must be these functions of the gathered weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from tests.conftest import Copy
from tests.formats.test_deepspeed import changed
from tests.tensors import differences, load

Plant = dict[str, Callable[[torch.Tensor], torch.Tensor]]
PLANTED: Plant = {"exp_avg": lambda weight: -2 * weight, "exp_avg_sq": lambda weight: weight * weight}

CASES = [
    *(f"deepspeed/{case}" for case in ("moe-pr-z2-w4", "moe-pr-z0", "moe-split-groups", "moe-data-first", "tied-autotp")),
    *(f"deepspeed-pipelines/{case}" for case in ("tied-twice-z1", "tied-twice-bf16opt", "tied-twice-frozen")),
]


def plant(state: dict[str, Any], weight: torch.Tensor) -> None:
    for name, function in PLANTED.items():
        state[name].fill_(float("nan"))  # what no parameter has must stay out
        state[name].flatten()[: weight.numel()] = function(weight.float().flatten())


def in_partitions(held: dict[str, Any]) -> None:
    base = held["base_optimizer_state"]
    states = base if isinstance(base, list) else [base["state"][number] for number in sorted(base["state"])]
    for weight, state in zip(held["single_partition_of_fp32_groups"], states, strict=True):
        plant(state, weight)


def in_groups(held: dict[str, Any]) -> None:
    """Stage 0: a weight per parameter."""
    weights = [weight for group in held["fp32_groups"] for weight in group]
    states = held["optimizer_state_dict"]["state"]
    for weight, number in zip(weights, sorted(states), strict=True):
        plant(states[number], weight)


def planted(save: Path) -> None:
    for path in save.rglob("*_states.pt"):
        with changed(path) as content:
            held = content.get("optimizer_state_dict") or content.get("optimizer")
            if isinstance(held, dict) and "single_partition_of_fp32_groups" in held:
                in_partitions(held)
            elif isinstance(held, dict) and "fp32_groups" in held:
                in_groups(held)


@pytest.mark.parametrize("case", CASES)
def test_moments_are_those_of_their_parameters(case: str, copy: Copy, tmp_path: Path) -> None:
    folder = copy(*case.split("/"))
    planted(folder)
    ckpt_cli.extract_state(folder / "run", tmp_path / "out", optimizer=True)
    found = load(tmp_path / "out" / "optimizer.safetensors")
    weights = load(folder / "expected.safetensors")
    moments = {name.removeprefix("state."): tensor for name, tensor in found.items() if not name.endswith(".step")}
    names = {name.rpartition(".")[0] for name in moments}
    wanted = {f"{name}.{slot}": function(weights[name].float()) for name in names for slot, function in PLANTED.items()}
    assert differences(moments, wanted) == []
    left = {name for name in set(weights) - names if weights[name].is_floating_point()}
    assert left == ({"tied_modules.mix.weight"} if case.endswith("frozen") else set())
