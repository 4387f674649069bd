"""Files with an epoch or a word behind the suffix, as FunASR saves them: read where passed, and told beside the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import NotRecognised
from ckpt_cli.formats.torch_files.reader import unmarked


def saved(path: Path, value: float) -> Path:
    torch.save({"epoch": 1, "state_dict": {"encoder.weight": torch.full((3, 4), value)}, "optimizer": {}}, path)
    return path


@pytest.mark.parametrize("mark", ["ep2", "ep1.1000", "best", "avg10", "epoch_3", "1000"])
def test_a_file_that_is_passed_is_read(mark: str, tmp_path: Path) -> None:
    saved(tmp_path / "model.pt", 1)
    path = saved(tmp_path / f"model.pt.{mark}", 2)
    assert ckpt_cli.open(path)["encoder.weight"].torch().unique().item() == 2
    assert mark in Path(ckpt_cli.merge(path, dry_run=True).outputs[0].output).name


def test_files_beside_the_model_are_told(tmp_path: Path) -> None:
    saved(tmp_path / "model.pt", 1)
    saved(tmp_path / "model.pt.ep9", 9)
    saved(tmp_path / "model.pt.best", 8)
    saved(tmp_path / "model.pt.ep10", 1)
    notes = ckpt_cli.detect(tmp_path).checkpoint.notes
    (warning,) = (note.text for note in notes if note.code == "other-model")
    assert "model.pt.best, model.pt.ep9 beside it could also be the model, with other values" in warning
    (info,) = (note.text for note in notes if note.code == "other-weights")
    assert info.startswith("model.pt.ep10: the same weights as model")


@pytest.mark.parametrize("name", ["optimizer.pt.ep2", "model.pt.bak", "model.pt.1", "model.pt.12", "model.pt.tmp", "notes.txt.ep2"])
def test_other_files_are_no_model(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path / name, 1)
    assert unmarked("model.pt.1") == "model.pt.1"
    with pytest.raises(NotRecognised):
        ckpt_cli.open(path)
