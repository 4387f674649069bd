"""Large files beside the weights: state, decoders. Their bytes are read with `--full` only, but their sizes are told by every `verify`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.state.folder import EXTRA
from tests.conftest import Copy


def errors(folder: Path) -> list[tuple[str, str | None]]:
    return [(item.code, item.file) for item in ckpt_cli.verify(folder).of_severity("error")]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lengthened(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(8))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def of_an_older_manifest(folder: Path) -> Path:
    manifest = folder / "ckpt-manifest.json"
    content = json.loads(manifest.read_text())
    del content["side_sizes"]
    manifest.write_text(json.dumps(content))
    return folder


@pytest.fixture
def merged(layouts: Path, tmp_path: Path) -> Path:
    ckpt_cli.merge(layouts / "verl-run" / "run", tmp_path / "out", with_state=True)
    assert errors(tmp_path / "out") == []
    return tmp_path / "out"


@pytest.mark.parametrize("name", [EXTRA, "data.pt"])
@pytest.mark.parametrize("damage", [cut, lengthened, emptied])
def test_a_state_of_another_size_is_found(merged: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(merged / name)
    assert ("changed-size", name) in errors(merged)


def test_a_state_that_was_extracted_is_checked_too(layouts: Path, tmp_path: Path) -> None:
    ckpt_cli.extract_state(layouts / "lmms-run" / "run", tmp_path / "state", optimizer=True)
    cut(tmp_path / "state" / EXTRA)
    assert ("changed-size", EXTRA) in errors(tmp_path / "state")


def test_an_older_manifest_says_no_sizes_so_that_the_end_of_an_archive_is_looked_at(merged: Path) -> None:
    assert errors(of_an_older_manifest(merged)) == []
    cut(merged / EXTRA)
    assert errors(merged) == [("damaged-file", EXTRA)]


def test_what_was_there_before_has_no_size(copy: Copy) -> None:
    run = copy("layouts", "verl-run", "run")
    actor = run / "global_step_20" / "actor"
    (actor / "training_state.json").write_text("{}")
    ckpt_cli.merge(run, with_state=True, in_place=True)
    sizes = json.loads((actor / "ckpt-manifest.json").read_text())["side_sizes"]
    assert "training_state.json" not in sizes
    assert sizes[EXTRA] == (actor / EXTRA).stat().st_size
