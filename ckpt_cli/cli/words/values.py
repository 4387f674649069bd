"""Values of options from the text on the command line, and what is said where they are wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any

import typer

from ckpt_cli.errors import UsageError
from ckpt_cli.given import EMPTY

NEWEST = ("latest", "newest", "last")
"""Words for the step that is taken anyway."""

FOLDER = re.compile(r"[A-Za-z_.=-]*?([0-9]+)/?", re.ASCII)
"""A step, or the name of its folder: global_step_100, checkpoint-100."""

NEGATIVE = re.compile(r" *-[0-9]+ *", re.ASCII)
"""A number that counts from the end, in other tools."""


def whole(context: typer.Context, param: typer.CallbackParam, value: Any) -> int | None:
    """A whole number. Raises UsageError."""
    number: int | None = _number(int, "a whole number", param, value)
    return number


def real(context: typer.Context, param: typer.CallbackParam, value: Any) -> float | None:
    """A number. Raises UsageError."""
    number: float | None = _number(float, "a number", param, value)
    return number


def step(context: typer.Context, param: typer.CallbackParam, value: Any) -> int | None:
    """The number of a step, also from the name of its folder; None for the newest one. Raises UsageError."""
    if not isinstance(value, str) or value.strip().lower() in NEWEST:
        return None
    if NEGATIVE.fullmatch(value):
        raise UsageError(
            f"{value} is no step", expected="a step such as 100, or latest", hint="the newest is the default: leave out --step"
        )
    found = FOLDER.fullmatch(value)
    number: int | None = _number(int, "a step such as 100, or latest", param, found[1] if found is not None else value)
    return number


def one_of(words: Sequence[str]) -> Callable[[typer.Context, typer.CallbackParam, Any], str | None]:
    """A reader of one of a few words, in upper or lower case. Raises UsageError."""

    def read(context: typer.Context, param: typer.CallbackParam, value: Any) -> str | None:
        if value is None or value.lower() in words:
            return None if value is None else str(value.lower())
        if not value.strip():
            raise UsageError(f"{param.opts[0]} is empty", expected=", ".join(words), hint=EMPTY)
        near = difflib.get_close_matches(value.lower(), words, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else None
        raise UsageError(f"{value} is not a choice for {param.opts[0]}", expected=", ".join(words), hint=hint)

    return read


def _number(kind: Callable[[str], Any], expected: str, param: typer.CallbackParam, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not value.strip():
        raise UsageError(f"{param.opts[0]} is empty", hint=EMPTY)
    try:
        return kind(value)
    except ValueError:
        raise UsageError(f"{param.opts[0]} {value!r} is not a number", expected=expected) from None
