"""Parts of files as other programs than huggingface_hub leave them: the side files that a base lacks for that are named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.errors import NotFound
from tests import tiny

CODE = "unfinished-download"
LOST = "generation_config.json"


def told(step: Path, base: Path, out: Path) -> str:
    result = ckpt_cli.merge(step, out, base=base)
    return " ".join(note.text for note in result.checkpoint.notes if note.code == CODE)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return tiny.verl(tmp_path / "run", tiny.weights(1)).parent


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny.folder(tmp_path / "hub" / "owner" / "name", tiny.weights(), None, {LOST: {"eos_token_id": 1}})


PARTS = [
    f"._____temp/{LOST}",
    f"../../._____temp/owner/name/{LOST}",
    f"{LOST}.1a2b3c4d.partial",
    f".{LOST}.Xa3bQz",
    f"{LOST}_.gstmp",
    f"{LOST}.6eF3bA12",
    *(f"{LOST}.{ending}" for ending in ("part", "partial", "tmp", "crdownload", "filepart", "aria2", "incomplete")),
]


@pytest.mark.parametrize("part", PARTS)
def test_a_side_file_of_which_only_a_part_is_there_is_named(part: str, step: Path, base: Path, tmp_path: Path) -> None:
    path = base / part
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(base / LOST, path)
    if not part.endswith("aria2"):  # a file with that beside it is refused
        assert told(step, base, tmp_path / "whole") == ""
    (base / LOST).unlink()
    text = told(step, base, tmp_path / "out")
    assert f"{base}: {LOST} is not there" in text
    assert ("modelscope did not finish" in text) is ("temp" in part)


@pytest.mark.parametrize("pointer", [f"{LOST}.dvc", f"{LOST}.nextcloud", f"{LOST}.owncloud", f".{LOST}.icloud"])
def test_a_side_file_that_is_only_pointed_to_is_named(pointer: str, step: Path, base: Path, tmp_path: Path) -> None:
    (base / pointer).touch()
    assert told(step, base, tmp_path / "whole") == ""
    (base / LOST).unlink()
    text = told(step, base, tmp_path / "out")
    assert f"{base}: {LOST} is not there, only {pointer}: the data is elsewhere" in text


@pytest.mark.parametrize("part", ["README.md.part", "trainer_state.json.tmp", "tf_model.h5.partial", "model.safetensors.part", "notes.tmp"])
def test_other_parts_are_none(part: str, step: Path, base: Path, tmp_path: Path) -> None:
    (base / part).touch()
    assert told(step, base, tmp_path / "out") == ""


def test_what_the_run_has_itself_is_not_missed(step: Path, base: Path, tmp_path: Path) -> None:
    (base / "tokenizer.json").rename(base / "tokenizer.json.part")
    assert told(step, base, tmp_path / "out") == ""


def test_an_archive_of_kagglehub_was_not_unpacked_whole(step: Path, base: Path, tmp_path: Path) -> None:
    (base.parent / "name.archive").touch()
    assert "kagglehub did not finish" in told(step, base, tmp_path / "out")
    (base.parent / "name.complete").touch()
    assert told(step, base, tmp_path / "again") == ""


def test_of_versions_of_a_base_one_is_proposed(step: Path, tmp_path: Path) -> None:
    for version in ("1", "2", "10"):
        tiny.folder(tmp_path / "2b" / version, tiny.weights())
    with pytest.raises(NotFound) as caught:
        ckpt_cli.merge(step, tmp_path / "out", base=tmp_path / "2b", match_base=True)
    assert str(caught.value.hint) == f"pass --base {tmp_path / '2b' / '10'}, or another of the models here: 1, 2"
