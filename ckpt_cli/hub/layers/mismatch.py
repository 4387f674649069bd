"""What a comparison of a config with tensors finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A count in config.json that differs from the tensors.

    ``lacking``: globs for missing tensors that a loader needs; empty for mere oddities.
    """

    code: str
    text: str
    lacking: tuple[str, ...] = ()
