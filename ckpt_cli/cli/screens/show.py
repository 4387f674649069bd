"""What `ckpt show` prints: the tensor, its values as a grid, and which rank holds which part."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from ckpt_cli import shell
from ckpt_cli.cli import text
from ckpt_cli.cli.screens.widgets import again, as_cells, new_table, next_line, plain, print_facts, print_notes
from ckpt_cli.names import printable
from ckpt_cli.results.statistics import HeldPart, ShowResult

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt_cli.cli.session import Session

DIGITS = {"F32": 9, "F16": 5, "BF16": 4}
"""Significant digits that tell all values of a dtype apart; of others, those of float64 do."""

ROWS = 16
"""Parts that are listed without -v."""


def show_result(result: ShowResult, session: Session) -> None:
    """The whole screen of `ckpt show`; with -q the values alone."""
    console = session.out()
    if session.quiet:
        _print_values(result, session, console, exact=True)
        return
    step = f", step {result.step}" if result.step is not None else ""
    shape = f"{text.shape(result.shape)}   {result.dtype}" + (f"   {result.layout}" if result.layout else "")
    index = f"[{result.index}]" if result.index else ""
    print_facts(
        console,
        [
            ("tensor", f"{printable(result.name)}{index}"),
            ("shape", shape),
            ("found in", f"{text.path(result.path)}   {result.component}{step}"),
        ],
    )
    console.print()
    _print_values(result, session, console, exact=session.verbose)
    if any(part.box for part in result.parts):
        console.print()
        _print_parts(result, console, everything=session.verbose)
    console.print()
    print_notes(session, result.notes)
    where = f"{text.argument(session.path or result.path)} {shell.word(result.name)}{session.again}"
    all_of_it = f"ckpt inspect {text.argument(session.path or result.path)}{again(session, 'inspect')}"
    whole = len(result.values) == math.prod(result.shape)
    last = _last_slice(result)
    next_line(session, all_of_it if whole or result.index == last else f"ckpt show {where} --slice {last}")


def _last_slice(result: ShowResult) -> str:
    """The last rows and columns, which the first screen does not show."""
    outer = [str(length - 1) for length in result.shape[:-2]]
    return ",".join([*outer, *(f"{max(length - 4, 0)}:{length}" for length in result.shape[-2:])])


def _print_values(result: ShowResult, session: Session, console: Console, *, exact: bool) -> None:
    """A line per row; of more than two dimensions matrix by matrix, and of wide ones as many columns at a time as fit."""
    if not result.values:
        console.print(plain("(no elements)"))
        return
    digits = DIGITS.get(result.dtype, 17) if exact else 5
    cells = [_value(value, digits) for value in result.values]
    columns = result.shown[-1] if result.shown else 1
    width = max(map(len, cells))
    fit = columns if session.quiet else max((console.width + 2) // (width + 2), 1)
    fit = -(-columns // -(-columns // fit))  # no lonely column at the end
    outer = result.shown[:-2]
    rows = result.shown[-2] if len(result.shown) > 1 else 1
    for number, first in itertools.product(range(math.prod(outer)), range(0, columns, fit)):
        last = min(first + fit, columns)
        place = [str(number // math.prod(outer[i + 1 :]) % n) for i, n in enumerate(outer)]
        if outer or fit < columns:
            console.print(plain(f"[{', '.join([*place, ':', f'{first}:{last}'][-len(result.shown) :])}] of the slice"))
        for row in range(rows):
            start = (number * rows + row) * columns
            line = "  ".join(cell.rjust(width) for cell in cells[start + first : start + last])
            console.print(plain(line), soft_wrap=True)


def _value(value: float | bool | str, digits: int) -> str:
    if isinstance(value, (bool, int, str)):
        return {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}.get(str(value), str(value))
    return f"{value:.{digits}g}"


def _print_parts(result: ShowResult, console: Console, *, everything: bool) -> None:
    """Which rank holds what; boxes as slices of the tensor (or of the array that it is stored in)."""
    listed = result.parts if everything else result.parts[:ROWS]
    table = new_table(("rank", "holds", "in", ""), right=(0,))
    for part in listed:
        table.add_row(*as_cells((str(part.rank), _box(part), part.file, "replica" if part.replica else "")))
    console.print(table)
    if len(listed) < len(result.parts):
        console.print(plain(f"... and {len(result.parts) - len(listed)} more (-v or --json lists all)"))


def _box(part: HeldPart) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in part.box)}]" if part.box else "the scalar"
