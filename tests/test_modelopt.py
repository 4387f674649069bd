"""ModelOpt's state beside a checkpoint, which says how the modules of the model were changed, is told wherever it is not written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from tests import tiny


def run_with(path: Path, state: str | None) -> Path:
    for number in (10, 20):
        tiny.folder(path / f"checkpoint-{number}", tiny.weights(number), tiny.config())
    if state is not None and state.endswith("/"):
        (path / state).mkdir()
    elif state is not None:
        torch.save({"modelopt_state_dict": [], "modelopt_version": "0.33.0"}, path / state)
    return path


def told(notes: Any) -> list[str]:
    return [note.text for note in notes if note.code == "modelopt" and note.level == "warning"]


@pytest.mark.parametrize("state", ["checkpoint-20/modelopt_state.pth", "checkpoint-20/modelopt_state/", "modelopt_state_train.pt"])
def test_is_told_by_merge_average_and_verify(state: str, tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", state)
    merged = ckpt_cli.merge(run, tmp_path / "out")
    (text,) = told([*merged.checkpoint.notes, *merged.outputs[0].notes])
    assert text.startswith(Path(state).name)
    assert told(ckpt_cli.verify(tmp_path / "out", against=run / "checkpoint-20").notes)
    averaged = ckpt_cli.average([run / "checkpoint-10", run / "checkpoint-20"], tmp_path / "average")
    assert told([*averaged.checkpoint.notes, *averaged.notes, *averaged.outputs[0].notes])


def test_nothing_is_said_of_a_plain_run(tmp_path: Path) -> None:
    merged = ckpt_cli.merge(run_with(tmp_path / "run", None), tmp_path / "out")
    assert not told([*merged.checkpoint.notes, *merged.outputs[0].notes])
