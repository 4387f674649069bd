"""Values of a config in one of the ways in which JSON and Python have them."""

from __future__ import annotations

import math
from collections.abc import Mapping

WRITTEN_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON does not have; Python reads the words, and transformers 5 writes {"__float__": word}."""


def as_number(value: object) -> object:
    """The number that transformers 5 wrote as an object, None if it is none of these; other values as they are."""
    return WRITTEN_FLOATS.get(str(value["__float__"])) if isinstance(value, Mapping) and list(value) == ["__float__"] else value


def plain(value: object) -> object:
    """A value with lists for tuples, words for keys, and numbers for what `as_number` reads.

    >>> plain({0: (1, {"__float__": "Infinity"})})
    {'0': [1, inf]}
    """
    value = as_number(value)
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
