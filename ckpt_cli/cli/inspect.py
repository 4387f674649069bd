"""`ckpt inspect`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.text import options_again
from ckpt_cli.cli.words.declare import command
from ckpt_cli.progress import Progress

if TYPE_CHECKING:
    from ckpt_cli.results.inspect import InspectResult


@command()
def inspect(
    session: Session,
    path: options.Path,
    type: options.Type = None,
    step: options.Step = None,
    also: options.Also = None,
    show_all: options.ShowAll = False,
    stats: options.Stats = False,
    base: options.Base = None,
    jobs: options.Jobs = None,
    shard_order: options.ShardOrder = "auto",
) -> int:
    from ckpt_cli.cli.screens.inspect import inspect_result
    from ckpt_cli.commands import inspect as inspection
    from ckpt_cli.results.statistics import StatsResult

    def work(shown: Progress) -> InspectResult:
        return inspection.inspect(
            path,
            type=type,
            step=step,
            also=also or (),
            base=base,
            shard_order=shard_order,
            stats=stats,
            histogram=stats and session.verbose,
            jobs=jobs,
            progress=shown,
        )

    def show(result: InspectResult, session: Session) -> None:
        if isinstance(result, StatsResult):
            from ckpt_cli.cli.screens.stats import stats_result

            stats_result(result, session, show_all=show_all)
        else:
            inspect_result(result, session, show_all=show_all)

    session = replace(session, path=path, again=options_again(type=type, step=step, also=also, base=base, shard_order=shard_order))
    return session.run(work, show, lambda _: 0)
