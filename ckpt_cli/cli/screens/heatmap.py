"""The drift of a model in a terminal: a map of layers and modules in characters, and the table of its groups.

A cell shows its value twice, by the height of its character and by colour, so that it can be read without colour and in a log.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.widgets import NARROW, NARROWER, ROWS, as_cells, new_table, plain
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
"""Characters of a module's name in 80 columns; wider screens give a third of theirs."""

WIDEST = 160
"""Columns of a map where the width is not limited."""

NUMBERS, FEWER_NUMBERS = 38, 29
"""Columns of the numbers in the narrow table, and in the narrower one."""

MAP_ROWS = 40
UNIT = "relative L2 change, ||new - base|| / ||base||, log scale"


def heatmap(drift: Heatmap, width: int, *, ascii_only: bool = False) -> list[Text]:
    """Lines of at most ``width`` columns: every stack of layers, the tensors outside, and the scale.

    If layers do not fit, a column stands for several of them and shows the largest change; the heading says so.
    """
    from rich.text import Text

    width = min(width, WIDEST)
    every = [row for block in drift.blocks for row in block.rows] + list(drift.outside)
    signs = _Signs(scale_of(value for row in every for value in row.values), ascii_only)
    longest = max((len(printable(row.module)) for row in every), default=0)
    margin = min(longest, max(LONGEST, width // 3))
    lines: list[Text] = []
    for block in drift.blocks:
        lines += [*_block(block, margin, width, signs), Text()]
    if drift.outside:
        lines.append(Text("outside of the layers" if drift.blocks else "all tensors", style="bold"))
        for row in largest_rows(drift.outside, ROWS):
            line = _name(row.module, margin)
            line.append_text(signs.sign(row.values[0]))
            lines.append(line.append(f" {change_text(row.values[0])}"))
        lines += [*_more(len(drift.outside) - ROWS), Text()]
    return lines + signs.legend([value for row in every for value in row.values], width)


def drift_table(groups: Sequence[DriftGroup], width: int) -> Table:
    """One row per group of tensors that changed, the biggest drift first.

    Narrow screens drop what is needed least: the number of tensors, the mean, and ".weight" at the end of names; then the largest change.
    """
    heads = ("tensor", "tensors", "changed", "max |d|", "mean |d|", "rel L2", "cosine")
    dropped = () if width >= NARROW else ("tensors", "mean |d|") if width >= NARROWER else ("tensors", "mean |d|", "max |d|")
    shown = [head for head in heads if head not in dropped]
    made = new_table(shown, right=range(1, len(shown)))
    room = width if width >= NARROW else max(width - (NUMBERS if width >= NARROWER else FEWER_NUMBERS), LONGEST)
    changed = [group for group in groups if group.changed]
    for group in changed[:ROWS]:
        row = {
            "tensor": text.elided(printable(group.pattern if width >= NARROW else group.pattern.removesuffix(".weight")), room),
            "tensors": str(group.tensors),
            "changed": text.share(group.changed / group.compared),
            "max |d|": _number(group.max_abs),
            "mean |d|": _number(group.mean_abs),
            "rel L2": _number(group.relative_l2),
            "cosine": cosine(group.cosine_distance),
        }
        made.add_row(*as_cells(row[head] for head in shown))
    if len(changed) > ROWS:
        made.add_row(*as_cells([f"... and {len(changed) - ROWS} more (--json lists all)", *[""] * (len(shown) - 1)]))
    return made


def cosine(distance: float | None) -> str:
    """A cosine from its distance to 1: 0.9871, and 1-2.1e-06 where four digits would say 1."""
    if distance is None:
        return ""
    return "1" if distance == 0 else f"1-{distance:.1e}" if distance < 1e-3 else f"{1 - distance:.4f}"


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

    def legend(self, values: Sequence[float | None], width: int) -> list[Text]:
        """The signs that occur, each with the value from which on it stands, and the unit."""
        from rich.text import Text

        entries = []
        if self._scale is not None:
            step = (self._scale.high - self._scale.low) / len(LEVELS)
            for level, sign in enumerate(self._levels):
                first = "<" if level == 0 and self._scale.more_below else ""
                text = f"{10 ** (self._scale.low + (level + (1 if first else 0)) * step):.1e}"
                entries.append(Text(sign, style=COLOURS[level]).append(f" {first}{text}", style="default"))
        if any(value == 0 for value in values):
            entries.append(self.sign(0.0).append(" unchanged", style="default"))
        if any(value is not None and not math.isfinite(value) for value in values):
            entries.append(self.sign(math.nan).append(" NaN, or the base is all zero", style="default"))
        lines = [Text(UNIT)] if self._scale is not None else []
        line = Text()
        for entry in entries:
            if line and len(line) + 2 + len(entry) > width:
                lines.append(line)
                line = Text()
            line = line.append("  " if line else "").append_text(entry)
        return [*lines, line] if line else lines


def _block(block: HeatmapBlock, margin: int, width: int, signs: _Signs) -> Iterable[Text]:
    from rich.text import Text

    room = max(width - margin - 2, 1)
    per = -(-len(block.layers) // room)
    wide = 2 if 2 * len(block.layers) <= room else 1
    starts = range(0, len(block.layers), per)
    heading = Text(printable(block.stack), style="bold").append(f"  {_span(block.axis, block.layers)}", style="default")
    if per > 1:
        heading.append(f", a column is {per} of them and shows the largest change", style="default")
    heading.truncate(width)
    yield heading
    yield Text(" " * (margin + 2) + _ruler([block.layers[i] for i in starts], wide), style="bright_black")
    for row in largest_rows(block.rows, MAP_ROWS):
        line = _name(row.module, margin)
        for start in starts:
            line.append_text(signs.sign(_worst(row.values[start : start + per]), wide))
        yield line
    yield from _more(len(block.rows) - MAP_ROWS)


def _span(axis: str, layers: Sequence[int]) -> str:
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
    name = printable(module)
    if len(name) > margin:
        # The end of a name says more than its middle.
        half = (margin - 2) // 3
        name = f"{name[:half]}..{name[-(margin - 2 - half) :]}"
    return plain(name.rjust(margin) + "  ")


def _more(count: int) -> list[Text]:
    return [plain(f"... and {count} more with less drift")] if count > 0 else []


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
