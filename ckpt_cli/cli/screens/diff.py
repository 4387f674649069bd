"""What `ckpt diff` prints: the two, the verdict, what only one of them has, then the drift as a table and a map."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.comparison import comparison_facts, print_drift
from ckpt_cli.cli.screens.heatmap import A_AND_B
from ckpt_cli.cli.screens.widgets import next_line, plain, print_facts, print_notes
from ckpt_cli.cli.words.elsewhere import free_file
from ckpt_cli.results.diff import DiffResult, DiffSide

if TYPE_CHECKING:
    from ckpt_cli.cli.session import Session


def diff_result(result: DiffResult, session: Session, *, other: str | None = None, typed: bool = False) -> None:
    """The whole screen of `ckpt diff`. ``other`` is its second path, if it was given; ``typed``: components were asked for."""
    console, comparison = session.out(), result.comparison
    if session.quiet:
        console.print(plain("identical" if result.identical else "different"))
        return
    print_facts(
        console,
        [
            ("A", _side(result.before)),
            ("B", _side(result.after)),
            ("result", _verdict(result)),
            *comparison_facts(comparison, A_AND_B, console.width),
            ("written", ", ".join(text.path(path) for path in result.written)),
        ],
    )
    print_drift(comparison, console, A_AND_B)
    console.print()
    print_notes(session, result.notes)
    if comparison.drifts and not result.written:
        both = " ".join(text.argument(path) for path in (session.path or result.before.path, other) if path is not None)
        next_line(session, f"ckpt diff {both}{session.again} --html {free_file('drift.html')}")
    else:
        chosen = f" --type {text.argument(result.after.component)}" if typed else ""
        next_line(session, f"ckpt inspect {text.argument(result.after.path)}{chosen}")


def _side(side: DiffSide) -> str:
    step = f", step {side.step}" if side.step is not None else ""
    return f"{text.path(side.path)}   {side.component}{step}, {text.plural(side.tensors, 'tensor')}, {text.size(side.bytes)}"


def _verdict(result: DiffResult) -> str:
    comparison = result.comparison
    share = f" (about {100 * comparison.sample:g}% of the values were compared)" if comparison.sample is not None else ""
    if result.identical:
        return f"identical, bit for bit{share}" if comparison.sample is None else f"no difference found{share}"
    if comparison.compared and not comparison.drifts:
        scaled = f", {text.plural(result.rescaled, 'module')} scaled differently" if result.rescaled else ""
        return f"{text.plural(comparison.compared, 'tensor')} compared, all values are equal{scaled}{share}"
    return f"{comparison.counted}{share if comparison.compared else ''}"
