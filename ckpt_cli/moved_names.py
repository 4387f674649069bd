"""Tensors that are there under other names than the one looked for: with parts more, or less, in front."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping

SHORTEST = 3
"""Parts of a name that must be equal where the other one has fewer: every norm ends in ``norm.weight``."""


def moved_names(wanted: Mapping[str, tuple[int, ...]], others: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Wanted name -> the other name of this shape that ends like it, whole; only where there is one, and for no second wanted name.

    >>> moved_names({"model.norm.weight": (2,)}, {"net.model.norm.weight": (2,)})
    {'model.norm.weight': 'net.model.norm.weight'}
    """
    pairs = [(end, name) for name in others for end in _ends(name) if end in wanted]
    pairs += [(name, end) for name in wanted for end in _ends(name) if end in others and end.count(".") + 1 >= SHORTEST]
    pairs = [(name, other) for name, other in pairs if wanted[name] == others[other]]
    sides = [[pair[side] for pair in pairs] for side in (0, 1)]
    once = [{name for name, group in itertools.groupby(sorted(side)) if len(list(group)) == 1} for side in sides]
    return {name: other for name, other in pairs if name in once[0] and other in once[1]}


def renaming_rules(moved: Mapping[str, str], names: Collection[str]) -> list[str] | None:
    """The rules ``A=B`` of a key map that give names in ``moved`` (wanted -> there) and no others of ``names`` the wanted ones.

    None if there are no such rules.

    >>> renaming_rules({"model.layers.0.a": "layers.0.a"}, ["layers.0.a", "model.layers.1.a"])
    ['layers=model.layers']
    """
    taken = {front for name in set(names) - set(moved.values()) for front in (name, *_fronts(name))}
    rules: dict[str, None] = {}
    for wanted, other in moved.items():
        new_parts, old_parts = wanted.split("."), other.split(".")
        common = range(min(len(new_parts), len(old_parts)), 0, -1)
        fronts = ((".".join(new_parts[:-kept]), ".".join(old_parts[:-kept])) for kept in common)
        rule = next((f"{old}={new}" for new, old in fronts if old and old not in taken), None)
        if rule is None:
            return None
        rules[rule] = None
    return list(rules)


def _ends(name: str) -> Iterator[str]:
    """What is left of a name without its first parts, the longest first."""
    parts = name.split(".")
    return (".".join(parts[start:]) for start in range(1, len(parts)))


def _fronts(name: str) -> Iterator[str]:
    """The prefixes of a name, up to each of its dots, the shortest first."""
    return itertools.accumulate(name.split(".")[:-1], lambda whole, part: f"{whole}.{part}")
