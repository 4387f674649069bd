"""Matrices below the nodes of a pickle: they may be weights, so they must not be left out silently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_cli.errors import CorruptFile
from ckpt_cli.files.pickle_nodes import Call, Global, as_dict, below
from ckpt_cli.files.torch_file import unwrap
from ckpt_cli.formats.training_state_names import is_state_key

SLOTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "exp_inf", "exp_avg_sq_row"})
"""What torch's optimizers call the tensors that they keep per parameter."""


def is_tensor(node: object) -> bool:
    """Whether a node is a tensor itself."""
    return isinstance(node, Call) and isinstance(node.target, Global) and node.target.name.startswith("_rebuild")


def dimensions_of(node: object) -> int | None:
    """How many dimensions a tensor has, 2 if it does not say so plainly; None if the node is no tensor."""
    if not isinstance(node, Call) or not is_tensor(node):
        return None
    inner = unwrap(node)
    if inner.is_("torch._tensor", "_rebuild_from_type_v2") and len(inner.args) == 4:
        fields = pairs_of(inner.args[3]) or {}
        local = dimensions_of(fields.get("_local_tensor"))
        return 2 if local is None else local
    size = inner.args[2] if len(inner.args) > 2 else None
    if isinstance(size, Call) and size.args:
        size = size.args[0]
    return len(size) if isinstance(size, (list, tuple)) else 2


def is_optimizer(entries: Mapping[Any, Any]) -> bool:
    """Whether a dict is an optimizer's state by what is in it: parameter groups, or slots per parameter, numbered or named."""
    if "param_groups" in entries and "state" in entries:
        return True
    inner = [pairs for node in entries.values() if (pairs := pairs_of(node))]
    return bool(inner) and all(any(isinstance(slot, str) and slot in SLOTS for slot in pairs) for pairs in inner)


class MatrixSearch:
    """Looks for matrices outside of optimizers and the like, and of nodes that are known: linear in the pickle for all nodes together."""

    def __init__(self, known: Iterable[object] = ()) -> None:
        self._clean = {id(node) for node in known}
        """Nodes known to contain none, by identity: their pickle keeps them alive."""

    def holds(self, node: object) -> bool:
        """Whether a node contains a tensor of two or more dimensions at any depth."""
        pending, seen = [node], set()
        while pending:
            current = pending.pop()
            if not isinstance(current, (list, tuple, dict, Call)) or id(current) in self._clean or id(current) in seen:
                continue
            seen.add(id(current))
            dimensions = dimensions_of(current)
            if dimensions is not None:
                if dimensions > 1:
                    return True
                continue
            entries = pairs_of(current)
            if entries is None:
                pending += below(current)
            elif not is_optimizer(entries):
                pending += (inner for key, inner in entries.items() if not is_state_key(key))
        self._clean |= seen
        return False


def pairs_of(node: object) -> dict[Any, Any] | None:
    """The pairs of a dict; None for anything else, dicts of unknown forms included."""
    try:
        return as_dict(node)
    except CorruptFile:
        return None
