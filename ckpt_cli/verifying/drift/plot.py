"""The drift of a model as a picture: layers across, modules down, the relative L2 change as colour on a log scale.

matplotlib is used without pyplot, so that nothing global changes and no window can open. Equal input gives equal bytes.
"""

from __future__ import annotations

import html
import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.errors import UsageError, install
from ckpt_cli.names import printable
from ckpt_cli.results.drift import BaseComparison, DriftGroup, Heatmap, HeatmapRow
from ckpt_cli.verifying.drift.groups import Scale, change_text, covered_text, largest_rows, scale_of
from ckpt_cli.verifying.drift.single_file import check_place, publish_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".html")
DPI = 200
COLOURS = "viridis"
"""Perceptually uniform, in order of lightness too, and told apart by colour-blind readers."""

UNCHANGED, MISSING, ODD = "#d9d9d9", "#ffffff", "#d62728"
LABEL = "relative L2 change, ||new - base|| / ||base|| (log scale)"
ROWS = 60
"""Rows of one stack of layers; of more, those with the biggest drift are drawn."""

OUTSIDE_ROWS, STACKS = 30, 12
TABLE_ROWS = 20
LONGEST = 56
"""Characters of a row's label."""

FONT, TITLE_FONT = 8.0, 10.0
CELL, WIDE_CELL = 0.19, 0.34
"""Height of a cell, and its largest width, in inches."""

MAP_WIDTH = 9.2
"""Width of the widest stack of layers, in inches."""

MARGIN, GAP, BAR, BAR_HEIGHT = 0.3, 0.62, 0.16, 3.1
LINE, BOLD = 0.19, 1.15
"""Inches from line to line of the title; how much wider bold text is."""

STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
TICK = 0.3
"""The least space between two layer numbers, in inches."""


