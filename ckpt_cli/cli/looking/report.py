"""What `ckpt detect --report` prints: a row for each step of a run, what could be freed, and the drift of the run as a map."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.heatmap import SHORTEST, STEPS, heatmap
from ckpt_cli.cli.screens.widgets import (
    BAD,
    BOLD,
    DIM,
    GAP,
    WARNING,
    fitted,
    good,
    here,
    hidden,
    next_line,
    plain,
    planned_merge,
    print_facts,
    print_notes,
)
from ckpt_cli.cli.words.elsewhere import free_file
from ckpt_cli.names import printable
from ckpt_cli.results.inspect import ReportResult, StepReport
from ckpt_cli.verifying.drift.groups import change_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ckpt_cli.cli.session import Session

COMPLETE, NEWEST = "complete", "newest complete"
LEAST_NEEDED = ("components", "other", "optimizer")
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
        ("steps", _counted(len(steps), merged)),
        ("size", text.size(result.size)),
        ("can be freed", freed),
        ("sample", "" if result.sample is None else f"about {100 * result.sample:g}% of the values were compared"),
        ("written", "" if result.written is None else text.path(result.written)),
    ]
    print_facts(console, facts)
    console.print()
    for line in _rows(result, console):
        console.print(line, soft_wrap=True)
    if result.drift is not None:
        console.print()
        for line in heatmap(result.drift, console.width, STEPS, ascii_only=console.options.ascii_only):
            console.print(line, soft_wrap=True)
    console.print()
    print_notes(session, result.notes)
    again = f"ckpt detect {text.argument(session.path or result.path)}{session.again}"
    if result.drift is None and merged > 1:
        next_line(session, f"{again} --report --drift")
    elif result.written is None:
        drift = " --drift" if result.drift is not None or result.sample is not None else ""
        drift += f" --sample {100 * result.sample:g}%" if result.sample is not None else ""
        next_line(session, f"{again} --report{drift} --html {free_file('report.html')}")
    elif result.newest is not None:
        next_line(session, planned_merge(session, result.newest))
    else:
        next_line(session, again)


def _counted(steps: int, merged: int) -> str:
    """How many steps there are, and how many of them can be merged.

    >>> _counted(3, 2), _counted(3, 3), _counted(3, 0)
    ('3, of which 2 can be merged', '3, all can be merged', '3, none can be merged')
    >>> _counted(1, 1), _counted(1, 0)
    ('1, which can be merged', '1, which cannot be merged')
    """
    if steps == 1:
        return f"1, which {'can' if merged else 'cannot'} be merged"
    return f"{steps}, {'all' if merged == steps else f'of which {merged}' if merged else 'none'} can be merged"


def _rows(result: ReportResult, console: Console) -> Iterator[Text]:
    """The table: columns without a value in any row are left out, and a state that its column has no room for stands below its row."""
    from rich.text import Text

    steps, width = result.steps, console.width
    columns = {
        "step": [step.called for step in steps],
        "components": [", ".join(step.components) for step in steps],
        "weights": [_size(step.weights) for step in steps],
        "optimizer": [_size(step.optimizer) for step in steps],
        "other": [_size(step.other) for step in steps],
        "to free": [_size(step.freeable) for step in steps],
        "drift": ["" if step.drift is None else change_text(step.drift) for step in steps],
    }
    states = [_state(step, result) for step in steps]
    short = min(len(NEWEST), max(map(len, states), default=0))
    fit = fitted({head: cells for head, cells in columns.items() if any(cells)}, LEAST_NEEDED, width - GAP - short)
    yield from fit.heading("every step" if len(steps) > 1 else "", width)
    wide = {head: max(len(head), *map(len, columns[head])) for head in fit.shown}
    room = width - sum(each + GAP for each in wide.values())

    def line(cells: Iterable[tuple[str, str]]) -> str:
        return "".join((cell.ljust if head == "components" else cell.rjust)(wide[head]) + " " * GAP for head, cell in cells)

    yield Text(f"{line((head, head) for head in fit.shown)}state", style=BOLD)
    for i, state in enumerate(states):
        row = Text(printable(line((head, columns[head][i]) for head in fit.shown)))
        if len(state) <= room:
            yield row.append_text(state)
            continue
        row.rstrip()
        yield row
        indent = wide.get("step", 0) + GAP
        yield from (Text(" " * indent).append_text(part) for part in state.wrap(console, max(width - indent, SHORTEST)))
    yield from hidden(fit.dropped, width)
    yield good("sizes are bytes on disk, of all components together", DIM)


def _state(step: StepReport, result: ReportResult) -> Text:
    if step.problem is not None:
        return good(step.problem, BAD)
    if step.partly_broken is not None:
        state = good(f"{'newest with ' if step.path == result.newest else ''}{step.partly_broken}", WARNING)
    else:
        state = good(NEWEST if step.path == result.newest else COMPLETE)
    for odd in filter(None, (step.differs, step.partly)):
        state.append(f", {odd}", style=WARNING)
    return state


def _size(count: int) -> str:
    return text.size(count) if count else ""
