"""Weights in fp32 that optimizers keep beside those of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_cli.formats.torch_files.matrices import pairs_of
from ckpt_cli.formats.training_state_names import is_state_key

MASTERS = frozenset(
    {"fp32_from_fp16", "fp32_from_fp16_params", "fp32_groups_flat", "fp32_groups", "fp32_params", "master_params", "master_weights"}
)
"""Where optimizers of apex and Megatron's like keep the weights in fp32."""

SLOTS = frozenset({"master_param", "master_params", "master_weight", "fp32_param"})
"""What those of TransformerEngine and apex call them in the state of each parameter."""


def masters_beside(levels: Iterable[Mapping[Any, Any]]) -> list[str]:
    """Where the optimizers beside a state dict keep weights of their own: names alone tell, and no order of parameters is known."""
    found = []
    for key, node in ((key, node) for level in levels for key, node in level.items() if is_state_key(key)):
        entries = pairs_of(node) or {}
        states = pairs_of(entries.get("state")) or {}
        slots = pairs_of(next(iter(states.values()), None)) or {}
        found += [f"{key}.{name}" for name in entries if name in MASTERS]
        found += [f"{key}.state.N.{name}" for name in slots if name in SLOTS]
    return list(dict.fromkeys(found))
