"""Which tensors are at fault for not having the shape of their class, where no other config.json would ask for theirs.

A number in config.json that is wrong changes every tensor that it decides: a wrong intermediate_size all of gate, up and down. A number
of which one tensor has what it asks for is right, and explains no other. So a tensor that was cut, or of which only one rank's part is
there, is told from a config.json of another model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.classes.shapes.config_numbers import Number, TensorKind
from ckpt_cli.name_patterns import pattern_of


@dataclass(frozen=True, slots=True)
class Fitting:
    """What fits in a comparison: kinds of tensors, and names (with their numbers open) of which there are as many as asked."""

    kinds: frozenset[TensorKind] = frozenset()
    counted: frozenset[str] = frozenset()


def cut_tensors(
    reshaped: Mapping[str, tuple[Shape, Shape]], proofs: Fitting, numbers: Collection[Number] | None, names: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The tensors at fault, of those whose shape in the class and whose own differ; ``numbers`` are those of the config, if known.

    ``names`` are those that the class has for tensors that are called otherwise.
    """
    kinds: dict[TensorKind, dict[str, Shape]] = {}
    for name, (wanted, held) in reshaped.items():
        kinds.setdefault((pattern_of((names or {}).get(name, name))[0], wanted), {})[name] = held
    changed = {kind: next(iter(members.values())) for kind, members in kinds.items()}
    undecided = None if numbers is None else [number for number in numbers if _may_be_another(number, changed, proofs)]
    return tuple(
        name
        for kind, members in kinds.items()
        if kind in proofs.kinds or len(set(members.values())) > 1 or not _explained(kind, changed[kind], undecided)
        for name in members
    )


def _may_be_another(number: Number, changed: Mapping[TensorKind, Shape], proofs: Fitting) -> bool:
    """Whether no tensor has the length, and no names the count, that this number asks for, and all ask for the same other one."""
    asked: dict[tuple[int, int], int] = {}
    for kind, other in number.shapes.items():
        if kind in proofs.kinds:
            return False
        held = changed.get(kind)
        if held is None or _is_laid_out_otherwise(kind[1], held):
            continue
        for dim in number.dims(kind):
            length = kind[1][dim]
            if held[dim] == length or asked.setdefault((length, other[dim]), held[dim]) != held[dim]:
                return False
    return not number.counted & proofs.counted


def _explained(kind: TensorKind, held: Shape, undecided: Collection[Number] | None) -> bool:
    """Whether other numbers in config.json, or another way to store all of it, could give one kind of tensors these shapes.

    ``undecided`` are the numbers that nothing proves; None where those of the config are unknown, so that any may be another.
    """
    wanted = kind[1]
    if math.prod(wanted) == math.prod(held):
        return True
    if len(wanted) != len(held):
        return False
    dims = {dim for dim, (length, own) in enumerate(zip(wanted, held, strict=True)) if own != length}
    return undecided is None or dims <= {dim for number in undecided for dim in number.dims(kind)}


def _is_laid_out_otherwise(wanted: Shape, held: Shape) -> bool:
    return len(wanted) != len(held) or math.prod(wanted) == math.prod(held)