def check_plot(path: str | os.PathLike[str], *, overwrite: bool = False) -> str:
    """The suffix of a picture that can be drawn and written; to be asked before long work.

    Raises UsageError for another suffix or without matplotlib, OutputExists.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise UsageError("the name of the plot has no supported format", path=path, expected=f"a name that ends in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("drawing needs matplotlib, which is not installed", hint=install("plot")) from None
    check_place(path, "plot", overwrite=overwrite)
    return suffix


def draw(comparison: BaseComparison, path: str | os.PathLike[str], *, name: str, overwrite: bool = False) -> None:
    """Draw a comparison that was made with values; ``name`` is what the checkpoint is called, the suffix of ``path`` decides the format.

    The file appears whole or not at all; one that is there is only replaced with ``overwrite``. Raises UsageError (suffix, no
    matplotlib, no values), OutputExists, NotWritable.
    """
    suffix = check_plot(path, overwrite=overwrite)
    if comparison.heatmap is None:
        raise UsageError("nothing to draw: only names were compared, not values")
    page = suffix == ".html"
    content = _page(comparison, name).encode() if page else _picture(comparison, name, suffix.removeprefix("."))
    publish_file(content, Path(path), "plot", overwrite=overwrite)


# -- the picture -----------------------------------------------------------------------------------------------------


def _picture(comparison: BaseComparison, name: str, format: str) -> bytes:
    with _style():
        figure = _figure(comparison, name)
        buffer = io.BytesIO()
        # Neither the date nor the version of matplotlib, which would differ between two equal pictures.
        metadata = {"Date": None, "Creator": None} if format == "svg" else {"Software": None}
        figure.savefig(buffer, format=format, dpi=DPI, metadata=metadata)
    return buffer.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    """Names are no formulas: a dollar sign in them means nothing. Text in SVG stays text."""
    from matplotlib import rc_context

    settings = {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": FONT,
        "text.parse_math": False,
        "text.usetex": False,
        "axes.linewidth": 0.6,
        "svg.fonttype": "none",
        "svg.hashsalt": "ckpt",
    }
    with rc_context(settings):  # type: ignore[arg-type]
        yield


@dataclass(frozen=True, slots=True)
class Panel:
    """One map of the picture. ``layers`` is empty for what lies outside of layers: one cell per row, and its value as text."""

    title: str
    rows: tuple[HeatmapRow, ...]
    layers: tuple[int, ...] = ()

    @property
    def height(self) -> float:
        return len(self.rows) * CELL


def _panels(heatmap: Heatmap) -> list[Panel]:
    panels = [_panel(_short(block.stack), block.rows, ROWS, block.layers) for block in heatmap.blocks[:STACKS]]
    if heatmap.outside:
        panels.append(_panel("outside of the layers" if panels else "all tensors", heatmap.outside, OUTSIDE_ROWS))
    return panels


def _panel(title: str, rows: tuple[HeatmapRow, ...], limit: int, layers: tuple[int, ...] = ()) -> Panel:
    cut = f", {limit} of {len(rows)} rows, those with the biggest drift" if len(rows) > limit else ""
    return Panel(title + cut, largest_rows(rows, limit), layers)


def _figure(comparison: BaseComparison, name: str) -> Figure:
    """All sizes are computed, in inches: a cell is equally high everywhere, and equally wide in every stack."""
    from matplotlib.figure import Figure

    panels = _panels(comparison.heatmap or Heatmap())
    values = [value for panel in panels for row in panel.rows for value in row.values]
    scale, title = scale_of(values), _title(comparison, name)
    cell = min(WIDE_CELL, MAP_WIDTH / max((len(panel.layers) or 1 for panel in panels), default=1))
    left = MARGIN + max((_width(_label(row.module)) for panel in panels for row in panel.rows), default=1.0) + 0.1
    right = left + max((max(len(panel.layers) * cell, _width(panel.title) * BOLD) for panel in panels), default=1.2) + 0.35
    head = 0.35 + LINE * len(title)
    body = sum(panel.height for panel in panels) + GAP * max(len(panels) - 1, 0) + (0.5 if panels and panels[-1].layers else 0.25)
    body = max(body, BAR_HEIGHT + 0.4) if scale is not None else body
    width = max(right + 1.25, MARGIN + max(_width(line, TITLE_FONT) for line in title) + MARGIN)
    height = head + body + 0.45
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")

    def place(x: float, top: float, wide: float, high: float) -> Axes:
        return figure.add_axes((x / width, (top - high) / height, wide / width, high / height))

    for i, line in enumerate(title):
        size, weight = (TITLE_FONT, "bold") if i == 0 else (FONT, "normal")
        figure.text(MARGIN / width, 1 - (0.28 + LINE * i) / height, line, fontsize=size, fontweight=weight, va="center")
    top = height - head - 0.2
    if scale is not None:
        _colour_bar(figure, place(right, top, BAR, BAR_HEIGHT), scale)
    for panel in panels:
        _draw_panel(place(left, top, len(panel.layers) * cell or WIDE_CELL, panel.height), panel, cell, scale)
        top -= panel.height + GAP
    _legend(figure, values, left / width, 0.2 / height)
    return figure


def _draw_panel(axes: Axes, panel: Panel, cell: float, scale: Scale | None) -> None:
    _cells(axes, [row.values for row in panel.rows], scale)
    axes.set_yticks([i + 0.5 for i in range(len(panel.rows))], [_label(row.module) for row in panel.rows])
    axes.tick_params(axis="both", length=2, width=0.6, pad=2, labelsize=FONT)
    axes.set_title(panel.title, fontsize=FONT, fontweight="bold", loc="left", pad=4)
    if panel.layers:
        step = next((step for step in STEPS if step * cell >= TICK), STEPS[-1])
        ticks = [i for i, layer in enumerate(panel.layers) if layer % step == 0]
        axes.set_xticks([i + 0.5 for i in ticks], [str(panel.layers[i]) for i in ticks])
        axes.set_xlabel("layer", labelpad=2)
    else:
        axes.set_xticks([])
        for i, row in enumerate(panel.rows):
            axes.text(1.25, i + 0.5, change_text(row.values[0]), va="center")


def _title(comparison: BaseComparison, name: str) -> list[str]:
    compared = sum(group.tensors for group in comparison.groups)
    counted = f"{compared} tensors compared, {len(comparison.drifts)} changed, {comparison.unchanged or 0} unchanged"
    if comparison.sample is not None:
        counted += f"; about {100 * comparison.sample:g}% of their elements"
    hidden = len(comparison.heatmap.blocks) - STACKS if comparison.heatmap is not None else 0
    if hidden > 0:
        counted += f"; {hidden} more stacks of layers are not drawn"
    partly = covered_text(comparison, "the base", "in the new one")
    return [
        "Drift of weights",
        f"new: {_short(name, 110)}",
        f"base: {_short(comparison.base, 110)}",
        counted,
        *([partly] if partly else []),
    ]


def _cells(axes: Axes, rows: Sequence[Sequence[float | None]], scale: Scale | None) -> None:
    import matplotlib
    from matplotlib.patches import Rectangle

    colours = matplotlib.colormaps[COLOURS]

    axes.set_xlim(0, max(map(len, rows), default=1))
    axes.set_ylim(len(rows), 0)
    for y, values in enumerate(rows):
        for x, value in enumerate(values):
            colour: str | tuple[float, ...] = ODD
            if value is None:
                colour = MISSING
            elif value == 0:
                colour = UNCHANGED
            elif scale is not None and math.isfinite(value):
                colour = tuple(colours(scale.place(value)))
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", linewidth=0.35))
    for side in axes.spines.values():
        side.set_color("#808080")


def _colour_bar(figure: Figure, axes: Axes, scale: Scale) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter, NullLocator

    colours = ScalarMappable(LogNorm(10.0**scale.low, 10.0**scale.high), COLOURS)
    bar = figure.colorbar(colours, cax=axes, extend="min" if scale.more_below else "neither")
    bar.set_label(LABEL)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.outline.set_linewidth(0.6)


def _legend(figure: Figure, values: Sequence[float | None], x: float, y: float) -> None:
    from matplotlib.patches import Patch

    there = {
        ("unchanged", UNCHANGED): any(value == 0 for value in values),
        ("nothing to compare", MISSING): any(value is None for value in values),
        ("NaN, or the base is all zero", ODD): any(value is not None and not math.isfinite(value) for value in values),
    }
    patches = [
        Patch(facecolor=colour, edgecolor="#808080", linewidth=0.5, label=text) for (text, colour), is_there in there.items() if is_there
    ]
    if patches:
        figure.legend(
            handles=patches, loc="center left", bbox_to_anchor=(x, y), ncols=len(patches), frameon=False, borderaxespad=0, borderpad=0
        )


# -- texts -----------------------------------------------------------------------------------------------------------


def _power(value: float) -> str:
    exponent = round(math.log10(value))
    return f"1e{exponent}" if exponent else "1"


def _label(module: str) -> str:
    return _short(module, LONGEST)


def _short(text: str, limit: int = LONGEST) -> str:
    """ASCII, as the font has not every character; the middle goes if it is too long."""
    plain = printable(text).encode("ascii", "backslashreplace").decode("ascii")
    half = (limit - 3) // 2
    return plain if len(plain) <= limit else f"{plain[:half]}...{plain[-half:]}"


def _width(text: str, size: float = FONT) -> float:
    """Inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    return (
        float(TextPath((0, 0), text, prop=FontProperties(family="DejaVu Sans", size=size)).get_extents().width) / 72
        if text.strip()
        else 0.0
    )


