"""The report of a run as one static page: a table with a row for each step, and the drift of the run as one map."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_cli.names import size_text
from ckpt_cli.results.inspect import ReportResult, StepReport
from ckpt_cli.verifying.drift.groups import change_text
from ckpt_cli.verifying.drift.page import document, maps, row, sortable

COLUMNS = ("step", "weights", "optimizer", "other", "can be freed", "drift", "state")
TIPS = {
    "other": "everything else in the folder of the step",
    "can be freed": "not needed to merge this step, nor to go on from the newest",
    "drift": "relative L2 of all tensors to the step before",
}


def run_page(report: ReportResult) -> str:
    """The page; equal input gives equal text."""
    facts = [
        ("trainer", report.framework),
        ("steps", f"{len(report.steps)}, {sum(step.mergeable for step in report.steps)} of them can be merged"),
        ("size", size_text(report.size)),
        ("can be freed", size_text(report.freeable) if report.freeable else ""),
        ("sample", "" if report.sample is None else f"about {100 * report.sample:g}% of the elements"),
    ]
    picture = maps("Relative L2 from each step to the next", report.drift) if report.drift is not None else ""
    return document(f"Steps of {report.path}", facts, picture, f"<h2>Steps</h2>{sortable(COLUMNS, TIPS, _rows(report.steps))}")


def _rows(steps: Sequence[StepReport]) -> list[str]:
    made = []
    for step in steps:
        sizes = (step.weights, step.optimizer, step.other, step.freeable)
        numbers: list[tuple[float | None, str]] = [(size, size_text(size) if size else "") for size in sizes]
        numbers.append((step.drift, "" if step.drift is None else change_text(step.drift)))
        made.append(
            row(
                step.called,
                step.path,
                numbers,
                step.problem or "; ".join(filter(None, (step.partly_broken, step.differs, step.partly))) or "complete",
            )
        )
    return made
