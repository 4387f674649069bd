"""Which tensors are at fault for not having the shape of their class, where no other config.json would ask for theirs.

A number in config.json that is wrong changes every tensor of a kind, and what is beside it: a wrong
intermediate_size all of gate, up and down. A tensor that was cut, or of which only one rank's part is there, is alone with its shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from ckpt_cli.boxes import Shape
from ckpt_cli.name_patterns import pattern_of

ALONE = re.compile(r"embed|position|relative|qkv|query_key_value|kv_|(^|\.)(gate|router)\.|merger")
"""Words in names of what a number may change alone: tables, fused projections, routers, what leads out of a tower."""

OWN = re.compile(r"[._](weight|bias)$")

Kind = tuple[str, Shape]
"""A name with its numbers open, and the shape that the class has for it."""


def cut_tensors(reshaped: Mapping[str, tuple[Shape, Shape]], fitting: Iterable[Kind]) -> tuple[str, ...]:
    """The tensors at fault, of those whose shape in the class and whose own differ; ``fitting`` are the kinds of tensors that fit."""
    kinds: dict[Kind, dict[str, Shape]] = {}
    for name, (wanted, held) in reshaped.items():
        kinds.setdefault((pattern_of(name)[0], wanted), {})[name] = held
    whole = set(fitting)
    changed = {kind: next(iter(members.values())) for kind, members in kinds.items()}
    return tuple(
        name
        for kind, members in kinds.items()
        if kind in whole or len(set(members.values())) > 1 or not _explained(kind, changed)
        for name in members
    )


def _explained(kind: Kind, changed: Mapping[Kind, Shape]) -> bool:
    """Whether another config.json, or another way to store all of it, could give one kind of tensors, all of them, these shapes."""
    (pattern, wanted), held = kind, changed[kind]
    if math.prod(wanted) == math.prod(held):
        return True
    if len(wanted) != len(held):
        return False
    dims = {dim for dim, (length, own) in enumerate(zip(wanted, held, strict=True)) if own != length}
    inside = {other: shape for (other, _), shape in changed.items() if "{}" in other or "{}" not in pattern}
    others = [shape for other, shape in inside.items() if OWN.sub("", other) != OWN.sub("", pattern)]
    if "expert" in pattern and len(wanted) > 2 and 0 in dims:
        # Experts are counted by their router too, not only by one another.
        return any(len(shape) < 3 for shape in others)
    if others:
        return True
    if "{}" in pattern and not ALONE.search(pattern):
        return len(wanted) > 2 and "expert" not in pattern
    return len(wanted) > 2 or (dims == {0} and (len(wanted) == 2 or pattern.endswith("bias")))
