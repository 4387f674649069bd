"""What `ckpt detect --report` prints: a row for each step of a run, what could be freed, and the drift of the run as a map."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.heatmap import STEPS, heatmap
from ckpt_cli.cli.screens.widgets import BAD, GOOD, NARROWER, as_cells, good, here, new_table, next_line, plain, print_facts, print_notes
from ckpt_cli.results.inspect import ReportResult, StepReport
from ckpt_cli.verifying.drift.groups import change_text

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from ckpt_cli.cli.session import Session

FREED = "of older steps, optimizers that a newer one replaces, and what is damaged or incomplete"


def report_result(result: ReportResult, session: Session) -> None:
    """The whole screen."""
    console, steps = session.out(), result.steps
    if session.quiet:
        for step in steps:
            if step.mergeable:
                console.print(plain(step.path), soft_wrap=True)
        return
    merged = sum(step.mergeable for step in steps)
    freed = f"{text.size(result.freeable)}: {FREED}" if result.freeable else ""
    facts: list[tuple[str, str | Text]] = [
        ("found", here(result.path, f"{result.framework} run")),
        ("steps", f"{len(steps)}, {'all' if merged == len(steps) else merged} can be merged"),
        ("size", text.size(sum(step.weights + step.optimizer + step.other for step in steps))),
        ("can be freed", freed),
        ("sample", "" if result.sample is None else f"about {100 * result.sample:g}% of the values were compared"),
        ("written", "" if result.written is None else text.path(result.written)),
    ]
    print_facts(console, facts)
    console.print()
    console.print(_table(result, console.width))
    if result.drift is not None:
        console.print()
        for line in heatmap(result.drift, console.width, STEPS, ascii_only=console.options.ascii_only):
            console.print(line, soft_wrap=True)
    console.print()
    print_notes(session, result.notes)
    path = text.argument(session.path or result.path)
    if result.drift is None and merged > 1:
        next_line(session, f"ckpt detect {path}{session.again} --report --drift")
    elif result.written is None:
        next_line(session, f"ckpt detect {path}{session.again} --report --drift --html report.html")
    else:
        next_line(session, f"ckpt merge {path}{session.again} --dry-run")


def _table(result: ReportResult, width: int) -> Table:
    """Columns without a value in any row are left out, and on narrow screens what is least needed."""
    steps = result.steps
    columns = {
        "step": [str(step.step) for step in steps],
        "components": [", ".join(step.components) for step in steps],
        "weights": [_size(step.weights) for step in steps],
        "optimizer": [_size(step.optimizer) for step in steps],
        "other": [_size(step.other) for step in steps],
        "to free": [_size(step.freeable) for step in steps],
        "drift": ["" if step.drift is None else change_text(step.drift) for step in steps],
    }
    narrow = ("components", "other") if width < NARROWER else ()
    shown = [head for head, cells in columns.items() if any(cells) and head not in narrow]
    table = new_table((*shown, "state"), right=[i for i, head in enumerate(shown) if head != "components"])
    for i, step in enumerate(steps):
        table.add_row(*as_cells(columns[head][i] for head in shown), _state(step, result))
    return table


def _state(step: StepReport, result: ReportResult) -> Text:
    if step.problem is not None:
        return good(step.problem, BAD)
    state = good("complete")
    for odd in filter(None, (step.differs, step.partly)):
        state.append(f", {odd}", style="yellow")
    return state.append("  <- newest", style=GOOD) if step.path == result.newest else state


def _size(count: int) -> str:
    return text.size(count) if count else ""
