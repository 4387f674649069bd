"""A folder in which nothing is recognised: the error names where something is, whatever the trainer called it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import NotRecognised, Undecidable


def lightning(top: Path, *names: str) -> Path:
    for name in names:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"state_dict": {"w": torch.ones(4, 4)}, "pytorch-lightning_version": "2.0", "global_step": 10}, top / name)
    return top


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        (("checkpoints/m-epoch=02-loss=0.32.ckpt", "checkpoints/m-epoch=03-loss=0.31.ckpt"), "checkpoints"),
        (("checkpoints/best.ckpt",), "checkpoints/best.ckpt"),
        (("version_0/checkpoints/epoch=0-step=10.ckpt",), "version_0/checkpoints"),
        (("lightning_logs/version_0/checkpoints/epoch=0-step=10.ckpt",), "lightning_logs/version_0/checkpoints"),
    ],
)
def test_the_folder_or_file_of_lightning_is_named(names: tuple[str, ...], meant: str, tmp_path: Path) -> None:
    top = lightning(tmp_path / "L1", *names)
    with pytest.raises(NotRecognised) as refused:
        ckpt_cli.merge(top, tmp_path / "out")
    assert refused.value.hint == f"did you mean {top / meant}?"
    if len(names) == 1:
        ckpt_cli.merge(top / meant, tmp_path / "out")
        return
    with pytest.raises(Undecidable, match="several files could be the model"):
        ckpt_cli.merge(top / meant, tmp_path / "out")


def test_several_files_are_listed(tmp_path: Path) -> None:
    top = lightning(tmp_path / "L1", "a/best.ckpt", "b/best.ckpt")
    with pytest.raises(NotRecognised) as refused:
        ckpt_cli.merge(top, tmp_path / "out")
    assert refused.value.hint == "2 checkpoints below: a/best.ckpt, b/best.ckpt"


def test_folders_without_weights_are_not(tmp_path: Path) -> None:
    (tmp_path / "L1" / "checkpoints" / "epoch=0.ckpt").mkdir(parents=True)
    with pytest.raises(NotRecognised) as refused:
        ckpt_cli.merge(tmp_path / "L1", tmp_path / "out")
    assert refused.value.hint == "the folder holds checkpoints"
