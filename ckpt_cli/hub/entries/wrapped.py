"""Entries of a config by which a class wraps its parts in adapters when it is built, as InternVL (1.5 to 3) does.

``use_llm_lora: 16`` makes modeling_internvl_chat.py look for ``language_model.base_model.model.*`` with factors of rank 16 and an alpha of
twice that, and its tools/merge_lora.py sets both entries to 0 in what it writes.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ckpt_cli.hub.config import Config, model_type
from ckpt_cli.hub.peft_names import ADAPTED

RANK = re.compile(r"use_\w+_lora", re.ASCII)
"""Entries whose value is a rank, 0 for none; a word or a switch under such a name is something else."""

TWICE = ("internvl_chat",)
"""Types of models whose class takes twice the rank as alpha."""


def wrapping_ranks(config: Config) -> dict[str, int]:
    """The entries by which the class of a config adds adapters, each with the rank of these.

    >>> wrapping_ranks({"use_llm_lora": 16, "use_backbone_lora": 0, "use_other_lora": True})
    {'use_llm_lora': 16}
    """
    return {key: value for key, value in config.items() if RANK.fullmatch(key) and type(value) is int and value > 0}


def unwrapped_entries(config: Config, names: Collection[str]) -> dict[str, int]:
    """What a config must say beside tensors with these ``names``: no adapters if they have none, else what it says."""
    ranks = wrapping_ranks(config)
    return dict.fromkeys(ranks, 0) if ranks and not any(map(ADAPTED.fullmatch, names)) else {}


def wrapping_rank(config: Config) -> int | None:
    """The rank of the adapters whose alpha is twice that, if the class of a config adds such, all of one rank."""
    ranks = set(wrapping_ranks(config).values())
    return ranks.pop() if len(ranks) == 1 and model_type(config) in TWICE else None
