"""A folder in which nothing is recognised: the error names where something is, whatever the trainer called it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

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
    # Each of them may have an average, so that nothing is said of what is not there.
    for component in (None, "ema"):
        with pytest.raises(Undecidable, match="several files could be the model"):
            ckpt_cli.merge(top / meant, tmp_path / "out", type=component)


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


def test_files_of_steps_are_named_before_the_folders_of_their_states(tmp_path: Path) -> None:
    """kohya's scripts save ``name-000002.safetensors`` and ``name-000002-state``."""
    run = tmp_path / "run"
    for number in ("2", "4"):
        (run / f"my-00000{number}-state").mkdir(parents=True)
        for name in (f"my-00000{number}.safetensors", f"my-00000{number}-state/model.safetensors"):
            save_file({"w": torch.ones(2, 2)}, run / name)
    with pytest.raises(NotRecognised) as refused:
        ckpt_cli.merge(run, tmp_path / "out")
    listed = "my-000002.safetensors, my-000004.safetensors, my-000002-state, my-000004-state"
    assert refused.value.hint == f"4 checkpoints below: {listed}"
