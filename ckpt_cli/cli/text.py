"""Numbers, paths and names as people read them. Sizes are decimal (GB = 10^9 bytes), with at most four digits."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from ckpt_cli.errors import UsageError
from ckpt_cli.names import printable

Number = TypeVar("Number", int, float)
UNITS = (("T", 10**12), ("G", 10**9), ("M", 10**6), ("K", 10**3))
SUFFIXES = {"": 1, "B": 1} | {
    name: factor
    for letter, power in (("K", 1), ("M", 2), ("G", 3), ("T", 4))
    for name, factor in ((letter, 1000**power), (f"{letter}B", 1000**power), (f"{letter}IB", 1024**power))
}


def size(count: float) -> str:
    """Bytes: 15.23 GB."""
    for letter, factor in UNITS:
        if count >= factor:
            return f"{_digits(count / factor)} {letter}B"
    return f"{int(count)} B"


def params(count: int) -> str:
    """Elements: 7.62 B (billion), 545.0 M, 3 584."""
    for letter, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= factor:
            return f"{_digits(count / factor)} {letter}"
    return exact(count)


def number(value: object) -> str:
    """Six digits of a number; what is none (a NaN in JSON, a None) as it is."""
    return f"{value:.6g}" if isinstance(value, (int, float)) else str(value)


def share(value: float) -> str:
    """A coefficient as a percentage with four digits: 33.33%, -12.50%, 0.0012%."""
    percent = 100 * value
    return f"{percent:.2f}%" if abs(percent) >= 0.1 or not percent else f"{percent:.2g}%"


def exact(count: int) -> str:
    """All digits, in groups of three: 7 615 616 512."""
    return f"{count:,}".replace(",", " ")


def plural(count: int, noun: str) -> str:
    """1 file, 2 files."""
    return f"{exact(count)} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """0.4 s, 19 s, 3:05 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 100 else f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


def shape(dimensions: Iterable[int]) -> str:
    """152064 x 3584; "scalar" without dimensions."""
    return " x ".join(map(str, dimensions)) or "scalar"


def path(name: str | Path) -> str:
    """A path as short as it can be: relative to the current folder where it lies inside of it. Safe for a terminal."""
    text = os.fspath(name)
    if os.path.isabs(text):
        relative = os.path.relpath(text)
        text = relative if not relative.startswith("..") else text
    return printable(text)


def argument(name: str | Path) -> str:
    """A path for a command line that people copy."""
    return shlex.quote(path(name))


def parse_share(value: str) -> float:
    """A share as a number from 0 to 1: "5%" or "0.05". Raises UsageError."""
    try:
        return float(value[:-1]) / 100 if value.endswith("%") else float(value)
    except ValueError:
        raise UsageError("the share is not a number", expected="something like 5%") from None


def parse_size(text: str) -> int:
    """Bytes of "5GB" (decimal), "512MiB" (binary) or "1000000". Raises UsageError."""
    digits = text.strip().rstrip("kKmMgGtTiIbB ").strip()
    suffix = text.strip()[len(digits) :].strip().upper()
    try:
        number = float(digits)
    except ValueError:
        number = -1.0
    if suffix not in SUFFIXES or not 0 < number * SUFFIXES.get(suffix, 0) < 1 << 62:
        raise UsageError(f"{text!r} is not a size", expected="something like 5GB, 512MiB or 1000000000")
    return int(number * SUFFIXES[suffix])


def parse_list(text: str | None, kind: Callable[[str], Number], option: str) -> tuple[Number, ...] | None:
    """Numbers with commas between them; None stays None. Raises UsageError that names the option."""
    if text is None:
        return None
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option} {text!r} is not a list of numbers", expected="numbers with commas between them") from None


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"
