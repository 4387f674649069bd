"""The numbers in which paths differ, and whether the order of paths is the one in which a shell lists them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

NUMBER_IN_NAMES = re.compile(r"[0-9]+(?:\.[0-9]+)*(?:[kKmMbB](?![A-Za-z0-9]))?", re.ASCII)
"""A number in the name of a file: that of a learning rate or a width (``ema_0.99.pt``) tells no order."""

WITH_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmb])", re.ASCII | re.IGNORECASE)
"""A number of steps, images or tokens as people shorten it: ``step_500``, ``step_1.5k``, ``ckpt_2M.pt``."""

UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}


def numbers_in(paths: Sequence[Path]) -> list[tuple[int, ...]] | None:
    """The numbers in which paths differ, if these are all in which they do; None for others, and where some are no natural numbers.

    >>> numbers_in([Path("model-abc:v9/model.ckpt"), Path("model-abc:v10/model.ckpt")])
    [(9,), (10,)]
    """
    texts = _texts(paths)
    return None if texts is None else [tuple(value for text in each if (value := value_of(text)) is not None) for each in texts]


def _texts(paths: Sequence[Path]) -> list[tuple[str, ...]] | None:
    names = list(map(str, paths))
    if len({NUMBER_IN_NAMES.sub("N", name) for name in names}) > 1:
        return None
    columns = zip(*(NUMBER_IN_NAMES.findall(name) for name in names), strict=True)
    differing = [column for column in columns if len(set(column)) > 1]
    if not differing or any(value_of(text) is None for column in differing for text in column):
        return None
    return list(zip(*differing, strict=True))


def value_of(text: str) -> int | None:
    """A natural number, perhaps with a unit; None for others.

    >>> value_of("500"), value_of("1.5k"), value_of("2M"), value_of("0.99")
    (500, 1500, 2000000, None)
    """
    if text.isdecimal():
        return int(text)
    match = WITH_UNIT.fullmatch(text)
    value = Decimal(match[1]) * UNITS[match[2].lower()] if match is not None else Decimal("0.5")
    return int(value) if value == int(value) else None


def shell_inversion(paths: Sequence[Path]) -> tuple[int, int] | None:
    """The first two neighbours in a row of paths that a shell has sorted, letter by letter, of which the second has the lower number.

    >>> shell_inversion([Path("v1"), Path("v10"), Path("v2")]), shell_inversion([Path("v10"), Path("v2"), Path("v1")])
    ((1, 2), None)
    """
    texts, numbers = _texts(paths), numbers_in(paths)
    if texts is None or numbers is None or (texts != sorted(texts) and list(map(str, paths)) != sorted(map(str, paths))):
        return None
    return next(((a, b) for a, b in itertools.pairwise(range(len(paths))) if numbers[a] > numbers[b]), None)
