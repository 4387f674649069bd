"""What `ckpt diff` prints: the two, the verdict, what only one of them has, then the drift as a table and a map."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.heatmap import SHORTEST, drift_table, heatmap
from ckpt_cli.cli.screens.widgets import next_line, plain, print_facts, print_notes
from ckpt_cli.names import few
from ckpt_cli.results.diff import DiffResult, DiffSide
from ckpt_cli.results.drift import BaseComparison

if TYPE_CHECKING:
    from ckpt_cli.cli.session import Session

SHOWN = 4
"""How many names of a list are shown."""

LABELS = 13
"""Columns of the labels, with the space behind them."""


def diff_result(result: DiffResult, session: Session) -> None:
    """The whole screen of `ckpt diff`."""
    console, comparison = session.out(), result.comparison
    if session.quiet:
        console.print(plain("identical" if result.identical else "different"))
        return
    print_facts(
        console,
        [
            ("from", _side(result.before)),
            ("to", _side(result.after)),
            ("result", _verdict(result)),
            *_lists(comparison, console.width - LABELS),
            ("written", ", ".join(text.path(path) for path in result.written)),
        ],
    )
    if comparison.drifts:
        console.print()
        console.print(drift_table(comparison.groups, console.width))
        if comparison.heatmap is not None:
            console.print()
            for line in heatmap(comparison.heatmap, console.width, ascii_only=console.options.ascii_only):
                console.print(line, soft_wrap=True)
    console.print()
    print_notes(session, result.notes)
    if comparison.drifts and not result.written:
        next_line(session, f"ckpt diff {text.argument(session.path or result.before.path)}{session.again} --html drift.html")
    else:
        next_line(session, f"ckpt inspect {text.argument(result.after.path)}")


def _side(side: DiffSide) -> str:
    step = f", step {side.step}" if side.step is not None else ""
    return f"{text.path(side.path)}   {side.component}{step}, {text.plural(side.tensors, 'tensor')}, {text.size(side.bytes)}"


def _verdict(result: DiffResult) -> str:
    comparison = result.comparison
    share = f" (about {100 * comparison.sample:g}% of the values were compared)" if comparison.sample is not None else ""
    if result.identical:
        return f"identical, bit for bit{share}" if comparison.sample is None else f"no difference found{share}"
    compared = len(comparison.drifts) + (comparison.unchanged or 0)
    if not comparison.drifts:
        return f"{text.plural(compared, 'tensor')} compared, all values are equal{share}"
    return f"{len(comparison.drifts)} of {text.plural(compared, 'tensor')} differ{share}"


def _lists(comparison: BaseComparison, width: int) -> list[tuple[str, str]]:
    """What could not be compared, and what has not changed; empty lines are left out. A name of a part has at most one line."""
    pairs = dict.fromkeys(f"{item.base_dtype} -> {item.dtype}" for item in comparison.changes if item.dtype != item.base_dtype)
    facts = [
        ("only in A", _named(comparison.missing)),
        ("only in B", _named(comparison.extra)),
        ("other shape", _named(comparison.reshaped)),
        ("other dtype", f"{', '.join(list(pairs)[:SHOWN])}: {_named(comparison.other_dtype)}" if comparison.other_dtype else ""),
    ]
    counts = [(part.part, f": {text.plural(part.tensors, 'tensor')}") for part in comparison.frozen if part.tensors > 1]
    parts = [f"{text.elided(part, max(width - len(count) - 1, SHORTEST))}{count}" for part, count in counts]
    if comparison.drifts:
        facts.append(("unchanged", few(parts, SHOWN)))
    return facts + [(fact.what, fact.mine if fact.mine == fact.base else f"{fact.base} -> {fact.mine}") for fact in comparison.formats]


def _named(names: tuple[str, ...]) -> str:
    return f"{text.plural(len(names), 'tensor')}: {few(names, SHOWN)}" if names else ""
