"""`ckpt show`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_cli.cli import options
from ckpt_cli.cli.looking import options as own
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.text import options_again
from ckpt_cli.cli.words.declare import command
from ckpt_cli.progress import Progress

if TYPE_CHECKING:
    from ckpt_cli.results.statistics import ShowResult


@command()
def show(
    session: Session,
    path: options.Path,
    tensor: own.TensorName,
    part: own.Slice = None,
    type: options.Type = None,
    step: options.Step = None,
    also: options.Also = None,
    shard_order: options.ShardOrder = "auto",
) -> int:
    from ckpt_cli.cli.screens.show import show_result
    from ckpt_cli.cli.words.mistakes import refuse_swapped
    from ckpt_cli.commands import show as showing

    def work(_: Progress) -> ShowResult:
        refuse_swapped("show", path, tensor)
        return showing.show(path, tensor, part=part, type=type, step=step, also=also or (), shard_order=shard_order)

    session = replace(session, path=path, again=options_again(type=type, step=step, also=also, shard_order=shard_order))
    return session.run(work, show_result, lambda _: 0)
