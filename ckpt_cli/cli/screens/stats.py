"""What `ckpt inspect --stats` prints: the extremes, mean and deviation of values, and with -v how their exponents are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.checkpoint import checkpoint_facts
from ckpt_cli.cli.screens.heatmap import ASCII_LEVELS, LEVELS
from ckpt_cli.cli.screens.widgets import again, as_cells, new_table, next_line, plain, print_facts, print_notes
from ckpt_cli.names import printable
from ckpt_cli.results.statistics import StatsResult, TensorStats

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ckpt_cli.cli.session import Session

HEADS = ("tensor", "dtype", "absmax", "mean", "std", "zeros", "NaN", "Inf")
LEAST_NAME = 24
"""Columns of a name, however narrow the screen."""

BINS = 24
"""Powers of two that are drawn; what is smaller or larger is counted in the first or the last one."""


def stats_result(result: StatsResult, session: Session, *, show_all: bool = False) -> None:
    """The whole screen: per component the facts, a row per group (or tensor), and with -v their histograms."""
    console, checkpoint = session.out(), result.checkpoint
    shown = result.stats if show_all else result.stat_groups
    if session.quiet:
        for name, rows in result.stats.items():
            odd = sum(row.nan + row.infinite for row in rows)
            console.print(plain(f"{name}: {text.exact(odd)} NaN or infinite values"))
        return
    for info in checkpoint.components:
        if info.name not in shown:
            continue
        print_facts(console, [*checkpoint_facts(checkpoint, info), ("values", _summary(result.stats[info.name]))])
        console.print()
        console.print(_table(shown[info.name], console))
        if session.verbose:
            console.print()
            _print_histograms(shown[info.name], console)
        console.print()
    print_notes(session, checkpoint.notes)
    next_line(session, f"ckpt verify {text.argument(session.path or checkpoint.path)}{again(session, 'verify')} --full")


def _summary(rows: Sequence[TensorStats]) -> str:
    """What is not finite, in words: the first thing that people look for."""
    nan, infinite = sum(row.nan for row in rows), sum(row.infinite for row in rows)
    where = sum(bool(row.nan or row.infinite) for row in rows)
    if not where:
        return "all are finite"
    counted = [f"{text.exact(count)} {what}" for count, what in ((nan, "NaN"), (infinite, "infinite")) if count]
    return f"{' and '.join(counted)}, in {text.plural(where, 'tensor')}"


def _table(rows: Sequence[TensorStats], console: Console) -> Table:
    unwanted = {"NaN"} if not any(row.nan for row in rows) else set()
    unwanted |= {"zeros"} if not any(row.zeros for row in rows) else set()
    unwanted |= {"Inf"} if not any(row.infinite for row in rows) else set()
    unwanted |= {"dtype"} if len({row.dtype for row in rows}) == 1 else set()
    shown = [head for head in HEADS if head not in unwanted]
    cells = [_cells(row) for row in rows]
    taken = sum(2 + max(len(head), *(len(row[head]) for row in cells)) for head in shown if head != "tensor")
    room = max(console.width - taken, LEAST_NAME)
    table = new_table(shown, right=[i for i, head in enumerate(shown) if head not in ("tensor", "dtype")])
    for stats, row in zip(rows, cells, strict=True):
        style = "red" if stats.nan or stats.infinite else None
        table.add_row(*as_cells([elided(row["tensor"], room), *(row[head] for head in shown if head != "tensor")]), style=style)
    return table


def _cells(row: TensorStats) -> dict[str, str]:
    known = row.elements - row.nan - row.infinite
    return {
        "tensor": row.name,
        "dtype": row.dtype,
        "absmax": _number(row.absmax),
        "mean": _number(row.mean),
        "std": _number(row.std),
        "zeros": text.share(row.zeros / known) if known and row.zeros else "",
        "NaN": text.exact(row.nan) if row.nan else "",
        "Inf": text.exact(row.infinite) if row.infinite else "",
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def elided(name: str, room: int) -> str:
    """A name in at most ``room`` columns, cut in its middle; its end says more."""
    name = printable(name)
    if len(name) <= room:
        return name
    begin = (room - 2) // 3
    return f"{name[:begin]}..{name[-(room - 2 - begin) :]}"


def _print_histograms(rows: Sequence[TensorStats], console: Console) -> None:
    """A line per row: how many values lie in each power of two, as heights; all on one scale of exponents."""
    known = [row for row in rows if row.exponents]
    if not known:
        return
    low, high = _window(known)
    below, above = min(min(row.exponents) for row in known) < low, max(max(row.exponents) for row in known) > high
    levels = ASCII_LEVELS if console.options.ascii_only else LEVELS
    room = max(min(console.width, 160) - (high - low + 1) - 2, LEAST_NAME)
    names = [elided(row.name, room) for row in known]
    width = max(map(len, names))
    console.print(plain(f"|x| by powers of two, from 2^{low}{' or less' if below else ''} to 2^{high}{' or more' if above else ''}"))
    for name, row in zip(names, known, strict=True):
        counts = [row.exponents.get(power, 0) for power in range(low, high + 1)]
        counts[0] += sum(count for power, count in row.exponents.items() if power < low)
        counts[-1] += sum(count for power, count in row.exponents.items() if power > high)
        bars = "".join(levels[max(0, -(-count * len(levels) // max(counts)) - 1)] if count else " " for count in counts)
        console.print(plain(f"{name.ljust(width)}  {bars}"))


def _window(rows: Sequence[TensorStats]) -> tuple[int, int]:
    """The first and the last power of two that are drawn: those with the most values, every row counting the same."""
    shares: dict[int, float] = {}
    for row in rows:
        whole = sum(row.exponents.values())
        for power, count in row.exponents.items():
            shares[power] = shares.get(power, 0.0) + count / whole
    first, last = min(shares), max(shares)
    starts = range(first, max(last - BINS + 1, first) + 1)
    low = max(starts, key=lambda start: sum(shares.get(power, 0.0) for power in range(start, start + BINS)))
    return low, min(low + BINS - 1, last)
