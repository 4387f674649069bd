"""Patterns of names: between layers and experts, a number between dots differs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")

SHOWN_RUNS = 4
"""How many runs of numbers without a rule are written out."""


def pattern_of(name: str) -> tuple[str, tuple[int, ...]]:
    """The name with ``{}`` in place of each numeric part, and the numbers.

    >>> pattern_of("model.layers.3.mlp.weight")
    ('model.layers.{}.mlp.weight', (3,))
    """
    return NUMBER.sub("{}", name), tuple(int(number) for number in NUMBER.findall(name))


def ranged(pattern: str, numbers: Sequence[Sequence[int]]) -> str:
    """The pattern with the range of each column of ``numbers`` (one row per name) in its place.

    ``{0..27}`` without a gap, ``{3..27..4}`` in equal steps, else the runs: ``{0..2,5}``.

    >>> ranged("layers.{}.mlp.weight", [(0,), (1,), (2,)])
    'layers.{0..2}.mlp.weight'
    """
    parts = pattern.split("{}")
    columns = [_range(sorted(set(column))) for column in zip(*numbers, strict=True)]
    return "".join(part + (columns[i] if i < len(columns) else "") for i, part in enumerate(parts))


def _range(values: Sequence[int]) -> str:
    first, last = values[0], values[-1]
    if first == last:
        return str(first)
    steps = {b - a for a, b in itertools.pairwise(values)}
    if steps == {1}:
        return f"{{{first}..{last}}}"
    if len(steps) == 1 and len(values) > 2:
        return f"{{{first}..{last}..{steps.pop()}}}"
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
    if len(texts) > SHOWN_RUNS:
        texts = [*texts[: SHOWN_RUNS - 1], "...", texts[-1]]
    return f"{{{','.join(texts)}}}"


def grouped(names: Sequence[str]) -> list[str]:
    """Names that differ only in numbers, as one name with the range of the numbers."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        pattern, numbers = pattern_of(name)
        groups.setdefault(pattern, []).append(numbers)
    return [ranged(pattern, numbers) for pattern, numbers in groups.items()]
