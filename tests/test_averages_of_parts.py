"""An average of a part of a model, at any depth, beside the model in one state dict: found in all formats by one mechanism."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.formats.torch_files.averages import split_average
from tests.tensors import Tensors, differences, load

NAMES = ("embed.weight", "layers.0.w.weight", "layers.0.w.bias", "layers.1.w.weight")


def tensors(seed: int, start: str = "") -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {start + name: torch.randn(*([4, 4] if name.endswith("weight") else [4]), generator=generator) for name in NAMES}


def flat(part: str) -> Tensors:
    return {"model_ema." + name.replace(".", ""): tensor for name, tensor in tensors(1, part).items()}


NUMBERS = {"initted": torch.tensor(True), "step": torch.tensor(7)}
BESIDE = {"vae.encoder.weight": torch.ones(4, 4)}

PLACES: dict[str, tuple[str, Tensors, Tensors]] = {
    "stable-audio-tools": (
        "diffusion.model.",
        tensors(1, "diffusion_ema.ema_model.") | {f"diffusion_ema.{name}": number for name, number in NUMBERS.items()},
        {"diffusion.pretransform.weight": torch.ones(4, 4)},
    ),
    "torch's, of a part": ("net.unet.", tensors(1, "ema.module.") | {"ema.n_averaged": torch.tensor(3)}, BESIDE),
    "LitEma": ("model.diffusion_model.", flat("diffusion_model.") | {"model_ema.num_updates": torch.tensor(3)}, BESIDE),
    "LitEma of a part": ("model.net.inner.", flat("") | {"model_ema.num_updates": torch.tensor(3)}, BESIDE),
    "beside its part": ("system.net.", tensors(1, "system.net_ema.") | {"system.net_ema.step": torch.tensor(3)}, BESIDE),
    "after its part": (
        "generator.",
        tensors(1, "generator_ema.") | {"generator_ema.n_averaged": torch.tensor(3)},
        tensors(2, "critic.") | tensors(3, "discriminator."),
    ),
}


def written(kind: str, state: Tensors, folder: Path) -> Path:
    folder.mkdir()
    if kind == "torch":
        torch.save({"state_dict": state, "global_step": 7}, folder / "last.ckpt")
    elif kind == "deepspeed":
        torch.save({"module": state}, folder / "mp_rank_00_model_states.pt")
    elif kind == "safetensors":
        save_file(state, folder / "model.safetensors")
    else:
        dcp.save({"model": state}, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["torch", "deepspeed", "safetensors", "dcp"])
def test_the_average_of_a_part(kind: str, place: str, tmp_path: Path) -> None:
    part, average, others = PLACES[place]
    folder = written(kind, {**others, **tensors(0, part), **average}, tmp_path / "in")
    ckpt_cli.merge(folder, tmp_path / "model")
    assert differences(load(tmp_path / "model"), others | tensors(0, part)) == []
    ckpt_cli.merge(folder, tmp_path / "ema", type="ema", allow_missing=["*"])
    assert differences(load(tmp_path / "ema"), tensors(1, part)) == []


@pytest.mark.parametrize("kind", ["torch", "deepspeed", "safetensors", "dcp"])
def test_what_may_be_a_part_of_the_model_is_written_and_told(kind: str, tmp_path: Path) -> None:
    state = {**BESIDE, **tensors(0, "system.net."), **tensors(1, "system.net_ema.")}
    folder = written(kind, state, tmp_path / "in")
    notes = ckpt_cli.merge(folder, tmp_path / "model").checkpoint.notes
    assert differences(load(tmp_path / "model"), state) == []
    assert "4 tensors under system.net_ema. could be an average" in next(note.text for note in notes if note.code == "average-or-part")


def test_averages_of_several_parts_are_one(tmp_path: Path) -> None:
    model = tensors(0, "unet.") | tensors(2, "text_encoder.")
    state = {**model, **tensors(1, "unet_ema."), **tensors(3, "text_encoder_ema.")}
    ckpt_cli.merge(written("torch", state, tmp_path / "in"), tmp_path / "model")
    ckpt_cli.merge(tmp_path / "in", tmp_path / "ema", type="ema")
    assert differences(load(tmp_path / "model"), model) == []
    assert differences(load(tmp_path / "ema"), tensors(1, "unet.") | tensors(3, "text_encoder.")) == []


def test_a_second_average_of_the_same_part_is_told(tmp_path: Path) -> None:
    second = tensors(3, "net_ema2.")
    state = {**second, **tensors(1, "net_ema1."), **tensors(0, "net.")}
    notes = ckpt_cli.merge(written("torch", state, tmp_path / "in"), tmp_path / "model").checkpoint.notes
    told = next(note.text for note in notes if note.code == "average-or-part")
    assert told.startswith("4 tensors under net_ema1. are an average of the others by their names")
    assert told.endswith("; --exclude 'net_ema1.*' leaves them out")
    ckpt_cli.merge(tmp_path / "in", tmp_path / "ema", type="ema")
    assert differences(load(tmp_path / "ema"), tensors(3, "net.")) == []


MODULES = {
    "a gate in each layer": (
        "layers.{}.attn.o.weight",
        "layers.{}.attn.o.bias",
        "layers.{}.attn.ema_gate.weight",
        "layers.{}.attn.ema_gate.bias",
    ),
    "twins in each layer": ("layers.{}.mlp.in.weight", "layers.{}.mlp_ema.in.weight"),
    "a gate of numbers": ("net.in{}.weight", "net.norm.alpha", "net.norm.beta", "ema_gate.alpha", "ema_gate.beta"),
    "a part of both": ("net.ema_gate.in.weight", "net.{}.weight", "net_ema.ema_gate.other.weight"),
    "a gate of a name that is everywhere": ("layers.{}.attn.weight", "top.attn{}.weight", "ema_gate.weight"),
}


@pytest.mark.parametrize("module", MODULES)
def test_modules_that_are_called_like_averages(module: str) -> None:
    assert split_average({name.format(layer): None for layer in range(3) for name in MODULES[module]}) is None
