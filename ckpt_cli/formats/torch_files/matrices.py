"""Matrices below the nodes of a pickle: they may be weights, so they must not be left out silently."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_cli.errors import CorruptFile
from ckpt_cli.files.pickle_nodes import Call, Global, Persistent, as_dict, below
from ckpt_cli.files.torch_file import unwrap

SLOTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "exp_inf", "exp_avg_sq_row"})
"""What torch's optimizers call the tensors that they keep per parameter."""

OF_OPTIMIZERS = SLOTS | {"state", "param_groups"}
"""Parts of names that those of modules have not."""


FLOATS = frozenset({"FloatStorage", "DoubleStorage", "HalfStorage", "BFloat16Storage"})
INTEGERS = frozenset({"LongStorage", "IntStorage", "ShortStorage", "CharStorage", "ByteStorage", "BoolStorage"})


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """A tensor that is no node of a pickle, as metadata describe it."""

    dimensions: int
    is_float: bool


def is_tensor(node: object) -> bool:
    """Whether a node is a tensor itself."""
    return isinstance(node, Call) and isinstance(node.target, Global) and node.target.name.startswith("_rebuild")


def dimensions_of(node: object) -> int | None:
    """How many dimensions a tensor has, 2 if it does not say so plainly; None if the node is no tensor."""
    if isinstance(node, Described):
        return node.dimensions
    if not isinstance(node, Call) or not is_tensor(node):
        return None
    inner = unwrap(node)
    if inner.is_("torch._tensor", "_rebuild_from_type_v2") and len(inner.args) == 4:
        fields = pairs_of(inner.args[3]) or {}
        local = dimensions_of(fields.get("_local_tensor"))
        return 2 if local is None else local
    size = _size_of(inner)
    return 2 if size is None else len(size)


def is_single(node: object) -> bool:
    """Whether a tensor plainly has one element, whatever its dimensions."""
    size = _size_of(unwrap(node)) if isinstance(node, Call) and is_tensor(node) else None
    return size is not None and all(length == 1 for length in size)


def _size_of(node: Call) -> Sequence[Any] | None:
    size = node.args[2] if len(node.args) > 2 else None
    if isinstance(size, Call) and size.args:
        size = size.args[0]
    return size if isinstance(size, (list, tuple)) else None


def is_trained(node: object) -> bool:
    """Whether a tensor is a parameter, or was saved as one that gradients are computed of: an optimizer changes it."""
    if not isinstance(node, Call):
        return False
    if node.is_("torch._utils", "_rebuild_parameter", "_rebuild_parameter_with_state"):
        return True
    return node.is_("torch._utils", "_rebuild_tensor_v2", "_rebuild_tensor_v3") and len(node.args) > 4 and node.args[4] is True


def is_float_number(node: object) -> bool | None:
    """Whether a tensor is a single number with a fraction, so that it counts nothing; None for what is no tensor."""
    dimensions = dimensions_of(node)
    if dimensions is None:
        return None
    return dimensions == 0 and (node.is_float if isinstance(node, Described) else _storage_of(node) in FLOATS)


def is_integer(node: object) -> bool:
    """Whether a tensor plainly holds whole numbers or bits, as an order of samples. Weights in codes have floats beside them."""
    return _storage_of(node) in INTEGERS


def _storage_of(node: object) -> str | None:
    """What torch calls the storage of a tensor; None if the node does not say so plainly."""
    inner = unwrap(node) if isinstance(node, Call) else None
    held = inner.args[0].pid if inner is not None and inner.args and isinstance(inner.args[0], Persistent) else None
    kind = held[1] if isinstance(held, tuple) and len(held) > 1 else None
    return kind.name if isinstance(kind, Global) else None


def is_optimizer(entries: Mapping[Any, Any]) -> bool:
    """Whether a dict is an optimizer's state by what is in it: parameter groups, or slots per parameter, numbered or named."""
    if "param_groups" in entries and "state" in entries:
        return True
    inner = [pairs for node in entries.values() if (pairs := pairs_of(node))]
    return bool(inner) and all(any(isinstance(slot, str) and slot in SLOTS for slot in pairs) for pairs in inner)


class NodeSearch:
    """Looks for something outside of optimizers and the like, and of nodes that are known: linear in the pickle for all nodes together.

    ``tells`` says of a node whether it is what is looked for; None where it may be below. Entries under keys that are ``passed`` are not
    looked at.
    """

    def __init__(self, known: Iterable[object], tells: Callable[[object], bool | None], passed: Callable[[object], bool]) -> None:
        self._clean = {id(node) for node in known}
        """Nodes known to contain nothing of it, by identity: their pickle keeps them alive."""
        self._tells = tells
        self._passed = passed

    def holds(self, node: object) -> bool:
        """Whether a node is, or contains at any depth, what is looked for."""
        pending, seen = [node], set()
        while pending:
            current = pending.pop()
            if not isinstance(current, (list, tuple, dict, Call, Described)) or id(current) in self._clean or id(current) in seen:
                continue
            seen.add(id(current))
            told = self._tells(current)
            if told is not None:
                if told:
                    return True
                continue
            entries = pairs_of(current)
            if entries is None:
                pending += below(current)
            elif not is_optimizer(entries):
                pending += (inner for key, inner in entries.items() if not self._passed(key))
        self._clean |= seen
        return False


def is_matrix(node: object) -> bool | None:
    """Whether a tensor has two or more dimensions; None for what is no tensor."""
    dimensions = dimensions_of(node)
    return None if dimensions is None else dimensions > 1


def pairs_of(node: object) -> dict[Any, Any] | None:
    """The pairs of a dict; None for anything else, dicts of unknown forms included."""
    try:
        return as_dict(node)
    except CorruptFile:
        return None
