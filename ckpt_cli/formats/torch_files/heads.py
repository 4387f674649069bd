"""Heads that lie alone in the file of a model beside an adapter: those of TRL (up to 0.11) and trlx, trained with PPO and PEFT.

Their ``save_pretrained`` writes ``v_head.*`` (trlx: ``ilql_heads.*`` too) into pytorch_model.bin and lets PEFT save the rest, which is what
was trained of the model.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.placeholders import small_shapes

HEAD = re.compile(r"(\w+_)?heads?\..+", re.ASCII)
BESIDE = ("adapter_model.safetensors", "adapter_model.bin")


def is_head_alone(path: Path, there: Folders) -> bool:
    """Whether a file with the name of a model holds nothing but heads, and an adapter lies beside it. Only small files are looked into."""
    if not any(there.is_file(path.parent / name) for name in BESIDE):
        return False
    return are_heads(small_shapes(path) or ())


def are_heads(names: Collection[str]) -> bool:
    """Whether there is nothing but heads.

    >>> are_heads(["v_head.summary.weight"]), are_heads([]), are_heads(["lm_head.weight", "model.norm.weight"])
    (True, False, False)
    """
    return bool(names) and all(HEAD.fullmatch(name) for name in names)
