"""`ckpt detect`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.text import options_again
from ckpt_cli.cli.words.declare import command
from ckpt_cli.progress import Progress

if TYPE_CHECKING:
    from ckpt_cli.results.inspect import DetectResult


@command()
def detect(
    session: Session,
    path: options.Path,
    type: options.Type = None,
    step: options.Step = None,
    also: options.Also = None,
) -> int:
    from ckpt_cli.cli.screens.inspect import detect_result
    from ckpt_cli.commands import inspect as inspection

    def work(shown: Progress) -> DetectResult:
        return inspection.detect(path, type=type, step=step, also=also or (), progress=shown)

    session = replace(session, path=path, again=options_again(type=type, step=step, also=also))
    return session.run(work, detect_result, lambda result: result.exit_code)
