"""Random states of the ranks of one training have the same entries, of the same shapes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_cli

State = dict[str, Any]


def state_of(rank: int) -> State:
    generator = np.random.RandomState(rank)
    generator.standard_normal(rank)
    drawn = random.Random(rank)
    drawn.gauss(0, 1) if rank else None
    cuda = [torch.arange(16, dtype=torch.uint8)] * (1 + rank)
    return {"cpu": torch.Generator().get_state(), "numpy": generator.get_state(), "random": drawn.getstate(), "cuda": cuda}


def extracted(folder: Path, change: Callable[[State], object] = lambda _: None) -> dict[str, str]:
    """The warnings about four ranks, of which the third is changed."""
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    for rank in range(4):
        held = state_of(rank)
        if rank == 2:
            change(held)
        torch.save(held, folder / f"rng_state_{rank}.pth")
    result = ckpt_cli.extract_state(folder, folder.parent / f"{folder.name}_state")
    return {note.code: note.text for note in result.notes if note.level == "warning"}


def test_ranks_alike_are_no_news(tmp_path: Path) -> None:
    assert not extracted(tmp_path)


@pytest.mark.parametrize("name", ["cpu", "numpy", "random", "cuda"])
def test_an_entry_that_one_rank_lacks_is_told(tmp_path: Path, name: str) -> None:
    assert extracted(tmp_path, lambda held: held.pop(name))["missing-part"] == f"the random state of rank 2 lacks {name}, others have it"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("cpu", torch.ones(10, dtype=torch.uint8), "is U8 [10], of other ranks U8 [5056]"),
        ("cpu", 3, "is a value, of other ranks"),
        ("numpy", ("MT19937", np.ones(624, dtype=np.uint32)), "is 2 values, U32 [624], of other ranks 5 values, U32 [624]"),
        ("random", (3, (1, 2, 3), None), "is 3 values, 3 values, of other ranks 3 values, 625 values"),
        ("cuda", [torch.ones(8, dtype=torch.uint8)], "is U8 [8], of other ranks U8 [16]"),
    ],
)
def test_another_form_is_told(tmp_path: Path, name: str, value: object, said: str) -> None:
    text = extracted(tmp_path, lambda held: held.update({name: value}))["random-differs"]
    assert text.startswith(f"{name} in the random state of rank 2 ")
    assert said in text
