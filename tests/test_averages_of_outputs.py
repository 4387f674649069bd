"""Outputs of ckpt among the checkpoints of an average, as `run/checkpoint-*` takes them in: their manifests say what they are."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from tests.cli import ROOT

MIXED, TWICE = "mixed-components", "counted-twice"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(ROOT / "examples" / "tiny-run", "run"))


def told(paths: list[Path], **options: Any) -> dict[str, str]:
    result = ckpt_cli.average(paths, paths[0].parent.parent / "out", overwrite=True, **options)
    return {note.code: note.text for note in result.outputs[0].notes if note.level == "warning"}


def test_an_ema_that_was_merged_is_no_model(run: Path) -> None:
    ckpt_cli.merge(run, run / "checkpoint-ema", type="ema")
    found = told(sorted(run.glob("checkpoint-*")))
    assert re.search(r"model \(\S*checkpoint-100\S*, \S*checkpoint-200\S*\) and ema \(\S*checkpoint-ema\)", found[MIXED])


def test_both_outputs_of_a_merge_are_two_components(run: Path, tmp_path: Path) -> None:
    ckpt_cli.merge(run, tmp_path / "both", type="both")
    assert MIXED in told([tmp_path / "both" / "ema", tmp_path / "both" / "model"])


def test_an_average_of_an_ema_is_an_ema(run: Path, tmp_path: Path) -> None:
    ckpt_cli.average([run / "checkpoint-100", run / "checkpoint-200"], tmp_path / "ema", type="ema")
    assert MIXED in told([run / "checkpoint-200", tmp_path / "ema"])


def test_an_average_beside_its_checkpoints_counts_them_twice(run: Path) -> None:
    steps = [run / "checkpoint-100", run / "checkpoint-200"]
    ckpt_cli.average(steps, run / "checkpoint-mean")
    found = told([*steps, run / "checkpoint-mean"])
    assert re.search(r"checkpoint-mean is itself an average of \S*checkpoint-100\S*, \S*checkpoint-200", found[TWICE])
    assert MIXED not in found
    assert TWICE not in told([*steps, run / "checkpoint-mean"], weights=[0.5, 0.5, 0])


@pytest.mark.parametrize("kind", ["model", "ema"])
def test_outputs_of_one_component_are_averaged_without_a_word(run: Path, tmp_path: Path, kind: str) -> None:
    made = [tmp_path / f"{kind}-{step}" for step in (100, 200)]
    for path, step in zip(made, (100, 200), strict=True):
        ckpt_cli.merge(run, path, step=step, type=kind)
    found = told(made)
    assert MIXED not in found
    assert TWICE not in found


def test_the_ema_of_a_run_and_a_merged_one_are_one_component(run: Path, tmp_path: Path) -> None:
    steps = [run / "checkpoint-100", run / "checkpoint-200"]
    assert MIXED not in told(steps, type="ema")
