"""A step that lost training state which the step before it has."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import NotFound
from tests import tiny

EXTRA = "extra_state_world_size_{}_rank_{}.pt"
OPTIMIZER = "optim_world_size_{}_rank_{}.pt"


def trained(run: Path, *, ranks: int = 1, steps: tuple[int, ...] = (90, 100), role: str = "actor") -> Path:
    """verl, with everything that it saves."""
    for step in steps:
        home = tiny.verl(run, tiny.weights(step), step=step, role=role)
        for rank in range(ranks):
            state = {"lr_scheduler": {"last_epoch": step}, "rng": {"cpu": torch.get_rng_state()}}
            torch.save(state, home / EXTRA.format(ranks, rank))
            torch.save({"state": {}, "param_groups": []}, home / OPTIMIZER.format(ranks, rank))
        torch.save({"epoch": 1}, home.parent / "data.pt")
    return run


def twice(run: Path) -> Path:
    """The run of accelerate with its whole step as both of its steps."""
    shutil.rmtree(run / "checkpoint-14")
    shutil.copytree(run / "checkpoint-7", run / "checkpoint-14")
    return run


def told(path: Path, tmp_path: Path, **options: object) -> list[str]:
    notes = ckpt_cli.extract_state(path, tmp_path / "out", dry_run=True, **options).notes  # type: ignore[arg-type]
    return [note.text for note in notes if note.code == "fewer-states" and note.level == "warning"]


def lose(step: Path, *patterns: str) -> Path:
    for pattern in patterns:
        for path in list(step.rglob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return step


@pytest.mark.parametrize("given", ["", "global_step_100", "global_step_100/actor"])
def test_is_told_of_a_step_that_was_found_and_of_one_that_was_named(tmp_path: Path, given: str) -> None:
    run = trained(tmp_path / "run")
    assert told(run / given, tmp_path) == []
    lose(run / "global_step_100", "extra_state*", "optim_*")
    text = "global_step_100 lacks extra_state_world_size_1_rank_R.pt, optim_world_size_1_rank_R.pt, which global_step_90 has"
    assert told(run / given, tmp_path) == [text]


def test_is_told_of_folders(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(data / "layouts" / "lmms-run" / "run" / "checkpoint-200", run / "checkpoint-200")
    shutil.copytree(run / "checkpoint-200", run / "checkpoint-1000")
    lose(run / "checkpoint-1000", "extra_state", "optimizer")
    lacks = "checkpoint-1000 lacks extra_state/{}, which checkpoint-200 has"
    (text,) = told(run, tmp_path)
    assert text == lacks.format(", optimizer/" if (run / "checkpoint-200" / "optimizer").exists() else "")
    lose(run / "checkpoint-1000", "dataloader_state")
    with pytest.raises(NotFound) as caught:
        ckpt_cli.extract_state(run, tmp_path / "out")
    assert "which checkpoint-200 has" in str(caught.value)


def test_is_told_of_random_states_and_of_an_optimizer_that_is_a_folder(copy: Callable[..., Path], tmp_path: Path) -> None:
    run = twice(copy("layouts", "accelerate", "run"))
    assert told(run, tmp_path, step=14) == []
    lose(run / "checkpoint-14", "rng_state_*", "optimizer_0", "scheduler.pt")
    (text,) = told(run, tmp_path, step=14)
    assert text == "checkpoint-14 lacks rng_state_R.pth, scheduler.pt, optimizer_0/, which checkpoint-7 has"
    assert told(run, tmp_path, step=7) == []


def test_is_told_where_state_is_merged_beside_weights(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    lose(run / "global_step_100", "extra_state*", "optim_*")
    notes = ckpt_cli.merge(run, tmp_path / "out", with_state=True).outputs[0].notes
    assert [note.text for note in notes if note.code == "fewer-states"] == [
        "global_step_100 lacks extra_state_world_size_1_rank_R.pt, which global_step_90 has"
    ]
    lose(run / "global_step_100", "data.pt")
    with pytest.raises(NotFound, match=r"lacks data\.pt, extra_state_world_size_1_rank_R\.pt, which global_step_90 has"):
        ckpt_cli.merge(run, tmp_path / "other", with_state=True)


def test_is_said_where_the_optimizer_is_asked_for(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    lose(run / "global_step_100", "optim_*")
    with pytest.raises(NotFound, match=r"global_step_100 lacks optim_world_size_1_rank_R\.pt, which global_step_90 has"):
        ckpt_cli.extract_state(run, tmp_path / "out", optimizer=True)


def test_other_ranks_and_other_files_of_random_states_are_no_loss(copy: Callable[..., Path], tmp_path: Path) -> None:
    run = trained(tmp_path / "run", steps=(90,), ranks=2)
    lose(run, "model_world_size_1_rank_0.pt")
    trained(run, steps=(100,))
    assert told(run, tmp_path, step=100) == []
    run = twice(copy("layouts", "accelerate", "run"))
    lose(run / "checkpoint-14", "rng_state_*")
    torch.save({"cpu": torch.get_rng_state()}, run / "checkpoint-14" / "rng_state.pth")
    assert told(run, tmp_path, step=14) == []


@pytest.mark.parametrize("other", ["global_step_110", "checkpoint-90", "global_step_90_old"])
def test_only_a_step_before_counts_whose_name_is_alike(tmp_path: Path, other: str) -> None:
    run = trained(tmp_path / "run")
    lose(run / "global_step_100", "extra_state*", "optim_*")
    (run / "global_step_90").rename(run / other)
    assert told(run / "global_step_100", tmp_path) == []


def test_a_component_is_compared_with_itself(tmp_path: Path) -> None:
    run = trained(trained(tmp_path / "run"), role="critic")
    lose(run / "global_step_100" / "critic", "extra_state*")
    assert told(run, tmp_path) == []
    assert told(run, tmp_path, type="critic") == ["global_step_100 lacks extra_state_world_size_1_rank_R.pt, which global_step_90 has"]


def test_what_cannot_be_read_of_the_step_before_is_passed_over(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    lose(run / "global_step_100", "extra_state*")
    torch.save({}, run / "global_step_90" / "actor" / EXTRA.format(4, 0))
    assert told(run, tmp_path) == []


OBJECTS = ("custom_checkpoint_{}.pkl", "scheduler{}.bin", "sampler{}.bin", "dl_state_dict{}.bin", "optimizer{}.bin")


def accelerated(run: Path, *, objects: int, steps: tuple[int, ...] = (1, 2)) -> Path:
    """accelerate's ``save_state`` with several objects of each kind."""
    for step in steps:
        home = tiny.folder(run / f"checkpoint_{step}", tiny.weights(step))
        for pattern, at in ((pattern, at) for pattern in OBJECTS for at in range(objects)):
            name = pattern.format(at if "_{}" in pattern else f"_{at}" if at else "")
            torch.save({"last_epoch": step} if name.startswith("scheduler") else {"any": at}, home / name)
    return run


