"""What the inert pickle reader returns: plain values, and nodes for everything that unpickling would have run.

A `Global` is a name, never looked up; a `Call` is what would have been called or built, never called; a `Persistent` is a
reference out of the pickle, which torch uses for storages. The functions here interpret nodes by their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_cli.errors import CorruptFile

MAX_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle refers to, such as ("torch", "Size"). Only ever compared, never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        text = f"{self.module}.{self.name}"
        return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


class Call:
    """What the pickle wanted to call or build: ``target`` with ``args``, then a state, list items and dict pairs.

    ``known`` is what a reader made of the node alone. Pickles of one save share nodes, and each is then read once.
    """

    __slots__ = ("args", "items", "known", "kwargs", "pairs", "state", "target")

    def __init__(self, target: object, args: tuple[Any, ...], kwargs: object = None) -> None:
        self.target = target
        self.args = args
        self.kwargs = kwargs
        self.state: Any = None
        self.items: list[Any] | None = None
        self.pairs: dict[Any, Any] | None = None
        self.known: object = None

    def is_(self, module: str, *names: str) -> bool:
        """Whether the target is exactly one of these names of this module."""
        return isinstance(self.target, Global) and self.target.module == module and self.target.name in names


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A persistent id: torch puts ("storage", type, key, location, numel) there."""

    pid: Any


def below(node: object) -> list[Any]:
    """Everything that a node refers to itself: items, keys and values, and all that a call was given."""
    if isinstance(node, Call):
        pairs = node.pairs or {}
        return [node.target, *node.args, node.kwargs, node.state, *(node.items or ()), *pairs, *pairs.values()]
    if isinstance(node, dict):
        return [*node, *node.values()]
    return list(node) if isinstance(node, (list, tuple)) else []


def as_dict(value: object) -> dict[Any, Any] | None:
    """The pairs of a dict or of a pickled OrderedDict / defaultdict; None for anything else. Raises CorruptFile for unknown forms."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, Call) or not value.is_("collections", "OrderedDict", "defaultdict"):
        return None
    later = value.pairs if value.pairs is not None else {}
    # Python 2 gives an OrderedDict its pairs as an argument; the argument of a defaultdict is what makes its defaults.
    first = value.args[0] if value.args and value.is_("collections", "OrderedDict") else None
    if first is None:
        return later
    pairs = list(first.items()) if isinstance(first, dict) else first
    if len(value.args) > 1 or not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
        raise CorruptFile("an OrderedDict has an unknown form", expected="pairs of keys and values")
    merged = dict(pairs)
    if len(merged) < len(pairs) or merged.keys() & later.keys():
        raise CorruptFile("an OrderedDict has the same key twice")
    return merged | later


def _is_pair(value: object) -> bool:
    """A key whose hash is cheap, and a value."""
    return isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[0], (str, bytes, int, float, type(None)))


def attributes(state: object) -> Mapping[str, Any]:
    """The attributes that BUILD would have set: a dict, or (dict or None, dict of slots). Raises CorruptFile."""
    if isinstance(state, tuple) and len(state) == 2:
        plain, slots = as_dict(state[0]) if state[0] is not None else {}, as_dict(state[1])
        if plain is not None and slots is not None:
            return {**plain, **slots}
    fields = as_dict(state)
    if fields is None:
        raise CorruptFile("an object has no attributes")
    return fields


def describe(value: object) -> str:
    """A short text for a value that is not a tensor, such as "3", "dict of 4" or "object(argparse.Namespace)"."""
    if value is None or isinstance(value, (bool, int, float)):
        return str(value)
    if isinstance(value, str):
        return value if len(value) <= 60 else value[:57] + "..."
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    mapping = as_dict(value)
    if mapping is not None:
        return f"dict of {len(mapping)}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, Call):
        return f"object({value.target})" if isinstance(value.target, Global) else "object"
    return f"reference({value})" if isinstance(value, Global) else "object"
