"""Averages whose newest checkpoint has no config.json: the files beside the weights are those of an older one, which is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ckpt_cli
from tests.tiny import TOKENIZER, classless, folder, weights


def said(result: Any) -> list[tuple[str, str]]:
    return [(note.level, note.text) for note in result.outputs[0].notes if note.code == "fewer-files"]


def test_a_step_that_lost_it_is_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder(run / "checkpoint-10", weights(1), classless())
    folder(run / "checkpoint-20", weights(2), bare=True)
    result = ckpt_cli.average(run, tmp_path / "out", everything=True)
    assert said(result) == [("warning", "step 20 has no config.json: the files beside the weights are those of step 10")]


def test_files_that_are_passed_over_are_told(tmp_path: Path) -> None:
    paths = [folder(tmp_path / "a", weights(1), classless()), folder(tmp_path / "b", weights(2), files=TOKENIZER, bare=True)]
    ((level, text),) = said(ckpt_cli.average(paths, tmp_path / "out"))
    assert level == "warning"
    assert text.endswith(f"those of {paths[0]}, and its tokenizer.json, tokenizer_config.json are not used")


def test_plain_weights_beside_a_folder_are_no_reason_for_a_warning(tmp_path: Path) -> None:
    paths = [folder(tmp_path / "a", weights(1), classless()), folder(tmp_path / "b", weights(2), bare=True)]
    assert [level for level, _ in said(ckpt_cli.average(paths, tmp_path / "out"))] == ["info"]
    assert said(ckpt_cli.average(paths[::-1], tmp_path / "out", overwrite=True)) == []
