"""What lies beside what is read, and could have been meant: every way of reading a checkpoint tells it, not only a merge."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import ckpt_cli
from tests import tiny

INSIDE = "the folder has weights of its own and 2 step folders"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a training leaves that saves its final model among its steps."""
    for step in (1, 2):
        tiny.folder(tmp_path / "run" / f"checkpoint-{step}", tiny.weights(step), tiny.classless())
    return tiny.folder(tmp_path / "run", tiny.weights(3), tiny.classless())


def opened(run: Path) -> list[str]:
    with ckpt_cli.open(run) as checkpoint:
        return [note.text for note in checkpoint.notes]


def loaded(run: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ckpt_cli.load_state_dict(run)
    return [str(each.message) for each in caught]


def averaged(run: Path) -> list[str]:
    """As the older one: of the newest everything was told."""
    other = tiny.folder(run.parent / "other", tiny.weights(4), tiny.classless())
    return [note.text for note in ckpt_cli.average([run, other], run.parent / "out", dry_run=True).notes]


WAYS: dict[str, Callable[[Path], list[str]]] = {
    "merge": lambda run: [note.text for note in ckpt_cli.merge(run, run.parent / "out", dry_run=True).checkpoint.notes],
    "open": opened,
    "load_state_dict": loaded,
    "show": lambda run: [note.text for note in ckpt_cli.show(run, "model.norm.weight").notes],
    "verify --against": lambda run: [
        note.text for note in ckpt_cli.verify(tiny.folder(run.parent / "same", tiny.weights(3), tiny.classless()), against=run).notes
    ],
    "average": averaged,
}


@pytest.mark.parametrize("way", WAYS)
def test_steps_inside(way: str, run: Path) -> None:
    assert [text for text in WAYS[way](run) if INSIDE in text]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_was_named(way: str, run: Path) -> None:
    assert not [text for text in WAYS[way](run / "checkpoint-2") if "step folder" in text]
