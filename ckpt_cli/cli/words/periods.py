"""Lengths of time as people write them: 30s, 5m, 1h30m."""

from __future__ import annotations

import re

UNIT = r"s(?:ec|ecs|econds?)?|m(?:in|ins|inutes?)?|h(?:r|rs|ours?)?|d(?:ays?)?"
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

PART = re.compile(rf"([0-9]+(?:\.[0-9]+)?) ?({UNIT})", re.ASCII)
PERIOD = re.compile(rf"\s*(?:{PART.pattern}\s*)+", re.ASCII)


def seconds_of(text: str) -> float | None:
    """The seconds that a text with units means, None if it is something else.

    >>> seconds_of("1h30m"), seconds_of("0.5 min"), seconds_of("30")
    (5400.0, 30.0, None)
    """
    if PERIOD.fullmatch(text) is None:
        return None
    return sum(float(number) * SECONDS[unit[0]] for number, unit in PART.findall(text))
