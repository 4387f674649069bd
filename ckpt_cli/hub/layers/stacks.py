"""Stacks of layers, by the names of tensors: whatever is numbered, however it is called."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

Layers = Mapping[int, set[str]]
"""Number -> what follows it in the names of tensors."""

BLOCK = 4
"""Tensors that the smallest layer of a transformer has; a stack of less may be linear layers with activations between."""

LISTED = 256
"""Numbers of one gap that are listed."""

LAYER = re.compile(r"^(?:[^.]+\.)*?[^.]+(?=\.(?P<number>[0-9]{1,9})\.(?P<leaf>.+))")
"""The first stack in the name of a tensor, the number of the layer, and what follows it."""

EXPERTS = "experts"
LONGEST = 9


def stacks_of(names: Iterable[str]) -> Mapping[str, Layers]:
    """All numbered modules by the name before the number, but for experts and what is in them.

    >>> stacks_of(["encoder.block.0.layer.1.weight"])
    {'encoder.block': {0: {'layer.1.weight'}}, 'encoder.block.0.layer': {1: {'weight'}}}
    """
    found: dict[str, dict[int, set[str]]] = {}
    for name in names:
        parts = name.split(".")
        for at, part in enumerate(parts[:-1]):
            if part == EXPERTS:
                break
            if at and part.isascii() and part.isdecimal() and len(part) <= LONGEST:
                found.setdefault(".".join(parts[:at]), {}).setdefault(int(part), set()).add(".".join(parts[at + 1 :]))
    return found


def is_inner(stack: str) -> bool:
    """Whether a stack lies in a layer of another one. A number in front is that of a part (sentence-transformers)."""
    return any(part.isdecimal() for part in stack.split(".")[1:])


def is_block(layers: Layers, number: int) -> bool:
    """Whether a layer has as many tensors as those of transformers do."""
    return len(layers[number]) >= BLOCK


def has_lone_block(names: Iterable[str]) -> bool:
    """Whether a module without a number is a layer: as attention and an MLP are, several of its modules are made of others.

    >>> has_lone_block(["fc.weight", "mid.attn.q.weight", "mid.attn.o.weight", "mid.mlp.up.weight", "mid.mlp.down.weight"])
    True
    """
    found: dict[str, dict[str, int]] = {}
    for name in names:
        parts = name.split(".")
        for at in range(1, len(parts) - 2):  # a module of it, one in that, and the tensor
            inner = found.setdefault(".".join(parts[:at]), {})
            inner[parts[at]] = inner.get(parts[at], 0) + 1
    return any(len(inner) > 1 and sum(inner.values()) >= BLOCK for inner in found.values())


def holes(numbered: Mapping[int, object]) -> list[int]:
    """Missing numbers from 0 to the last one; at most `LISTED` of one gap."""
    absent: list[int] = []
    expected = 0
    for number in sorted(numbered):
        absent += range(expected, min(number, expected + LISTED))
        expected = number + 1
    return absent
