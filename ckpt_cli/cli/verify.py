"""`ckpt verify`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.words.declare import command
from ckpt_cli.progress import Progress
from ckpt_cli.verifying.options import VerifyOptions

if TYPE_CHECKING:
    from ckpt_cli.results.verify import VerifyResult


@command(VerifyOptions, variant="Source")
def verify(
    session: Session,
    path: options.Path,
    against: options.Against = None,
    base: options.CompareWith = None,
    plot: options.Plot = None,
    type: options.Type = None,
    step: options.Step = None,
    also: options.Also = None,
    **given: Any,
) -> int:
    from ckpt_cli.cli.screens.verify import verify_result
    from ckpt_cli.commands import verify as verification

    def work(shown: Progress) -> VerifyResult:
        return verification.verify(
            path, type=type, step=step, also=also or (), against=against, base=base, plot=plot, progress=shown, **given
        )

    return session.run(work, verify_result, lambda result: result.exit_code)
