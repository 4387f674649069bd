"""A model in 16 bits that was gathered beside DeepSpeed's masters is compared with them, whichever of the two is read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from tests.conftest import Copy

Weights = dict[str, torch.Tensor]


def same(weights: Weights) -> Weights:
    return weights


def of_another_step(weights: Weights) -> Weights:
    return {name: tensor + 0.25 if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def without_a_layer(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if ".layers.1." not in name}


def of_another_shape(weights: Weights) -> Weights:
    return {name: tensor[:-1] if name == "model.layers.0.mlp.up_proj.weight" else tensor for name, tensor in weights.items()}


def without_the_tied_head(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}


def of_trainer(copy: Copy, change: Callable[[Weights], Weights], name: str = "model.safetensors") -> Path:
    """A checkpoint of the Trainer at stage 3, with ``stage3_gather_16bit_weights_on_model_save``."""
    folder = copy("deepspeed", "hf-trainer-z3-w2")
    step = folder / "run" / "checkpoint-4"
    weights = change(load_file(folder / "expected16.safetensors"))
    if name.endswith(".bin"):
        torch.save(weights, step / name)
    else:
        save_file(weights, step / name, metadata={"format": "pt"})
    return step


def notes(path: Path, **how: str) -> dict[str, tuple[str, str]]:
    described = ckpt_cli.merge(path, path.parents[2] / "never", dry_run=True, **how).checkpoint
    return {note.code: (note.level, note.text) for note in described.notes}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("type", ["model", "weights16"])
class TestBesideTheShards:
    @pytest.mark.parametrize("change", [same, without_the_tied_head])
    def test_the_same_weights(self, change: Callable[[Weights], Weights], type: str, name: str, copy: Copy) -> None:
        said = notes(of_trainer(copy, change, name), type=type)
        assert "other-model" not in said
        assert said["other-weights"][0] == "info"
        assert said["other-weights"][1].endswith("holds the same weights (samples are equal), and was not used")

    def test_other_values(self, type: str, name: str, copy: Copy) -> None:
        level, text = notes(of_trainer(copy, of_another_step, name), type=type)["other-model"]
        assert level == "warning"
        assert f"{name if type == 'model' else 'global_step4/'} holds the same tensors with other values" in text
        assert text.endswith("one of them may be of another step")


@pytest.mark.parametrize(
    ("change", "how"),
    [(without_a_layer, "without model.layers.1."), (of_another_shape, "other shapes of model.layers.0.mlp.up_proj.weight")],
)
def test_other_names_and_shapes(change: Callable[[Weights], Weights], how: str, copy: Copy) -> None:
    level, text = notes(of_trainer(copy, change))["other-model"]
    assert level == "warning"
    assert f"model.safetensors holds other weights, which were not read: {how}" in text


def test_masters_that_are_not_whole_are_not_compared(copy: Copy) -> None:
    step = of_trainer(copy, same)
    next(step.rglob("*rank_1*optim_states.pt")).unlink()
    level, text = notes(step, type="weights16")["other-model"]
    assert level == "warning"
    assert "was not compared" in text


class TestBesideTheTags:
    """``save_16bit_model`` writes beside the folders of the tags."""

    def test_the_same_weights(self, data: Path) -> None:
        said = ckpt_cli.detect(data / "deepspeed" / "z3-bf16-w2-gather16" / "run").checkpoint.notes
        (note,) = (note for note in said if note.code == "stray-weights")
        assert note.level == "info"
        assert note.text.endswith("holds the same weights (samples are equal), and was not used")

    def test_other_weights(self, copy: Copy) -> None:
        run = copy("deepspeed", "z3-bf16-w2-gather16", "run")
        torch.save(of_another_step(torch.load(run / "pytorch_model.bin")), run / "pytorch_model.bin")
        (note,) = (note for note in ckpt_cli.detect(run).checkpoint.notes if note.code == "stray-weights")
        assert note.level == "warning"
        assert "holds the same tensors with other values" in note.text
        assert "and was not used" in note.text

    def test_what_cannot_be_read(self, copy: Copy) -> None:
        run = copy("deepspeed", "z3-bf16-w2-gather16", "run")
        shutil.copy(run / "latest", run / "pytorch_model.bin")
        (note,) = (note for note in ckpt_cli.detect(run).checkpoint.notes if note.code == "stray-weights")
        assert note.level == "warning"
        assert "was not compared" in note.text


class TestInTheFolderOfATag:
    @pytest.mark.parametrize(("change", "level"), [(same, "info"), (of_another_step, "warning")])
    def test_beside_the_shards(self, change: Callable[[Weights], Weights], level: str, copy: Copy) -> None:
        run = copy("deepspeed", "z3-bf16-w2-gather16", "run")
        tag = run / "global_step3"
        torch.save(change(torch.load(run / "pytorch_model.bin")), tag / "pytorch_model.bin")
        said = [note for note in ckpt_cli.detect(tag).checkpoint.notes if note.code in ("other-model", "other-weights")]
        assert [note.level for note in said] == [level]
        assert ("in another dtype" in said[0].text) == (level == "info")


@pytest.mark.parametrize(("change", "level"), [(same, "info"), (of_another_step, "warning")])
def test_a_folder_that_zero_to_fp32_made_is_compared(change: Callable[[Weights], Weights], level: str, copy: Copy) -> None:
    """DeepSpeed >= 0.16 makes a folder of the name that was meant for the file."""
    folder = copy("deepspeed", "hf-trainer-z3-w2")
    step = folder / "run" / "checkpoint-4"
    (step / "pytorch_model.bin").mkdir()
    torch.save(change(load_file(folder / "expected.safetensors")), step / "pytorch_model.bin" / "pytorch_model.bin")
    told, text = notes(step)["other-weights" if level == "info" else "other-model"]
    assert told == level
    assert "; pytorch_model.bin/ holds the same " in text
    assert "cannot be read" not in text
