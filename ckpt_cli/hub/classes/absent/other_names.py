"""Tensors of a class that are missing, and may be there under other names: the hint about them, and what must not be taken elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.classes.absent.moved_names import moved_names, renaming_rules
from ckpt_cli.hub.classes.computed.parametrized import computed_hint
from ckpt_cli.hub.classes.fit import Fit
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few

SHOWN_GLOBS = 3

ALIKE = 2
"""Parts at the end of a name that two tensors of one kind and shape have in common: ``norm.weight``, ``q_proj.bias``."""


@dataclass(frozen=True, slots=True)
class UnderOtherNames:
    """The ``hint`` about missing tensors that are there under other names, and whether these surely are all that are missing.

    ``there``: the missing ones that are, or may be. A base has them too, but untrained. ``places_all``: whether the hint gives each tensor
    without a place one, so that what is missing otherwise is nowhere here.
    """

    hint: str = ""
    are_all: bool = False
    there: frozenset[str] = field(default_factory=frozenset)
    places_all: bool = False


def under_other_names(fit: Fit | None, lacking: Collection[str], names: Mapping[str, Shape], trained: Collection[str]) -> UnderOtherNames:
    """What is known of ``lacking`` tensors (or globs) by the ``names`` that are there; ``trained`` are those that a key map would see."""
    extra = {name: names[name] for name in (names if fit is None else fit.extra) if name in names}
    others = {name: shape for name, shape in extra.items() if name in trained}
    wanted = {name: shape for name, shape in (fit.missing if fit is not None else {}).items() if name in lacking}
    for glob in (name for name in lacking if name.endswith(".*")):  # what is counted has no shapes
        start = glob.removesuffix("*")
        wanted |= {start + end: shape for name, shape in others.items() if (end := name.partition(f".{start}")[2])}
    moved = moved_names(wanted, others)
    unplaced = {name: shape for name, shape in extra.items() if name not in moved.values()}
    there = frozenset([*moved, *_alike({name: shape for name, shape in wanted.items() if name not in moved}, unplaced)])
    hint, are_all = computed_hint(wanted, names)
    if hint:
        return UnderOtherNames(hint, are_all, there)
    rules = renaming_rules(moved, trained)
    if moved and rules is not None:
        text = f"{len(moved)} tensors that are missing are there under other names: {few(grouped(list(moved.values())), 3)}"
        hint = f"{text}; {flags('--key-map', rules)} gives them theirs"
        return UnderOtherNames(hint, len(moved) == len(wanted), there, places_all=not unplaced)
    alike = [name for name, shape in others.items() if shape in wanted.values()]
    if not wanted or Counter(wanted.values()) - Counter(others.values()):
        alike = _alike(others, {name: wanted[name] for name in there})
        if not alike:
            return UnderOtherNames(there=there)
    return UnderOtherNames(f"{few(grouped(alike), 3)} have the shapes of these: if they are meant, rename them with --key-map", there=there)


def _alike(names: Mapping[str, Shape], others: Mapping[str, Shape]) -> list[str]:
    """The names that end like one of the others, of the same shape."""
    ends = {(_end(name), shape) for name, shape in others.items()}
    return [name for name, shape in names.items() if (_end(name), shape) in ends]


def _end(name: str) -> str:
    return ".".join(name.split(".")[-ALIKE:])


def flags(option: str, globs: Sequence[str]) -> str:
    """An option for each glob; for many globs, one option with a placeholder."""
    return " ".join(f"{option} '{glob}'" for glob in globs) if len(globs) <= SHOWN_GLOBS else f"{option} GLOB (once for each of them)"
