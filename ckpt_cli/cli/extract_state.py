"""`ckpt extract-state`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.words.declare import command
from ckpt_cli.progress import Progress
from ckpt_cli.state.options import ExtractOptions

if TYPE_CHECKING:
    from ckpt_cli.results.written import ExtractResult


@command(ExtractOptions, name="extract-state")
def extract_state(
    session: Session,
    path: options.Path,
    output: options.StateOutput = None,
    type: options.StateType = None,
    step: options.Step = None,
    also: options.Also = None,
    **given: Any,
) -> int:
    from ckpt_cli.cli.screens.extracted import extract_result
    from ckpt_cli.commands import extract_state as extracting

    def work(shown: Progress) -> ExtractResult:
        return extracting.extract_state(path, output, type=type, step=step, also=also or (), progress=shown, **given)

    return session.run(work, extract_result, lambda _: 0)
