"""Models whose parts lie in folders of one step: what a step lost of them, variants of one part, experts in folders of their own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from tests.tensors import load
from tests.tiny import classless, folder

DIFFUSERS = "diffusion_pytorch_model"


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"conv.weight": torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)}


def steps(run: Path, *parts: str) -> list[Path]:
    """Two steps with such folders, each with weights of its own."""
    for step in (10, 20):
        for number, part in enumerate(parts):
            folder(run / f"checkpoint-{step}" / part, tensors(step + number), classless())
    return [run / "checkpoint-10", run / "checkpoint-20"]


def warnings(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in result.checkpoint.notes if note.level == "warning"}


@pytest.mark.parametrize("whole", [False, True], ids=["weights gone", "folder gone"])
@pytest.mark.parametrize(("kept", "lost"), [("query", "passage"), ("unet", "text_encoder"), ("", "vq_tokenizer")])
def test_a_part_that_only_the_step_before_has_is_told(tmp_path: Path, kept: str, lost: str, whole: bool) -> None:
    """What is left of a pair is taken for the model, since it is alone."""
    _, step = steps(tmp_path / "run", kept, lost)
    if whole:
        shutil.rmtree(step / lost)
    else:
        (step / lost / "model.safetensors").unlink()
    said = f"checkpoint-20 has no weights in {lost}/, which checkpoint-10 has there"
    for path in (tmp_path / "run", step):
        assert said in warnings(ckpt_cli.merge(path, tmp_path / "out", overwrite=True))["fewer-components"]
    assert said in {note.code: note.text for note in ckpt_cli.verify(step).notes}["fewer-components"]
    alone = ckpt_cli.merge(step / kept, tmp_path / "out", overwrite=True) if kept else None
    assert alone is None or "fewer-components" not in warnings(alone)


@pytest.mark.parametrize("other", ["pytorch_model_fsdp_0", "eval_samples", "huggingface", "old_model"])
def test_folders_that_are_no_parts_may_come_and_go(tmp_path: Path, other: str) -> None:
    """The weights themselves in another layout, samples, files beside shards, copies."""
    before, step = steps(tmp_path / "run", "")
    folder(before / other, tensors(3), classless())
    assert "fewer-components" not in warnings(ckpt_cli.merge(step, tmp_path / "out"))


def test_parts_with_numbers_in_their_names_are_those_of_other_steps(tmp_path: Path) -> None:
    before, step = steps(tmp_path / "run", "")
    folder(before / "projector-10", tensors(3), classless())
    folder(step / "projector-20", tensors(4), classless())
    assert "fewer-components" not in warnings(ckpt_cli.merge(step, tmp_path / "out"))


def test_one_of_two_parts_that_differ_in_a_number_is_told(tmp_path: Path) -> None:
    _, step = steps(tmp_path / "run", "", "transformer_1", "transformer_2")
    shutil.rmtree(step / "transformer_1")
    assert "no weights in transformer_1/," in warnings(ckpt_cli.merge(step, tmp_path / "out"))["fewer-components"]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("seed", [1, 2], ids=["same", "other"])
def test_a_variant_lies_beside_the_weights_of_a_part(tmp_path: Path, suffix: str, seed: int) -> None:
    """diffusers loads the file without a variant; one of another step is told."""
    part = tmp_path / "unet"
    part.mkdir()
    for name, held in ((f"{DIFFUSERS}.{suffix}", tensors(1)), (f"{DIFFUSERS}.fp16.{suffix}", tensors(seed, torch.float16))):
        torch.save(held, part / name) if suffix == "bin" else save_file(held, part / name)
    result = ckpt_cli.merge(part, tmp_path / "out")
    assert torch.equal(load(tmp_path / "out")["conv.weight"], tensors(1)["conv.weight"])
    assert ("other-model" in warnings(result)) is (seed == 2)


def test_experts_in_folders_are_told(tmp_path: Path) -> None:
    step = folder(tmp_path / "model", tensors(1), classless())
    for number in (0, 1):
        folder(step / "experts" / f"expert_{number}", {"up.weight": torch.ones(4, 4)}, {})
    folder(step / "rank_0", {"queue": torch.ones(4, 4)}, {})
    said = warnings(ckpt_cli.merge(step, tmp_path / "out"))["other-folders"]
    assert said.startswith("experts/expert_0/, experts/expert_1/ hold weights too")


@pytest.mark.parametrize("other", ["passage", "query", "pytorch_model_fsdp_0", ""])
def test_an_average_of_halves_of_a_pair_is_told(tmp_path: Path, other: str) -> None:
    """Each is alone in its step, and so taken for the model."""
    first, second = tmp_path / "a", tmp_path / "b"
    folder(first / "query", tensors(1), classless())
    folder(second / other, tensors(2), classless())
    notes = ckpt_cli.average([first, second], tmp_path / "out").outputs[0].notes
    said = [note.text for note in notes if note.code == "mixed-components"]
    assert len(said) == (other == "passage")
    assert not said or said[0].startswith("query/, passage/: weights from folders of different names")
