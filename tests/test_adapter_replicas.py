"""Ranks that hold other values of one adapter are refused, whatever becomes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from tests.tensors import load

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


def adapter(shift: float = 0) -> dict[str, torch.Tensor]:
    return {f"{LAYER}.lora_A.default.weight": torch.ones(2, 6), f"{LAYER}.lora_B.default.weight": torch.arange(8.0).reshape(4, 2) + shift}


def whole(shift: float = 0, base: float = 0) -> dict[str, torch.Tensor]:
    return {
        f"{LAYER}.base_layer.weight": torch.full((4, 6), float(base)),
        "base_model.model.lm_head.weight": torch.ones(5, 6),
        **adapter(shift),
    }


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(
        {"model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 6), "lm_head.weight": torch.ones(5, 6)}, folder / "model.safetensors"
    )
    return folder


def saved(folder: Path, *states: dict[str, torch.Tensor]) -> Path:
    """Files of ranks, of which each holds all of the adapter, as FSDP with NO_SHARD and DDP have it."""
    (folder / "lora_adapter").mkdir(parents=True)
    for rank, state in enumerate(states):
        torch.save(state, folder / f"model_world_size_{len(states)}_rank_{rank}.pt")
    (folder / "lora_adapter" / "adapter_config.json").write_text(json.dumps(CONFIG))
    return folder


def exported(run: Path, base: Path, out: Path, **options: Any) -> Any:
    return ckpt_cli.merge(run, out, **options)


def exported_of_base(run: Path, base: Path, out: Path, **options: Any) -> Any:
    return ckpt_cli.merge(run, out, base=base, lora="export", **options)


def fused(run: Path, base: Path, out: Path, **options: Any) -> Any:
    return ckpt_cli.merge(run, out, base=base, **options)


def opened(run: Path, base: Path, out: Path, **options: Any) -> Any:
    return ckpt_cli.load_state_dict(run, base=base, **options)


WAYS = (exported, exported_of_base, fused, opened)


@pytest.mark.parametrize("state", [adapter, whole])
@pytest.mark.parametrize("way", WAYS)
def test_other_factors_are_refused(way: Callable[..., Any], state: Callable[..., Any], base: Path, tmp_path: Path) -> None:
    way(saved(tmp_path / "run", state(), state()), base, tmp_path / "out")
    with pytest.raises(Inconsistent, match="ranks 0 and 1 hold different values") as caught:
        way(saved(tmp_path / "mixed", state(), state(1)), base, tmp_path / "none")
    assert caught.value.tensor is not None
    assert "lora_B" in caught.value.tensor
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("way", [fused, opened])
def test_other_weights_below_an_adapter_are_refused(way: Callable[..., Any], base: Path, tmp_path: Path) -> None:
    with pytest.raises(Inconsistent, match="ranks 0 and 1 hold different values"):
        way(saved(tmp_path / "mixed", whole(), whole(base=1)), base, tmp_path / "none")


@pytest.mark.parametrize("way", [exported, fused])
def test_they_can_be_allowed_and_are_told(way: Callable[..., Any], base: Path, tmp_path: Path) -> None:
    result = way(saved(tmp_path / "mixed", adapter(), adapter(1)), base, tmp_path / "out", allow_unequal_replicas=True)
    assert "replicas-differ" in {note.code for note in result.outputs[0].notes if note.level == "warning"}
    assert load(tmp_path / "out")
