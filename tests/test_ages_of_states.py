"""Files of a training state that were written hours apart: they may be of different steps, which nothing in them says."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

import ckpt_cli
from tests.conftest import Copy

CODE = "written-apart"


def older(paths: Iterable[Path], hours: float) -> None:
    paths = list(paths)
    assert paths
    for path in paths:
        os.utime(path, (path.stat().st_mtime - hours * 3600,) * 2)


def fresh(folder: Path) -> Path:
    """A copy whose files are all of one time."""
    for path in folder.rglob("*"):
        os.utime(path, (1.7e9, 1.7e9))
    return folder


def told(notes: Iterable[object]) -> list[str]:
    return [note.text for note in notes if note.code == CODE]  # type: ignore[attr-defined]


@pytest.fixture
def step(copy: Copy) -> Path:
    return fresh(copy("layouts", "verl-run", "run", "global_step_20")) / "actor"


def test_of_some_ranks_are_told(step: Path, tmp_path: Path) -> None:
    assert told(ckpt_cli.extract_state(step, tmp_path / "whole").notes) == []
    older(step.glob("extra_state*_rank_1.pt"), 26)
    (text,) = told(ckpt_cli.extract_state(step, tmp_path / "out").notes)
    assert "rank_1.pt is 26 hours older" in text
    assert told(ckpt_cli.merge(step, tmp_path / "merged", with_state=True).outputs[0].notes)


@pytest.mark.parametrize("which", ["optim*_rank_1.pt", "optim*.pt", "extra_state*.pt"])
def test_of_an_optimizer_are_told_with_those_of_the_state(which: str, step: Path, tmp_path: Path) -> None:
    assert told(ckpt_cli.extract_state(step, tmp_path / "whole", optimizer=True).notes) == []
    older(step.glob(which), 26)
    (text,) = told(ckpt_cli.extract_state(step, tmp_path / "out", optimizer=True).notes)
    assert "is 26 hours older" in text
    assert bool(told(ckpt_cli.extract_state(step, tmp_path / "state").notes)) is False


@pytest.mark.parametrize("hours", [0.5, 0.9])
def test_within_an_hour_tell_nothing(hours: float, step: Path, tmp_path: Path) -> None:
    older(step.glob("*_rank_1.pt"), hours)
    assert told(ckpt_cli.extract_state(step, tmp_path / "out", optimizer=True).notes) == []


def test_that_one_process_wrote_may_be_of_any_time(step: Path, tmp_path: Path) -> None:
    (step / "trainer_state.json").write_text('{"global_step": 20}')
    older([step / "trainer_state.json"], 26)
    assert told(ckpt_cli.extract_state(step, tmp_path / "out", optimizer=True).notes) == []
