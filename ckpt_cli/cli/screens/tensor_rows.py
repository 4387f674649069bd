"""The tensors of `inspect` on a terminal: what their names share as a heading, what is the same everywhere in the header.

A row is one line, whatever the width: names that do not fit are shortened in their middle, never broken.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.widgets import BOLD, DIM, WARNING, hidden
from ckpt_cli.names import printable
from ckpt_cli.results.inspect import TensorGroup

if TYPE_CHECKING:
    from rich.text import Text

LAYER = re.compile(r"[0-9]+|\{[0-9.,]+\}")
"""A component of a name that numbers layers: 27, {0..27}."""

PART = re.compile(r"\{[^}]*\}|[^.]+")
"""A component of a name; ranges have dots of their own."""

LEAST = 24
"""Columns that names have at least."""

LEAST_NEEDED = ("params", "count", "dtype", "layout")

SAME = "same storage as "
ODD = "! "
WHOLE = "whole"
"""What stands for no layout where others have one."""


@dataclass(frozen=True, slots=True)
class TensorTable:
    """Rows of tensors; ``dtype`` and ``layout`` are those of all of them, None where they differ."""

    rows: tuple[TensorGroup, ...]
    counted: bool

    @property
    def dtype(self) -> str | None:
        return _only(row.dtype for row in self.rows)

    @property
    def layout(self) -> str | None:
        return _only(row.layout for row in self.rows if not row.layout.startswith(SAME))

    @property
    def odd(self) -> int:
        """How many tensors differ from their group."""
        return sum(row.count for row in self.rows if row.odd)

    def facts(self) -> list[tuple[str, str]]:
        """What all rows share, and how many are odd."""
        same = ", ".join(filter(None, (self.dtype, self.layout)))
        odd = f"{text.plural(self.odd, 'tensor')} unlike the others of {'its' if self.odd == 1 else 'their'} group, marked !"
        return [("tensors", f"all {same}" if same else ""), ("odd", odd if self.odd else "")]

    def lines(self, width: int, *, ascii_only: bool = False) -> Iterator[Text]:
        """The heads and the rows, none longer than ``width``."""
        from rich.text import Text

        mark = ODD if self.odd else ""
        blocks = list(_blocks(self.rows))
        names = [len(name) for prefix, members in blocks for name, _ in _labels(prefix, members)]
        columns, dropped = self._columns(width - len(mark) - min(LEAST, max(names, default=0)))
        room = width - len(mark) - sum(wide + 2 for wide in columns.values())
        longest = min(max(len("tensor"), *names), room)
        head = Text.assemble((" " * len(mark) + "tensor".ljust(longest), BOLD))
        yield _finished(head, {name: name for name in columns}, columns, BOLD)
        for prefix, members in blocks:
            if prefix:
                yield Text(" " * len(mark) + text.elided(prefix, width - len(mark), ascii_only=ascii_only), style=DIM)
            for name, row in _labels(prefix, members):
                line = Text.assemble((mark and (ODD if row.odd else " " * len(ODD)), WARNING))
                line.append(text.elided(name, longest, ascii_only=ascii_only).ljust(longest), style=WARNING if row.odd else "")
                yield _finished(line, self._cells(row), columns, "")
                if row.layout.startswith(SAME):
                    remark = f"{' ' * (len(mark) + 2 * bool(prefix) + 2)}{printable(row.layout)}"
                    yield Text(text.elided(remark, width, ascii_only=ascii_only), style=DIM)
        yield from hidden(dropped, width)

    def _columns(self, room: int) -> tuple[dict[str, int], list[str]]:
        """The width of every column but the names', and what is left out where there is no room for all, the least needed first."""
        cells = [self._cells(row) for row in self.rows]
        shown = ["count"] if self.counted else []
        shown += ["shape", *(["dtype"] if self.dtype is None else []), *(["layout"] if self.layout is None else []), "params"]
        shown = [name for name in shown if any(row[name] for row in cells)]
        wide = {name: max(len(name), *(len(row[name]) for row in cells)) for name in shown}
        for name in LEAST_NEEDED:
            if sum(wide.values()) + 2 * len(wide) > room:
                wide.pop(name, None)
        return wide, [name for name in shown if name not in wide]

    def _cells(self, row: TensorGroup) -> dict[str, str]:
        return {
            "count": text.exact(row.count),
            "shape": text.shape(row.shape),
            "dtype": row.dtype,
            "layout": "" if row.layout.startswith(SAME) else printable(row.layout or WHOLE),
            "params": text.params(row.elements),
        }


def _only(values: Iterator[str]) -> str | None:
    """The value that all have, None if they differ."""
    counted = Counter(values)
    return next(iter(counted)) if len(counted) == 1 else None


def _blocks(rows: Sequence[TensorGroup]) -> Iterator[tuple[str, list[TensorGroup]]]:
    """Neighbours whose names begin alike: in a stack of layers up to its number, elsewhere by two components or more."""
    block: list[TensorGroup] = []
    shared: list[str] = []
    in_stack = False
    for row in rows:
        parts = PART.findall(printable(row.pattern))
        stack = _stack(parts)
        common = _common(shared, stack or parts[:-1])
        fits = (stack == shared) if stack is not None else (not in_stack and len(common) >= 2)
        if block and fits:
            shared = common
            block.append(row)
            continue
        if block:
            yield _prefix(shared, block, in_stack), block
        block, shared, in_stack = [row], stack or parts[:-1], stack is not None
    if block:
        yield _prefix(shared, block, in_stack), block


def _stack(parts: Sequence[str]) -> list[str] | None:
    """The name up to the number of a layer, if more than a leaf follows."""
    at = next((i for i, part in enumerate(parts) if LAYER.fullmatch(part)), None)
    return None if at is None or len(parts) - at <= 2 else list(parts[: at + 1])


def _common(one: Sequence[str], other: Sequence[str]) -> list[str]:
    shared = next((i for i, (mine, its) in enumerate(zip(one, other, strict=False)) if mine != its), min(len(one), len(other)))
    return list(one[:shared])


def _prefix(shared: Sequence[str], block: Sequence[TensorGroup], in_stack: bool) -> str:
    """The heading of a block: a layer's also of a single tensor, whose number would be lost where its name is shortened."""
    return ".".join(shared) + "." if in_stack or (len(block) > 1 and shared) else ""


def _labels(prefix: str, members: Sequence[TensorGroup]) -> Iterator[tuple[str, TensorGroup]]:
    for row in members:
        name = printable(row.pattern)
        yield (f"  {name.removeprefix(prefix)}" if prefix else name), row


def _finished(line: Text, cells: dict[str, str], columns: dict[str, int], style: str) -> Text:
    for name, wide in columns.items():
        value = cells[name]
        line.append(
            "  " + (value.rjust(wide) if name in ("count", "params") else value.ljust(wide)),
            style=DIM if name == "params" and style != BOLD else style,
        )
    line.rstrip()
    return line
