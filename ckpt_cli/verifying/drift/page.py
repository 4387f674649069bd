"""Static pages, first of all of a comparison: maps with tooltips, a table that sorts and filters, nothing that is loaded from elsewhere.

Every text from a file is escaped; the policy in the head of the page forbids all requests.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from ckpt_cli.names import printable
from ckpt_cli.results.drift import NOTHING, BaseComparison, Heatmap, HeatmapRow, TensorDrift
from ckpt_cli.verifying.drift.groups import Scale, covered_text, scale_of

VIRIDIS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""The colours of matplotlib's map at 0, 1/4, 1/2, 3/4 and 1."""

MOST_ROWS = 5000
"""Tensors of the table, those with the biggest drift: a browser takes long to sort more."""

LISTED = 500
"""Names of one list that are shown."""

COLUMNS = ("tensor", "elements", "changed", "max |d|", "mean |d|", "relative L2", "1 - cosine")
TIPS = {
    "changed": "share of elements with other bits",
    "max |d|": "largest absolute difference",
    "mean |d|": "mean absolute difference, over all elements",
    "relative L2": "||B - A|| / ||A||",
    "1 - cosine": "0 where both have the same direction",
}


def drift_page(comparison: BaseComparison, name: str) -> str:
    """The page, for a comparison that was made with values; equal input gives equal text."""
    base = comparison.base
    counts = f"{comparison.compared} tensors: {len(comparison.drifts)} differ, {comparison.unchanged or 0} are unchanged"
    facts = [
        ("A", base),
        ("B", name),
        ("compared", counts if comparison.compared else NOTHING),
        ("partly", covered_text(comparison, "A", "in B")),
        ("sample", "" if comparison.sample is None else f"about {100 * comparison.sample:g}% of the elements"),
        ("frozen", ", ".join(f"{part.part} ({part.tensors})" for part in comparison.frozen[:12] if part.tensors > 1)),
        *((fact.what, f"A {fact.base}, B {fact.mine}") for fact in comparison.formats),
    ]
    lists = [
        ("Only in A", comparison.missing),
        ("Only in B", comparison.extra),
        ("Integers or packed elements differ (no distance)", tuple(d.name for d in comparison.drifts if d.kind != "floating")),
        ("Other shape", tuple(f"{c.name}: {list(c.base_shape)} -> {list(c.shape)}" for c in comparison.changes if c.shape != c.base_shape)),
        ("Other dtype", tuple(f"{c.name}: {c.base_dtype} -> {c.dtype}" for c in comparison.changes if c.dtype != c.base_dtype)),
    ]
    return document(
        f"Drift from {base} to {name}",
        facts,
        maps("Relative L2 by layer and module", comparison.heatmap) if comparison.heatmap is not None and comparison.drifts else "",
        _table([drift for drift in comparison.drifts if drift.kind == "floating"]),
        "".join(_list(label, names) for label, names in lists if names),
    )


def document(title: str, facts: Iterable[tuple[str, str]], *parts: str) -> str:
    """A page of HTML: its title, facts without those that are empty, and ``parts`` of HTML one below the other."""
    listed = "".join(f"<dt>{escaped(label)}</dt><dd>{escaped(value)}</dd>" for label, value in facts if value)
    return PAGE.format(title=escaped(title), facts=listed, parts="\n".join(parts), script=SCRIPT)


def escaped(text: object) -> str:
    """Text in which nothing is HTML."""
    return html.escape(printable(text), quote=True)


# -- maps ------------------------------------------------------------------------------------------------------------


def maps(title: str, heatmap: Heatmap) -> str:
    """All stacks of layers as maps with a tip for each cell, and the scale."""
    rows = [row for block in heatmap.blocks for row in block.rows] + list(heatmap.outside)
    scale = scale_of(value for row in rows for value in row.values)
    made = [_map(block.stack, block.names, block.rows, scale, block.axis) for block in heatmap.blocks]
    if heatmap.outside:
        made.append(_map("outside of the layers" if heatmap.blocks else "all tensors", [""], heatmap.outside, scale))
    legend = "" if scale is None else _legend(scale)
    return f"<h2>{escaped(title)}</h2>{legend}{''.join(made)}"


