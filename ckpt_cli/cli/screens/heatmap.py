"""The drift of a model in a terminal: a map of layers and modules in characters, and the table of its groups.

A cell shows its value twice, by the height of its character and by colour, so that it can be read without colour and in a log.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.widgets import DIM, GAP, NARROW, NARROWER, ROWS, as_cells, good, hidden, new_table, plain
from ckpt_cli.names import printable
from ckpt_cli.results.drift import DriftGroup, Heatmap, HeatmapBlock
from ckpt_cli.verifying.drift.groups import Scale, change_text, largest_rows, scale_of

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

LEVELS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "12345678"
UNCHANGED, ASCII_UNCHANGED = "·", "."
MISSING, ODD = " ", "!"
COLOURS = ("#3b528b", "#2e6e8e", "#24878e", "#1fa187", "#3aba76", "#73d056", "#b8de29", "#fde725")
"""Viridis without its darkest quarter, which cannot be read on black."""

LONGEST = 26
"""Characters of a module's name in 80 columns if the layers need the rest; wider screens give at least a third of theirs."""

SHORTEST = 12
"""Characters that a name has on any screen."""

WIDEST = 160
"""Columns of a map where the width is not limited."""

FEW = 4
"""Layers of which a map shows no more than their numbers do: these stand there instead, if there is room."""

MAP_ROWS = 40
NUMBER = 11
"""Columns of a sign and its value."""

DIGITS = 7
"""Digits that a cosine has at most."""

WITHOUT_WEIGHT = "tensor (.weight left out)"
"""The head of the names where they are too long for the screen with ".weight"."""

HEADS = ("tensor", "tensors", "changed", "max |d|", "mean |d|", "rel L2", "cosine")


@dataclass(frozen=True, slots=True)
class Sides:
    """What a screen calls the two that are compared; ``place`` is where the second one's tensors are."""

    base: str
    mine: str
    place: str

    @property
    def unit(self) -> str:
        return f"relative L2 change, ||{self.mine} - {self.base}|| / ||{self.base}||, log scale"


A_AND_B = Sides("A", "B", "in B")
HERE = Sides("base", "here", "here")
OUTPUT = Sides("base", "output", "in the output")
STEPS = Sides("previous", "step", "in the step")


