"""An average beside its model, under a prefix: found also where only one of the two has the parts of wrappers in its names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_cli
from tests.tensors import Tensors, differences, load

NAMES = ("embed.weight", "layers.0.w.weight", "layers.1.w.weight")


def tensors(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 8, generator=generator) for name in NAMES}


WRAPPED: dict[str, Callable[[str], str]] = {
    "none": str,
    "compiled layers": lambda name: name.replace("layers.0.", "layers.0._orig_mod."),
    "checkpointed layers": lambda name: name.replace("layers.1.", "layers.1._checkpoint_wrapped_module."),
    "compiled whole": lambda name: f"_orig_mod.{name}",
    "flattened": lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module."),
}


def both(model: Callable[[str], str], prefix: str = "model_ema.") -> Tensors:
    return {model(name): tensor for name, tensor in tensors(0).items()} | {prefix + name: tensor for name, tensor in tensors(1).items()}


def check(path: Path, out: Path) -> None:
    ckpt_cli.merge(path, out / "model")
    ckpt_cli.merge(path, out / "ema", type="ema")
    assert differences(load(out / "model"), tensors(0)) == []
    assert differences(load(out / "ema"), tensors(1)) == []


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp", "nested dcp"])
def test_only_the_model_has_wrappers(kind: str, wrapped: str, tmp_path: Path) -> None:
    state, folder = both(WRAPPED[wrapped]), tmp_path / "in"
    folder.mkdir()
    if kind == "torch":
        torch.save({"state_dict": state}, folder / "checkpoint.pt")
    elif kind == "safetensors":
        save_file(state, folder / "model.safetensors")
    else:
        dcp.save({"model": state} if kind == "nested dcp" else state, checkpoint_id=str(folder), no_dist=True)
    check(folder, tmp_path)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_a_wrapper_around_both(prefix: str, tmp_path: Path) -> None:
    torch.save({"state_dict": {prefix + name: tensor for name, tensor in both(str).items()}}, tmp_path / "checkpoint.pt")
    check(tmp_path / "checkpoint.pt", tmp_path)


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_a_module_that_is_called_like_an_average_is_part_of_the_model(kind: str, tmp_path: Path) -> None:
    state = {**tensors(0), "ema.gate.weight": torch.ones(8, 8)}
    if kind == "torch":
        torch.save({"state_dict": state}, tmp_path / "checkpoint.pt")
    else:
        dcp.save({"model": state}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    ckpt_cli.merge(tmp_path / ("checkpoint.pt" if kind == "torch" else "dcp"), tmp_path / "out")
    assert differences(load(tmp_path / "out"), state) == []
