"""Layers that lack what others of their stack have: verify says so without config.json as well, as merge does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt_cli


def shards(folder: Path, *lost: str) -> Path:
    """A file of a training with four layers of a class that nobody knows."""
    names = [f"model.layers.{layer}.{leaf}.weight" for layer in range(4) for leaf in ("norm", "mlp.up", "mlp.down", "attn.q", "attn.o")]
    torch.save({name: torch.ones(4, 4) for name in names if name not in lost}, folder / "pytorch_model.bin")
    return folder


def warned(path: Path) -> set[str]:
    return {item.code for item in ckpt_cli.verify(path).findings if item.severity != "info"}


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.down.weight", "model.layers.3.attn.q.weight"])
def test_a_lost_tensor_is_told_by_both(tmp_path: Path, lost: str) -> None:
    folder = shards(tmp_path / "run", lost) if (tmp_path / "run").mkdir() is None else tmp_path
    result = ckpt_cli.merge(folder, tmp_path / "out")
    assert "uneven-layers" in {note.code for note in result.outputs[0].notes}
    assert "uneven-layers" in warned(folder)
    assert "uneven-layers" in warned(tmp_path / "out")


def test_whole_layers_are_no_news(tmp_path: Path) -> None:
    assert "uneven-layers" not in warned(shards(tmp_path))


def test_what_was_left_out_on_purpose_is_no_news(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    ckpt_cli.merge(shards(tmp_path / "run"), tmp_path / "out", exclude=["*.1.mlp.down.*"])
    assert "uneven-layers" not in warned(tmp_path / "out")
