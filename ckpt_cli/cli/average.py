"""`ckpt average`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_cli.averaging.options import AverageOptions
from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.words.declare import command
from ckpt_cli.progress import Progress

if TYPE_CHECKING:
    from ckpt_cli.results.written import AverageResult


@command(AverageOptions)
def average(
    session: Session,
    paths: options.Paths,
    output: options.RequiredOutput,
    type: options.Type = None,
    base: options.Base = None,
    also: options.Also = None,
    **given: Any,
) -> int:
    from ckpt_cli.cli.screens.written import average_result
    from ckpt_cli.commands import average as averaging

    def work(shown: Progress) -> AverageResult:
        return averaging.average(paths, output, type=type, base=base, also=also or (), progress=shown, **given)

    return session.run(work, average_result, lambda result: result.exit_code)
