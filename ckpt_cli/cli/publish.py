"""`ckpt publish`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.words.declare import command
from ckpt_cli.output.options import PublishOptions
from ckpt_cli.progress import Progress

if TYPE_CHECKING:
    from ckpt_cli.results.written import PublishResult


@command(PublishOptions)
def publish(session: Session, outputs: options.Outputs, **given: Any) -> int:
    from ckpt_cli.cli.screens.written import publish_result
    from ckpt_cli.commands import publish as publishing

    def work(shown: Progress) -> PublishResult:
        return publishing.publish(outputs, progress=shown, **given)

    return session.run(work, publish_result, lambda result: result.exit_code)
