"""Samples, predictions and the like that an evaluation wrote to the folder of a step are no newer model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.discover.components import component_names
from ckpt_cli.discover.forms.samples import MAX_ASKED, sample_steps
from ckpt_cli.discover.locate import locate
from ckpt_cli.errors import IncompleteError
from tests.conftest import Copy

NAMES = ("model.layers.0.q_proj.weight", "model.embed_tokens.weight")
LATENTS = {"latents": torch.ones(2, 2)}


def run_of(folder: Path, *steps: int) -> Path:
    """A run whose steps are files of torch.save; elements say which step it was."""
    for step in steps:
        (folder / f"step_{step}").mkdir(parents=True)
        torch.save({name: torch.full((2, 2), float(step)) for name in NAMES}, folder / f"step_{step}" / "model.pt")
    return folder


def written(folder: Path, tensors: dict[str, torch.Tensor] = LATENTS, name: str = "latents.safetensors") -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / name)
    return folder


def step_of_merge(path: Path, out: Path) -> tuple[float, list[str]]:
    result = ckpt_cli.merge(path, out)
    told = [note.text for note in result.checkpoint.notes if note.code == "step-skipped"]
    return float(next(iter(load_file(out / "model.safetensors").values()))[0, 0]), told


@pytest.mark.parametrize("name", ["latents.safetensors", "predictions.safetensors", "rollout_30.safetensors"])
def test_a_step_of_samples_alone_is_not_the_newest(tmp_path: Path, name: str) -> None:
    run = run_of(tmp_path / "run", 10, 20)
    written(run / "step_30", name=name)
    value, told = step_of_merge(run, tmp_path / "out")
    assert value == 20
    assert told == [f"step_30 is skipped: its only file, {name}, has none of the 2 tensors of the model in step_20"]
    assert "step_20" in str(ckpt_cli.verify(run).path)
    steps = {step.step: step.problem for step in ckpt_cli.detect(run).checkpoint.steps}
    assert steps[20] is None
    assert name in str(steps[30])


def test_several_steps_of_samples_are_told_of_by_one_that_is_read(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 10)
    for step in (20, 30, 40):
        written(run / f"step_{step}")
    assert step_of_merge(run, tmp_path / "out")[0] == 10
    (run / "step_20" / "latents.safetensors").write_bytes(b"not read")
    assert sorted(path.name for path in sample_steps(locate(run))) == ["step_20", "step_30", "step_40"]


def test_an_average_leaves_it_out(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 10, 20)
    written(run / "step_30")
    ckpt_cli.average(run, tmp_path / "out", last=2)
    assert float(load_file(tmp_path / "out" / "model.safetensors")[NAMES[0]][0, 0]) == 15


def test_of_a_role_the_same(copy: Copy) -> None:
    run = copy("layouts", "verl-run", "run")
    written(run / "global_step_40")
    written(run / "global_step_50" / "actor")
    assert ckpt_cli.detect(run).checkpoint.step == 20


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("model.safetensors", LATENTS),  # a model by its name
        ("my_policy.safetensors", LATENTS),
        ("flow.safetensors", {NAMES[0]: torch.ones(2, 2)}),  # by a name of its tensors
        ("flow.safetensors", {f"module.{NAMES[0]}": torch.ones(2, 2)}),
        ("flow.safetensors", {"lora_unet_q_proj.lora_up.weight": torch.ones(2, 2)}),
    ],
)
def test_what_may_be_the_model_is_the_newest_as_before(tmp_path: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    run = run_of(tmp_path / "run", 10, 20)
    written(run / "step_30", tensors, name)
    assert sample_steps(locate(run)) == {}
    assert ckpt_cli.detect(run).checkpoint.step == 30


def test_what_all_steps_have_is_their_model(tmp_path: Path) -> None:
    for step in (10, 20):
        written(tmp_path / "run" / f"step_{step}", {f"part{step}": torch.full((2, 2), float(step))})
    assert step_of_merge(tmp_path / "run", tmp_path / "out") == (20, [])


def test_whoever_means_the_folder_gets_it(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 10)
    folder = written(run / "step_20")
    assert step_of_merge(folder, tmp_path / "out")[0] == 1
    ckpt_cli.merge(run, tmp_path / "numbered", step=20)
    (run / "step_10" / "model.pt").write_bytes(b"damaged")
    ckpt_cli.merge(run, tmp_path / "unknown")  # nothing to compare it with


def test_where_no_step_is_left_the_hint_is_true(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 10)
    folder = written(run / "step_20")
    with pytest.raises(IncompleteError) as caught:
        component_names(locate(run).checkpoints[-1], None)
    assert str(caught.value.hint).startswith(f"pass {folder}")
    ckpt_cli.merge(folder, tmp_path / "out")


def test_few_other_steps_are_read(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", *range(10, 70, 10))
    written(run / "step_90")
    for step in (60, 50):
        (run / f"step_{step}" / "model.pt").write_bytes(b"damaged")
    assert MAX_ASKED == 2
    assert sample_steps(locate(run)) == {}
