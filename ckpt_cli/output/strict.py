"""``--strict``: warnings count as errors. Those known before writing are refused before the first byte."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ckpt_cli.errors import Warned


class Remark(Protocol):
    """A note of a plan or of a result."""

    @property
    def level(self) -> str: ...

    @property
    def code(self) -> str: ...

    @property
    def text(self) -> str: ...


def refuse_warnings(notes: Iterable[Remark]) -> None:
    """Raise Warned if one of these notes is a warning."""
    warnings = [(note.code, note.text) for note in notes if note.level == "warning"]
    if warnings:
        raise Warned.of(warnings)
