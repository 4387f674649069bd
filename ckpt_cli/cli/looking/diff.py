"""`ckpt diff`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_cli.cli import options
from ckpt_cli.cli.looking import options as own
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.text import options_again
from ckpt_cli.cli.words.declare import command
from ckpt_cli.progress import Progress
from ckpt_cli.verifying.options import DiffOptions

if TYPE_CHECKING:
    from ckpt_cli.results.diff import DiffResult

COMPARING = ("names", "include", "exclude", "sample", "shard_order")
"""Options that say what is compared."""


@command(DiffOptions, own_options=own)
def diff(
    session: Session,
    before: own.Before,
    after: own.After = None,
    steps: own.TwoSteps = None,
    type: own.TwoTypes = None,
    also: options.Also = None,
    html: own.Html = None,
    plot: own.Map = None,
    exit_code: own.ExitCode = False,
    **given: Any,
) -> int:
    from ckpt_cli.cli.screens.diff import diff_result
    from ckpt_cli.commands import diff as difference

    def work(shown: Progress) -> DiffResult:
        return difference.diff(before, after, type=type, steps=steps, also=also or (), plot=plot, html=html, progress=shown, **given)

    read = {name: given.get(name) for name in COMPARING}
    session = replace(session, path=before, again=options_again(steps=steps, type=type, also=also, **read))
    return session.run(
        work, partial(diff_result, other=after, typed=type is not None), lambda result: int(exit_code and not result.identical)
    )
