"""`ckpt watch`: parses its options, calls the command, and tells what happens as it happens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.watching import options as own
from ckpt_cli.cli.words.declare import command
from ckpt_cli.progress import Progress
from ckpt_cli.watching.options import WatchOptions

if TYPE_CHECKING:
    from ckpt_cli.results.watch import WatchResult


@command(WatchOptions, own_options=own)
def watch(
    session: Session,
    runs: own.Runs,
    output: own.Output = None,
    type: options.Type = None,
    base: options.Base = None,
    **given: Any,
) -> int:
    from ckpt_cli.cli.watching.screen import Screen, watch_result
    from ckpt_cli.commands import watch as watching
    from ckpt_cli.watching.watched_run import Listener

    screen = Screen(session, [Path(run) for run in runs])

    def work(shown: Progress) -> WatchResult:
        listener = Listener(screen.event, screen.waits, screen.line, screen.warns, screen.tells)
        return watching.watch(runs, output, type=type, base=base, listener=listener, progress=shown, **given)

    return session.run(work, watch_result, lambda result: result.exit_code)
