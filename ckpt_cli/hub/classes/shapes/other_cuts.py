"""Tensors of the hub that loaders join to one: three and more may be cut otherwise in files than transformers cuts them, equally."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.classes.rules import Conversion, HubRules

HALVES = 2
"""Parts of a tensor that always have one size, as gate and up; query, key and value need not."""


def part_size(length: int, parts: int) -> int | None:
    """The size of the first parts where save_pretrained cuts unequal ones, the last being smaller; None where that makes fewer parts.

    >>> part_size(64, 3), part_size(4, 3), part_size(5, 2)
    (22, None, None)
    """
    size = math.ceil(length / parts)
    return size if parts > HALVES and (parts - 1) * size < length else None


def other_cuts(reshaped: Mapping[str, tuple[Shape, Shape]], held: Mapping[str, Shape], rules: HubRules | None) -> set[str]:
    """Tensors whose shapes are not those of the class, since the file divides otherwise what is one tensor in memory."""
    found: set[str] = set()
    for targets, dim in filter(None, map(_cuts, rules.conversions if rules is not None and reshaped else ())):
        stems = {name.removesuffix(target) for name in reshaped for target in targets if name.endswith(target)}
        for group in ([stem + target for target in targets] for stem in stems):
            if all(part in held for part in group):
                joined = _joined([held[part] for part in group], dim)
                if joined is not None and joined == _joined([reshaped.get(part, (held[part],))[0] for part in group], dim):
                    found |= reshaped.keys() & set(group)
    return found


def _cuts(conversion: Conversion) -> tuple[tuple[str, ...], int] | None:
    """What a conversion cuts one tensor into, and in which dimension."""
    targets = tuple(target.replace("\\.", ".") for target in conversion.renaming.targets)
    if len(conversion.operations) != 1 or len(targets) <= HALVES or any("*" in target for target in targets):
        return None
    operation = conversion.operations[0]
    return (targets, operation.get("dim", 0)) if operation["name"] == "Chunk" and not operation.get("num_shards_attribute") else None


def _joined(shapes: list[Shape], dim: int) -> tuple[int, Shape] | None:
    """The length in a dimension, and the others, of tensors that are joined; None for those that do not go together."""
    if any(not -len(shape) <= dim < len(shape) for shape in shapes):
        return None
    others = {(*shape[: dim % len(shape)], *shape[dim % len(shape) + 1 :]) for shape in shapes}
    return (sum(shape[dim] for shape in shapes), others.pop()) if len(others) == 1 else None
