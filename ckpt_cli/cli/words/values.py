"""Values of options from the text on the command line, and what is said where they are wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any

import typer

from ckpt_cli.cli.words.periods import seconds_of
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
    number: int | None = _number(int, "a whole number", param, value, _whole_meant)
    return number


def threads(context: typer.Context, param: typer.CallbackParam, value: Any) -> int | None:
    """A number of threads; None where it is left to ckpt. Raises UsageError."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    number: int | None = _number(int, "a whole number, or auto", param, value)
    return number


def real(context: typer.Context, param: typer.CallbackParam, value: Any) -> float | None:
    """A number. Raises UsageError."""
    number: float | None = _number(float, "a number", param, value)
    return number


def seconds(context: typer.Context, param: typer.CallbackParam, value: Any) -> float | None:
    """A number of seconds, with or without units: 30, 30s, 5m, 1h30m. Raises UsageError."""
    period = seconds_of(value) if isinstance(value, str) else None
    number: float | None = _number(float, "seconds, or a time such as 30s, 5m or 1h", param, value) if period is None else period
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
    number: int | None = _number(int, "a step such as 100, or latest", param, found[1] if found is not None else value, _step_meant)
    return number


def _step_meant(value: str, option: str) -> str | None:
    """What is written for a step that was given in another way."""
    listed = re.split(r"[\s,;:-]+|\.\.+", value.strip())
    if len(listed) > 1 and all(map(str.isdecimal, listed)):
        several = f", or ckpt average RUN --steps {','.join(listed)} -o DIR for their mean" if option == "--step" else ""
        return f"one step: {option} {listed[-1]}{several}"
    if (meant := _whole_meant(value, option)) is not None:
        return meant
    if option == "--to":
        return "--to is the last step; -o DIR names the folder to write"
    return "ckpt watch RUN --once merges every step" if value.lower() == "all" and option == "--step" else "ckpt detect RUN lists the steps"


def _whole_meant(value: str, option: str) -> str | None:
    """The whole number that was written as another: 1e3, 1k, 2.0."""
    if not re.fullmatch(r"\d+(\.\d*)?(e\+?\d)?|\d+(\.\d+)?k", value.lower()):
        return None
    number = float(value.lower().replace("k", "e3"))
    return f"did you mean {option} {int(number)}?" if number.is_integer() else None


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


def _number(
    kind: Callable[[str], Any],
    expected: str,
    param: typer.CallbackParam,
    value: Any,
    meant: Callable[[str, str], str | None] = lambda value, option: None,
) -> Any:
    if not isinstance(value, str):
        return value
    if not value.strip():
        raise UsageError(f"{param.opts[0]} is empty", hint=EMPTY)
    try:
        return kind(value)
    except ValueError:
        if re.match("--?[a-z]", value):
            raise UsageError(f"{param.opts[0]} needs a value, and {value} follows", expected=expected) from None
        hint = meant(value, param.opts[0])
        raise UsageError(f"{param.opts[0]} {value!r} is not a number", expected=expected, hint=hint) from None
