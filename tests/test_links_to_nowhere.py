"""Files beside the weights that are links to nowhere: their targets may be on a disk that is not mounted, so they are not absent."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckpt_cli
from tests.conftest import Copy

TOKENIZER, CONFIG = "tokenizer.json", "config.json"
NOWHERE = "/mnt/lost/blob"


@pytest.fixture
def model(copy: Copy) -> Path:
    return copy("layouts", "plain-files", "hub")


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Path:
    """The weights alone."""
    (tmp_path / "run").mkdir()
    for path in model.glob("model*"):
        shutil.copy(path, tmp_path / "run")
    return tmp_path / "run"


def break_link(path: Path) -> str:
    path.unlink(missing_ok=True)
    path.symlink_to(NOWHERE)
    return f"{path} is a link to {NOWHERE}, which does not exist"


def told(path: Path, **options: Path) -> list[str]:
    result = ckpt_cli.merge(path, path.parent / "out", dry_run=True, names="native", **options)
    return [note.text for note in result.outputs[0].notes if note.code == "lacks-asset"]


def test_of_a_base_are_not_what_it_does_not_have(model: Path, run: Path) -> None:
    said = break_link(model / TOKENIZER)
    assert told(run, base=model) == [f"the output has no tokenizer: {said}"]


def test_of_a_base_that_has_neither(model: Path, run: Path) -> None:
    said = [break_link(model / name) for name in (CONFIG, TOKENIZER)]
    (text,) = told(run, base=model)
    assert text == f"the output has no config.json and no tokenizer: {said[0]}; {said[1]}"


def test_of_a_run_are_said_where_those_of_a_base_are_taken(model: Path, run: Path) -> None:
    said = break_link(run / CONFIG)
    assert told(run, base=model) == [f"{said}: {model / CONFIG} was taken"]


def test_of_other_files_are_said_as_well(model: Path) -> None:
    said = break_link(model / "generation_config.json")
    assert told(model) == [said]


def test_of_files_that_are_no_assets_are_nothing(model: Path, run: Path) -> None:
    break_link(model / "README.md")
    break_link(run / "events.log")
    break_link(run / "train.py")
    assert told(run, base=model) == []


def test_what_is_nowhere_is_still_asked_of_a_base(run: Path) -> None:
    assert told(run) == ["the output has no config.json and no tokenizer: pass --base DIR with the model that training started from"]
