"""ReLoRA: an adapter stands on the model that training restarted from, which lies in ``relora/`` of its step or of one before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.results.checkpoint import NoteInfo
from tests import tiny
from tests.tensors import load

UP = "model.layers.0.mlp.up_proj.weight"


def run_of(tmp_path: Path, *, steps: tuple[int, ...] = (150,), relora: str = "checkpoint-150/relora", bare: bool = False) -> Path:
    """Steps with adapters alone, and a whole model with other values than the first base."""
    base = tiny.folder(tmp_path / "base", tiny.weights())
    for step in steps:
        tiny.adapter(tmp_path / "run" / f"checkpoint-{step}", tiny.factors(step), base)
    tiny.folder(tmp_path / "run" / relora, {name: each + 1 for name, each in tiny.weights().items()}, bare=bare)
    return tmp_path / "run"


def told(notes: tuple[NoteInfo, ...]) -> list[str]:
    about = [note for note in notes if note.code in ("likely-base", "other-folders", "other-model")]
    assert all((note.code, note.level) == ("likely-base", "warning") for note in about)
    return [note.text for note in about]


@pytest.mark.parametrize("given", ["run", "step"])
@pytest.mark.parametrize(
    ("steps", "relora", "text"),
    [
        ((150,), "checkpoint-150/relora", "relora/ holds a model that training restarted from (ReLoRA): it is likely the base"),
        ((100, 150), "checkpoint-100/relora", "checkpoint-100/relora/ holds a model that training restarted from (ReLoRA): it is likely"),
        ((150,), "checkpoint-150/whole", "either the adapters in model are fused into it, or it is their base"),
    ],
    ids=["own", "of a step before", "of another name"],
)
def test_is_named_with_the_command(steps: tuple[int, ...], relora: str, text: str, given: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, steps=steps, relora=relora)
    step, restarted = run / "checkpoint-150", run / relora
    for lora in (None, "export"):
        result = ckpt_cli.merge(run if given == "run" else step, tmp_path / f"out_{lora}", base=tmp_path / "base", lora=lora)  # type: ignore[arg-type]
        (said,) = told(result.checkpoint.notes)
        assert text in said
        assert said.endswith(f"ckpt merge {step} --base {restarted}")
    assert told(ckpt_cli.verify(step).notes)
    # The command is right, and nothing is left to say.
    result = ckpt_cli.merge(step, tmp_path / "right", base=restarted)
    assert not told(result.checkpoint.notes)
    assert torch.equal(load(tmp_path / "right")[UP], tiny.weights()[UP] + 1)


def test_of_a_later_step_may_be_one_that_it_does_not_stand_on(tmp_path: Path) -> None:
    run = run_of(tmp_path, steps=(120, 150))
    (said,) = told(ckpt_cli.merge(run, tmp_path / "out", step=120, base=tmp_path / "base").checkpoint.notes)
    assert "if that was before checkpoint-120, it is the base" in said


def test_the_last_one_before_is_meant(tmp_path: Path) -> None:
    run = run_of(tmp_path, steps=(50, 100, 150, 200), relora="checkpoint-100/relora")
    for step in (50, 200):
        shutil.copytree(run / "checkpoint-100" / "relora", run / f"checkpoint-{step}" / "relora")
    (said,) = told(ckpt_cli.merge(run, tmp_path / "out", step=150, base=tmp_path / "base").checkpoint.notes)
    assert said.startswith("checkpoint-100/relora/ ")


def test_without_a_config_needs_one(tmp_path: Path) -> None:
    run = run_of(tmp_path, bare=True)
    step = run / "checkpoint-150"
    (said,) = told(ckpt_cli.merge(step, tmp_path / "out", base=tmp_path / "base").checkpoint.notes)
    assert said.endswith("once the config.json of the model is in relora/")
    shutil.copy(tmp_path / "base" / "config.json", step / "relora")
    ckpt_cli.merge(step, tmp_path / "right", base=step / "relora")
    assert torch.equal(load(tmp_path / "right")[UP], tiny.weights()[UP] + 1)


def test_what_lacks_the_adapted_weights_is_no_base(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    shutil.rmtree(run / "checkpoint-150" / "relora")
    (run / "checkpoint-150" / "projector").mkdir()
    save_file({"linear.weight": torch.ones(4, 4)}, run / "checkpoint-150" / "projector" / "model.safetensors")
    notes = ckpt_cli.merge(run, tmp_path / "out", base=tmp_path / "base").checkpoint.notes
    assert [note.code for note in notes if note.level == "warning"] == ["other-folders"]


def test_beside_whole_weights_is_none(tmp_path: Path) -> None:
    step = tiny.folder(tmp_path / "run" / "checkpoint-150", tiny.weights())
    tiny.folder(step / "relora", tiny.weights())
    notes = ckpt_cli.merge(tmp_path / "run", tmp_path / "out").checkpoint.notes
    assert "likely-base" not in {note.code for note in notes}
