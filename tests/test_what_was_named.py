"""A file that was passed is what is meant, and what is said to be done next can be done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.cli import _run
from ckpt_cli.errors import UsageError
from tests.test_steps import model, ranks

BESIDE = {"other-folders", "other-model", "other-weights", "adapters-beside", "unread"}


def models_beside(folder: Path) -> None:
    """Models that have nothing to do with the file, each with a config."""
    for name, value in (("a1", 1.0), ("checkpoint_old", 2.0)):
        (model(folder / name, value) / "config.json").write_text('{"model_type": "own"}')
    (model(folder / "lora", 3.0) / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize("name", ["p2.pt", "model.safetensors", "pytorch_model.bin"])
def test_nothing_is_said_of_what_lies_beside_a_file(tmp_path: Path, name: str) -> None:
    models_beside(tmp_path)
    weights = {"w": torch.full((4, 4), 5.0)}
    for file in (tmp_path / "p9.pt", tmp_path / "p2.pt", tmp_path / "pytorch_model.bin"):
        torch.save(weights, file)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    merged = ckpt_cli.merge(tmp_path / name, tmp_path / "out", dry_run=True)
    averaged = ckpt_cli.average([tmp_path / "a1", tmp_path / name], tmp_path / "out", dry_run=True)
    for notes in (merged.checkpoint.notes, averaged.checkpoint.notes, averaged.notes, ckpt_cli.inspect(tmp_path / name).checkpoint.notes):
        assert [note.text for note in notes if note.code in BESIDE] == []


def test_what_lies_beside_the_model_of_a_folder_is_named(tmp_path: Path) -> None:
    models_beside(tmp_path)
    save_file({"w": torch.full((4, 4), 5.0)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert {note.code for note in ckpt_cli.inspect(tmp_path).checkpoint.notes} & BESIDE


@pytest.mark.parametrize("other", ["run", "run/global_step_10"])
def test_the_folder_of_another_step_is_not_asked_for_again(tmp_path: Path, other: str) -> None:
    ranks(tmp_path / "n0" / "global_step_20", there=1)
    ranks(tmp_path / "n1" / "run" / "global_step_10")
    with pytest.raises(UsageError) as caught:
        ckpt_cli.merge(tmp_path / "n0" / "global_step_20", tmp_path / "out", also=tmp_path / "n1" / other)
    assert "it holds global_step_10" in caught.value.message
    assert caught.value.hint == "pass the folder of global_step_20 on the other node"


@pytest.mark.parametrize("names", [("last.ckpt", "last-v1.ckpt"), ("model_world_size_2_rank_0.pt",)])
def test_what_cannot_be_merged_is_not_merged_next(tmp_path: Path, names: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    for name in names:
        torch.save({"w": torch.ones(4, 4)}, tmp_path / name)
    assert _run(["detect", str(tmp_path)]) != 0
    said = capsys.readouterr().err
    assert "it cannot be merged" in said
    assert "ckpt merge" not in said
