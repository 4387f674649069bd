"""State dicts of one save that are parts of one model: ``model_part0``, ``model_part1``, as torchtitan calls stages of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence

from ckpt_cli.errors import PartOfSet
from ckpt_cli.names import few

PART = re.compile(
    r"(?P<stem>[A-Za-z0-9].{0,99}?)[_.-]?((?<![A-Za-z])|(?<=[Mm]odel))(part|chunk|pp([_-]?(stage|rank))?)[_.-]?(?P<number>[0-9]{1,4})",
    re.ASCII,
)
"""The word stands alone, but for a model's: ``app2`` and ``counterpart2`` are no parts."""
NUMBER = re.compile(r"[_.-]?[0-9]{1,4}\Z", re.ASCII)


def stem_of(name: str) -> str:
    """The model that a part belongs to; the name itself for others."""
    fields = PART.fullmatch(name)
    return name if fields is None else fields["stem"]


def with_parts(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of state dicts by those of the models that they make up: most are one of their own.

    Raises PartOfSet if a part is missing: they count from 0, or from 1.
    """
    there = list(names)
    made: dict[str, dict[int, str]] = {}
    for name in there:
        fields = PART.fullmatch(name)
        if fields is None or fields["stem"] in there or _is_second(name, there):
            made[name] = {0: name}
        else:
            made.setdefault(fields["stem"], {})[int(fields["number"])] = name
    for stem, parts in made.items():
        first = 1 if len(parts) > 1 and 0 not in parts else 0
        lacking = [number for number in range(first, first + len(parts)) if number not in parts]
        if lacking:
            listed = [parts[number] for number in sorted(parts)]
            raise PartOfSet(f"{few(listed)} of {stem} are here, part {lacking[0]} is not", expected="all parts of the model")
    return {stem: [parts[number] for number in sorted(parts)] for stem, parts in made.items()}


def _is_second(name: str, there: Container[str]) -> bool:
    """Whether a name is that of another model with a number: ``spare_part2`` beside ``spare_part``."""
    return NUMBER.sub("", name) in there


def refuse_twice(held: Container[str], more: Iterable[str], parts: Sequence[str]) -> None:
    """Raise PartOfSet if a part holds a tensor that those before it hold too, as where layers are counted anew."""
    twice = next((name for name in more if name in held), None)
    if twice is not None:
        text = f"{few(parts)} are parts of one model by name, but two of them hold this tensor"
        raise PartOfSet(text, tensor=twice, expected="parts with different tensors")
