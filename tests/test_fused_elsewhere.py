"""``verify --against`` with LoRA adapters alone: what they were fused into is said by a manifest of ckpt, or by nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import UsageError
from ckpt_cli.files.manifest import NAME as MANIFEST


@pytest.fixture
def fused(layouts: Path, tmp_path: Path) -> Path:
    """An output of adapters that were fused into a base, beside the ``adapter`` that they lie in."""
    folder = layouts / "verl-lora"
    ckpt_cli.merge(folder / "lora_only", tmp_path / "adapter", lora="export")
    ckpt_cli.merge(tmp_path / "adapter", tmp_path / "out", base=folder / "base")
    return tmp_path / "out"


class TestAdaptersAlone:
    """They were compared as they are with a whole model: each of its tensors was "unproved", and every factor "lost"."""

    def test_against_what_nothing_says_they_were_fused_into_are_refused_with_a_way_that_works(self, layouts: Path, fused: Path) -> None:
        (fused / MANIFEST).unlink()
        adapter, base = fused.parent / "adapter", layouts / "verl-lora" / "base"
        for given in (None, base):
            with pytest.raises(UsageError, match="nothing here says that ckpt fused them") as raised:
                ckpt_cli.verify(fused, against=adapter, base=given)
        hint = raised.value.hint or ""
        commands = re.findall(r"ckpt (merge|diff) (\S+)(?: --base BASE -o)? (\S+?),?(?= then|$)", hint)
        assert commands == [("merge", str(adapter), "out_again"), ("diff", "out_again", str(fused))]
        again = fused.parent / "out_again"
        ckpt_cli.merge(adapter, again, base=base)
        assert ckpt_cli.diff(again, fused).identical

    def test_that_were_moved_are_fused_again_as_the_manifest_says(self, fused: Path) -> None:
        moved = Path(shutil.move(fused.parent / "adapter", fused.parent / "moved"))
        assert ckpt_cli.verify(fused, against=moved).exit_code == 0
        weights = moved / "adapter_model.safetensors"
        tensors = load_file(weights)
        name = next(name for name in tensors if "lora_B" in name)
        save_file({**tensors, name: torch.full_like(tensors[name], 0.25)}, weights, metadata={"format": "pt"})
        wrong = [item for item in ckpt_cli.verify(fused, against=moved).findings if item.severity == "error"]
        assert [item.code for item in wrong] == ["different-values"]

    def test_against_adapters_are_compared_as_they_are(self, fused: Path) -> None:
        copy = Path(shutil.copytree(fused.parent / "adapter", fused.parent / "copy"))
        (copy / MANIFEST).unlink()
        assert ckpt_cli.verify(copy, against=fused.parent / "adapter").exit_code == 0
