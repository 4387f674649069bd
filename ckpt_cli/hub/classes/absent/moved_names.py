"""Tensors that are there under other names than the one looked for: with parts more, less or others in front."""

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
    return {name: other for name, other in pairs if name in once[0] and other in once[1]} or _with_another_front(wanted, others)


def _with_another_front(wanted: Mapping[str, tuple[int, ...]], others: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The same where all other names that begin alike begin otherwise among the wanted ones: of a text model in one for images.

    >>> wanted = {"model.text.layers.0.a": (2,), "model.text.norm": (3,), "model.image.layers.0.a": (4,)}
    >>> _with_another_front(wanted, {"model.layers.0.a": (2,), "model.norm": (3,)})
    {'model.text.layers.0.a': 'model.layers.0.a', 'model.text.norm': 'model.norm'}
    """
    ends: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in wanted.items():
        ends.setdefault((_last(name), shape), []).append(name)
    tried: set[tuple[str, str]] = set()
    for other, shape in others.items():
        for name in ends.get((_last(other), shape), ()) if other.count(".") >= SHORTEST else ():
            front = _other_fronts(name, other)
            if front in tried or not all(front) or any(part.isdigit() for each in front for part in each.split(".")):
                continue  # another layer is another tensor
            tried.add(front)
            new, old = front
            moved = {f"{new}{each.removeprefix(old)}": each for each in others if each.startswith(f"{old}.")}
            if all(wanted.get(to) == others[each] for to, each in moved.items()):
                return moved
    return {}


def _last(name: str) -> str:
    return ".".join(name.split(".")[-SHORTEST:])


def _other_fronts(name: str, other: str) -> tuple[str, str]:
    """What two names begin with before the parts at their ends that are equal."""
    one, two = name.split("."), other.split(".")
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(two), strict=False)))
    alike = min(alike, len(one) - 1, len(two) - 1)
    return ".".join(one[:-alike]), ".".join(two[:-alike])


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
