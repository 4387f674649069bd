"""`ckpt detect`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_cli.cli import options
from ckpt_cli.cli.looking import options as looking
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.text import options_again
from ckpt_cli.cli.words.declare import command
from ckpt_cli.errors import UsageError
from ckpt_cli.progress import Progress

if TYPE_CHECKING:
    from ckpt_cli.results.inspect import DetectResult, ReportResult


@command()
def detect(
    session: Session,
    path: options.Path,
    type: options.Type = None,
    step: options.Step = None,
    also: options.Also = None,
    report: looking.Report = False,
    html: looking.ReportPage = None,
    drift: looking.Drift = False,
    sample: looking.DriftSample = None,
) -> int:
    from ckpt_cli.commands import inspect as inspection

    session = replace(session, path=path, again=options_again(type=type, step=step, also=also))
    if report or html is not None or drift or sample is not None:
        from ckpt_cli.cli.looking.report import report_result

        if step is not None:
            raise UsageError("a report is about all steps of a run", hint="leave out --step")

        def all_steps(shown: Progress) -> ReportResult:
            return inspection.report(path, type=type, also=also or (), drift=drift, sample=sample, html=html, progress=shown)

        return session.run(all_steps, report_result, lambda _: 0)
    from ckpt_cli.cli.screens.inspect import detect_result

    def work(shown: Progress) -> DetectResult:
        return inspection.detect(path, type=type, step=step, also=also or (), progress=shown)

    return session.run(work, detect_result, lambda result: result.exit_code)