# -- the page --------------------------------------------------------------------------------------------------------

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 14px/1.45 "DejaVu Sans", Verdana, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222; }}
figure {{ margin: 1em 0; overflow-x: auto; }}
svg {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2em .8em .2em 0; text-align: right; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; white-space: normal; overflow-wrap: anywhere; }}
tr {{ border-bottom: 1px solid #ddd; }}
</style>
</head>
<body>
<h1>{title}</h1>
<figure>
{picture}
</figure>
<h2>{heading}</h2>
{table}
</body>
</html>
"""

HEADS = ("tensors", "count", "changed", "max |d|", "mean |d|", "relative L2", "1 - cosine")


def _page(comparison: BaseComparison, name: str) -> str:
    picture = _picture(comparison, name, "svg").decode()
    changed = [group for group in comparison.groups if group.changed and group.kind == "floating"]
    rows = "\n".join(_table_row(group) for group in changed[:TABLE_ROWS])
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in HEADS)
    shown = f"the {TABLE_ROWS} with the biggest drift of {len(changed)}" if len(changed) > TABLE_ROWS else "the biggest drift first"
    return PAGE.format(
        title=html.escape(f"Drift of {printable(name)} against {printable(comparison.base)}"),
        picture=picture[picture.index("<svg") :],
        heading=f"Groups of tensors, {shown}" if changed else "Nothing changed",
        table=f"<table>\n<tr>{heads}</tr>\n{rows}\n</table>" if changed else "",
    )


def _table_row(group: DriftGroup) -> str:
    share = f"{100 * group.changed / max(group.compared, 1):.1f}%"
    numbers = (group.max_abs, group.mean_abs, group.relative_l2, group.cosine_distance)
    cells = (printable(group.pattern), str(group.tensors), share, *("" if number is None else f"{number:.3g}" for number in numbers))
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