def _map(title: str, layers: Sequence[str], rows: Iterable[HeatmapRow], scale: Scale | None, axis: str = "layer") -> str:
    step = max(1, -(-len(layers) // 24))
    heads = "".join(f"<th>{layer if i % step == 0 else ''}</th>" for i, layer in enumerate(layers))
    body = "".join(
        f"<tr><th>{escaped(row.module)}</th>"
        + "".join(
            _cell(row.module, f"{axis} {layer}" if layer else "", value, scale) for layer, value in zip(layers, row.values, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<table class="map"><caption>{escaped(title)}</caption><tr><th></th>{heads}</tr>{body}</table>'


def _cell(module: str, place: str, value: float | None, scale: Scale | None) -> str:
    where = f"{module}, {place}" if place else module
    return f'<td style="background:{_colour(value, scale)}" title="{escaped(f"{where}: {_said(value)}")}"></td>'


def _said(value: float | None) -> str:
    if value is None:
        return "nothing to compare"
    return "unchanged" if value == 0 else f"{value:.3g}" if math.isfinite(value) else "NaN, or the base (A) is all zero"


def _colour(value: float | None, scale: Scale | None) -> str:
    if value is None:
        return "transparent"
    if value == 0:
        return "#d9d9d9"
    if scale is None or not math.isfinite(value):
        return "#d62728"
    place = scale.place(value) * (len(VIRIDIS) - 1)
    low = min(int(place), len(VIRIDIS) - 2)
    mixed = (round(a + (b - a) * (place - low)) for a, b in zip(VIRIDIS[low], VIRIDIS[low + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _legend(scale: Scale) -> str:
    steps = [10.0 ** (scale.low + i * (scale.high - scale.low) / 12) for i in range(13)]
    cells = "".join(f'<td style="background:{_colour(value, scale)}" title="{value:.1e}"></td>' for value in steps)
    below = "below " if scale.more_below else ""
    return f'<table class="map"><tr><th>{below}1e{scale.low}</th>{cells}<th class="high">1e{scale.high}</th></tr></table>'


# -- tables ----------------------------------------------------------------------------------------------------------


def _table(drifts: Sequence[TensorDrift]) -> str:
    if not drifts:
        return "<h2>Nothing changed</h2>"
    rows = [_row(drift) for drift in drifts[:MOST_ROWS]]
    more = f"<p>... and {len(drifts) - MOST_ROWS} more with less drift (ckpt diff --json lists all)</p>" if len(drifts) > MOST_ROWS else ""
    return f"<h2>Tensors that differ</h2>{sortable(COLUMNS, TIPS, rows)}{more}"


def sortable(columns: Sequence[str], tips: Mapping[str, str], rows: Iterable[str]) -> str:
    """A table that sorts by the column that is clicked on, and filters by the first one."""
    heads = "".join(
        f'<th tabindex="0" role="button" title="{escaped(f"{tips.get(head, head)}; click to sort")}">{escaped(head)}</th>'
        for head in columns
    )
    search = '<p><input id="filter" type="search" placeholder="filter by name" aria-label="filter by name"></p>'
    return f'{search}<table id="drift"><thead><tr>{heads}</tr></thead><tbody>\n{chr(10).join(rows)}\n</tbody></table>'


def row(name: str, tip: str, numbers: Iterable[tuple[float | None, str]], *texts: str) -> str:
    """A row of such a table: its name, numbers as values and as text, and texts."""
    cells = "".join(f'<td data-value="{_sorted_as(value)}">{escaped(text)}</td>' for value, text in numbers)
    cells += "".join(f'<td data-value="{escaped(text)}">{escaped(text)}</td>' for text in texts)
    return f'<tr title="{escaped(tip)}"><td data-value="{escaped(name)}">{escaped(name)}</td>{cells}</tr>'


def _row(drift: TensorDrift) -> str:
    share = drift.changed / max(drift.compared, 1)
    numbers: list[tuple[float | None, str]] = [
        (drift.elements, str(drift.elements)),
        (share, f"{100 * share:.2f}%" if share >= 1e-4 else f"{100 * share:.2g}%"),
        *((number, _digits(number)) for number in (drift.max_abs, drift.mean_abs, drift.relative_l2, drift.cosine_distance)),
    ]
    tip = f"{drift.changed} of {drift.compared} elements changed; ||d|| {_digits(drift.l2)}, ||base|| {_digits(drift.base_norm)}"
    return row(drift.name, tip, numbers)


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _sorted_as(value: float | None) -> str:
    """A number as JavaScript reads it: NaN above infinities, nothing below everything."""
    if value is None:
        return "-1"
    return "1e400" if math.isinf(value) or math.isnan(value) else repr(float(value))


def _list(label: str, names: Sequence[str]) -> str:
    items = "".join(f"<li>{escaped(name)}</li>" for name in names[:LISTED])
    more = f"<p>... and {len(names) - LISTED} more</p>" if len(names) > LISTED else ""
    return f"<details><summary>{label}: {len(names)}</summary><ul>{items}</ul>{more}</details>"


SCRIPT = """
const table = document.getElementById("drift");
if (table) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => row.cells[column].dataset.value;
  const sort = (column) => {
    const down = heads[column].getAttribute("aria-sort") !== "descending";
    const rows = [...body.rows].sort((a, b) => column === 0
      ? value(b, 0).localeCompare(value(a, 0), undefined, { numeric: true })
      : Number(value(b, column)) - Number(value(a, column)) || value(b, column).localeCompare(value(a, column)));
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...(down ? rows : rows.reverse()));
  };
  heads.forEach((head, column) => {
    head.addEventListener("click", () => sort(column));
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(column); });
  });
  document.getElementById("filter").addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase();
    for (const row of body.rows) row.hidden = !value(row, 0).toLowerCase().includes(wanted);
  });
}
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; }}
h1 {{ font-size: 1.3em; overflow-wrap: anywhere; }}
dl {{ display: grid; grid-template-columns: max-content auto; gap: .1em 1em; }}
dt {{ font-weight: 600; }} dd {{ margin: 0; overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0 0 1em; }}
caption {{ text-align: left; font-weight: 600; }}
.map th {{ font-weight: 400; text-align: right; padding: 0 .5em 0 0; font-size: .85em; }}
.map th.high {{ padding: 0 0 0 .5em; }}
.map td {{ width: 1.1em; min-width: .5em; height: 1.1em; padding: 0; border: 1px solid #8884; }}
#drift th, #drift td {{ text-align: right; padding: .15em .8em .15em 0; white-space: nowrap; }}
#drift th:first-child, #drift td:first-child {{ text-align: left; white-space: normal; overflow-wrap: anywhere; }}
#drift th {{ cursor: pointer; position: sticky; top: 0; background: Canvas; }}
th[aria-sort=descending]::after {{ content: " \\25BE"; }} th[aria-sort=ascending]::after {{ content: " \\25B4"; }}
#drift tr {{ border-bottom: 1px solid #8884; }}
</style>
</head>
<body>
<h1>{title}</h1>
<dl>{facts}</dl>
{parts}
<script>{script}</script>
</body>
</html>
"""