def heatmap(drift: Heatmap, width: int, sides: Sides, *, ascii_only: bool = False) -> list[Text]:
    """Lines of at most ``width`` columns: every stack of layers, the tensors outside, and the scale.

    If layers do not fit, a column stands for several of them and shows the largest change; the heading says so. Of a few layers the
    values are written out.
    """
    from rich.text import Text

    width = min(width, WIDEST)
    every = [row for block in drift.blocks for row in block.rows] + list(drift.outside)
    signs = _Signs(scale_of(value for row in every for value in row.values), ascii_only)
    longest = max((len(printable(row.module)) for row in every), default=0)
    most = max((len(block.layers) for block in drift.blocks), default=0)
    margin = min(longest, max(LONGEST, width // 3, width - GAP - most))
    lines: list[Text] = []
    as_map = [block for block in drift.blocks if len(block.layers) > FEW or margin + len(block.layers) * (GAP + _wide(block)) > width]
    for block in drift.blocks:
        lines += [*(_block if block in as_map else _numbers)(block, margin, width, signs), Text()]
    if drift.outside:
        lines.append(Text("outside of the layers" if drift.blocks else "all tensors", style="bold"))
        for row in largest_rows(drift.outside, ROWS):
            line = _name(row.module, margin)
            line.append_text(signs.sign(row.values[0]))
            lines.append(line.append(f" {change_text(row.values[0])}"))
        lines += [*_more(len(drift.outside) - ROWS), Text()]
    return lines + signs.legend([value for row in every for value in row.values], width, sides, levels=bool(as_map or not drift.blocks))


def drift_table(groups: Sequence[DriftGroup], width: int) -> Table:
    """One row per group of tensors that changed and have distances, the biggest drift first.

    Narrow screens drop what is needed least, which `table_legend` says; where a name is too long, ".weight" leaves all of them, and what is
    still longer is shortened to one line.
    """
    shown = [head for head in HEADS if head not in _dropped(width)]
    made = new_table(shown, right=range(1, len(shown)))
    changed = [group for group in groups if group.changed and group.kind == "floating"]
    rows = [
        {
            "tensor": printable(group.pattern),
            "tensors": str(group.tensors),
            "changed": text.share(group.changed / group.compared),
            "max |d|": _number(group.max_abs),
            "mean |d|": _number(group.mean_abs),
            "rel L2": _number(group.relative_l2),
            "cosine": angle,
        }
        for group, angle in zip(changed[:ROWS], cosines(group.cosine_distance for group in changed[:ROWS]), strict=True)
    ]
    numbers = sum(GAP + max(len(row[head]) for row in ({head: head}, *rows)) for head in shown[1:])
    room = max(width - numbers, SHORTEST)
    short = any(len(row["tensor"]) > room for row in rows)
    made.columns[0].header = WITHOUT_WEIGHT if short and room >= len(WITHOUT_WEIGHT) else "tensor"
    for row in rows:
        name = row["tensor"].removesuffix(".weight") if short else row["tensor"]
        made.add_row(*as_cells([text.elided(name, room), *(row[head] for head in shown[1:])]))
    if len(changed) > ROWS:
        rest = f"... and {len(changed) - ROWS} more"
        told = f"{rest} (--json lists all)"
        made.add_row(*as_cells([told if len(told) <= room else rest, *[""] * (len(shown) - 1)]))
    return made


def table_legend(width: int, sides: Sides) -> list[Text]:
    """What the heads of `drift_table` mean, and which columns it has no room for."""
    said = f"d = {sides.mine} - {sides.base}; rel L2 = ||d|| / ||{sides.base}||; cosine 1: same direction"
    return [*(good(line, DIM) for line in text.wrapped(said, min(width, WIDEST), "")), *hidden(_dropped(width), width)]


def _dropped(width: int) -> tuple[str, ...]:
    return () if width >= NARROW else ("tensors", "mean |d|") if width >= NARROWER else ("tensors", "mean |d|", "max |d|")


def cosines(distances: Iterable[float | None]) -> list[str]:
    """Cosines from their distances to 1, all with the digits that tell the nearest from 1, at most `DIGITS`: 0.9871, >0.9999999."""
    distances = list(distances)
    near = [value for value in distances if value is not None and 0 < value < 1e-3]
    digits = max((min(1 - math.floor(math.log10(value)), DIGITS) for value in near), default=4)
    least = 10**-digits / 2

    def said(distance: float | None) -> str:
        if distance is None or distance == 0:
            return "" if distance is None else "1"
        return f">{1 - 2 * least:.{digits}f}" if distance < least else f"{1 - distance:.{digits}f}"

    return [said(distance) for distance in distances]


class _Signs:
    """What a value looks like."""

    def __init__(self, scale: Scale | None, ascii_only: bool) -> None:
        self._scale = scale
        self._levels = ASCII_LEVELS if ascii_only else LEVELS
        self._unchanged = ASCII_UNCHANGED if ascii_only else UNCHANGED

    def sign(self, value: float | None, count: int = 1) -> Text:
        from rich.text import Text

        if value is None:
            return Text(MISSING * count)
        if value == 0:
            return Text(self._unchanged * count, style="bright_black")
        if self._scale is None or not math.isfinite(value):
            return Text(ODD * count, style="bold red")
        level = min(int(self._scale.place(value) * len(LEVELS)), len(LEVELS) - 1)
        return Text(self._levels[level] * count, style=COLOURS[level])

    def legend(self, values: Sequence[float | None], width: int, sides: Sides, *, levels: bool) -> list[Text]:
        """The unit, and the signs that occur, those of ``levels`` each with the value from which on it stands."""
        from rich.text import Text

        scale, others = [], []
        if self._scale is not None and levels:
            step = (self._scale.high - self._scale.low) / len(LEVELS)
            for level, sign in enumerate(self._levels):
                first = "<" if level == 0 and self._scale.more_below else ""
                value = f"{10 ** (self._scale.low + (level + (1 if first else 0)) * step):.1e}"
                scale.append(Text(sign, style=COLOURS[level]).append(f" {first}{value}", style="default"))
        if levels and any(value == 0 for value in values):
            others.append(self.sign(0.0).append(" unchanged", style="default"))
        if any(value is not None and not math.isfinite(value) for value in values):
            others.append(self.sign(math.nan).append(f" NaN, or {sides.base} is all zero", style="default"))
        lines = _rows(scale, width)
        for entry in others:
            if lines and len(lines[-1]) + GAP + len(entry) <= width:
                lines[-1].append(" " * GAP).append_text(entry)
            else:
                lines.append(entry)
        return [*map(Text, text.wrapped(sides.unit, width, "")), *lines] if self._scale is not None else lines


def _rows(entries: Sequence[Text], width: int) -> list[Text]:
    """Entries in as few lines as there is room for, in columns if these are several."""
    from rich.text import Text

    if not entries or sum(len(entry) + GAP for entry in entries) - GAP <= width:
        return [Text(" " * GAP).join(entries)] if entries else []
    widest = max(map(len, entries))
    fit = max((width + GAP) // (widest + GAP), 1)
    each = -(-len(entries) // -(-len(entries) // fit))
    lines = []
    for start in range(0, len(entries), each):
        row = [entry.copy() for entry in entries[start : start + each]]
        for entry in row:
            entry.pad_right(widest - len(entry))
        lines.append(Text(" " * GAP).join(row))
    return lines


def _block(block: HeatmapBlock, margin: int, width: int, signs: _Signs) -> Iterable[Text]:
    from rich.text import Text

    room = max(width - margin - GAP, 1)
    per = -(-len(block.layers) // room)
    wide = 2 if 2 * len(block.layers) <= room else 1
    starts = range(0, len(block.layers), per)
    said = f"  {_span(block.axis, block.names)}" + (f", the largest of {per} per column" if per > 1 else "")
    yield Text(text.elided(printable(block.stack), max(width - len(said), SHORTEST)), style="bold").append(said, style="default")
    yield Text(" " * (margin + GAP) + _ruler([block.layers[i] for i in starts], wide), style="bright_black")
    for row in largest_rows(block.rows, MAP_ROWS):
        line = _name(row.module, margin)
        for start in starts:
            line.append_text(signs.sign(_worst(row.values[start : start + per]), wide))
        yield line
    yield from _more(len(block.rows) - MAP_ROWS)


def _wide(block: HeatmapBlock) -> int:
    """How wide a column of numbers is."""
    return max(NUMBER, *(len(f"{block.axis} {name}") for name in block.labels)) if block.labels else NUMBER


def _numbers(block: HeatmapBlock, margin: int, width: int, signs: _Signs) -> Iterable[Text]:
    """The values of a few layers as a table, each behind its sign."""
    from rich.text import Text

    said, wide = f"  {_span(block.axis, block.names)}", _wide(block)
    yield Text(text.elided(printable(block.stack), max(width - len(said), SHORTEST)), style="bold").append(said, style="default")
    heads = "".join(" " * GAP + f"{block.axis} {name}".ljust(wide) for name in block.names)
    yield Text(" " * margin + heads.rstrip(), style="bright_black")
    for row in largest_rows(block.rows, MAP_ROWS):
        line = _name(row.module, margin)
        line.right_crop(GAP)
        for value in row.values:
            number = "" if value is None else change_text(value)
            line.append(" " * GAP).append_text(signs.sign(value)).append(f" {number}".ljust(wide - 1))
        yield line
    yield from _more(len(block.rows) - MAP_ROWS)


def _span(axis: str, layers: Sequence[str]) -> str:
    return f"{axis}s {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"{axis} {layers[0]}"


def _ruler(layers: Sequence[int], wide: int) -> str:
    """The number of a layer above its column, as often as there is room; none beyond the last column."""
    line = ""
    for column, layer in enumerate(layers):
        place, end = column * wide, len(layers) * wide
        number = str(layer)
        due = column == 0 or (column % (5 if wide == 2 else 10) == 0 and place + len(number) <= end)
        if due and len(line) <= max(place - 1, 0):
            line = line.ljust(place) + number
    return line


def _worst(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.nan if any(map(math.isnan, known)) else max(known, default=None)


def _name(module: str, margin: int) -> Text:
    return plain(text.elided(printable(module), margin, ascii_only=True).rjust(margin) + "  ")


def _more(count: int) -> list[Text]:
    return [plain(f"... and {count} more with less drift")] if count > 0 else []


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