@pytest.mark.parametrize("pattern", OBJECTS)
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_numbers_of_objects_do_not_stand_for_one_another(tmp_path: Path, pattern: str, lost: int) -> None:
    run = accelerated(tmp_path / "run", objects=3)
    assert told(run, tmp_path) == []
    name = pattern.format(lost if "_{}" in pattern else f"_{lost}" if lost else "")
    lose(run / "checkpoint_2", name)
    assert told(run, tmp_path) == [f"checkpoint_2 lacks {name}, which checkpoint_1 has"]


@pytest.mark.parametrize(
    ("names", "gap"),
    [
        (["custom_checkpoint_1.pkl"], "custom_checkpoint_1.pkl"),
        (["custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl"], "custom_checkpoint_0.pkl, custom_checkpoint_1.pkl"),
        (["scheduler.bin"], "scheduler.bin"),
        (["scheduler_1.bin"], "scheduler_1.bin"),
        (["custom_checkpoint_2.pkl", "sampler.bin", "dl_state_dict_1.bin"], ""),
    ],
)
def test_a_gap_in_the_numbers_of_objects_is_told_without_a_step_before(tmp_path: Path, names: list[str], gap: str) -> None:
    lose(accelerated(tmp_path / "run", objects=3, steps=(7,)) / "checkpoint_7", *names)
    text = f"checkpoint_7 lacks {gap}: objects are counted from 0, and later ones are there"
    assert told(tmp_path / "run", tmp_path) == ([text] if gap else [])


@pytest.mark.parametrize("steps", [(3, 5), (900, 1000)])
def test_numbers_of_steps_are_none_of_objects(tmp_path: Path, steps: tuple[int, int]) -> None:
    for step in steps:
        home = tiny.folder(tmp_path / "run" / f"checkpoint_{step}", tiny.weights(step))
        torch.save({"last_epoch": step}, home / f"scheduler_{step}.pt")
    assert told(tmp_path / "run", tmp_path) == []
