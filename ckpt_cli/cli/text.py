"""Numbers, paths and names as people read them. Sizes are decimal (GB = 10^9 bytes)."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.names import plural as plural
from ckpt_cli.names import printable, size_text
from ckpt_cli.paths import from_here
from ckpt_cli.urls import shown

size = size_text

DEFAULTS = {"shard_order": "auto"}
"""Options that need not be said again with these values."""

LEAST_BEGIN = 4
"""Characters that the beginning of a shortened name keeps."""


def params(count: int) -> str:
    """Elements, with three digits: 7.62 B (billion), 54.5 M, 545 M, 3,584."""
    for letter, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= factor:
            digits = 2 if count < 9.995 * factor else 1 if count < 99.95 * factor else 0
            return f"{count / factor:.{digits}f} {letter}"
    return exact(count)


def number(value: object) -> str:
    """Six digits of a number; anything else (a NaN in JSON, None) unchanged."""
    return f"{value:.6g}" if isinstance(value, (int, float)) else str(value)


def share(value: float) -> str:
    """A coefficient as a percentage with four digits: 33.33%, -12.50%, 0.0012%."""
    percent = 100 * value
    return f"{percent:.2f}%" if abs(percent) >= 0.1 or not percent else f"{percent:.2g}%"


def exact(count: int) -> str:
    """All digits, in groups of three: 7,615,616,512."""
    return f"{count:,}"


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
    text = shown(os.fspath(name))
    return printable(from_here(text) if os.path.isabs(text) else text)


def argument(name: str | Path) -> str:
    """A path for a command line that people copy."""
    text = shown(os.fspath(name))
    return shell.path(from_here(text) if os.path.isabs(text) else text)


def words_again(words: Iterable[str]) -> str:
    """The words of a command, paths among them, for a line that people copy."""
    return " ".join(argument(word) if os.path.isabs(word) else shell.word(word) for word in words)


def elided(name: str, width: int, *, ascii_only: bool = False) -> str:
    """A name in at most ``width`` characters, shortened in its middle: its end says more than its middle.

    A range of layers, ``{0..27}``, stays whole if there is room, and else goes: half of it reads like another one.
    """
    if len(name) <= width:
        return name
    gap = "..." if ascii_only else "…"
    left = max((width - len(gap)) // 3, 0)
    begin = len(name) - max(width - len(gap) - left, 0)
    opened, closed = name.rfind("{", 0, begin), name.find("}", max(begin - 1, 0))
    if opened >= 0 and closed >= begin and "}" not in name[opened:begin] and "{" not in name[begin:closed]:
        whole = width - len(gap) - (len(name) - opened)
        left, begin = (min(left, whole), opened) if whole >= LEAST_BEGIN else (left, closed + 1)
    opened = name.rfind("{", 0, left)
    left = opened if opened > 0 and "}" not in name[opened:left] else left
    return f"{name[:left]}{gap}{name[begin:]}"[:width]


def wrapped(text: str, width: int, indent: str) -> list[str]:
    """Lines of at most ``width`` columns, broken between words; a longer word, such as a path, stays whole."""
    first = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.strip(), width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def options_again(**given: object) -> str:
    """The options that say what is read and how, as they were given, for the next command."""
    said = [
        (name, each)
        for name, value in given.items()
        for each in (value if isinstance(value, (list, tuple)) else [value])
        if each is not None and each != DEFAULTS.get(name)
    ]
    return "".join(f" --{name.replace('_', '-')} {argument(str(value))}" for name, value in said)


def extent(values: Sequence[float]) -> str:
    """Numbers as the smallest and the largest of them: "4-16", or the only one."""
    return "-".join(f"{value:.6g}" for value in dict.fromkeys((min(values), max(values))))
