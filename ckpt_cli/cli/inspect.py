"""`ckpt inspect`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.text import options_again
from ckpt_cli.progress import Progress


def inspect(
    path: options.Path,
    type: options.Type = None,
    step: options.Step = None,
    also: options.Also = None,
    show_all: Annotated[bool, typer.Option("--all", help="One row per tensor.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Read all values: absmax, mean, std, zeros, NaN; -v: histograms.")] = False,
    base: options.Base = None,
    jobs: options.Jobs = None,
    shard_order: options.Order = "auto",
    json: options.Json = False,
    quiet: options.Quiet = 0,
    strict: options.Strict = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    color: options.Color = "auto",
    progress: options.Progress = "auto",
) -> None:
    from ckpt_cli.cli.screens.inspect import inspect_result
    from ckpt_cli.commands import inspect as inspection
    from ckpt_cli.results.inspect import InspectResult
    from ckpt_cli.results.statistics import StatsResult

    def work(shown: Progress) -> InspectResult:
        return inspection.inspect(
            path,
            type=type,
            step=step,
            also=tuple(also or ()),
            base=base,
            shard_order=shard_order,
            stats=stats,
            histogram=stats and verbose,
            jobs=jobs,
            progress=shown,
        )

    def show(result: InspectResult, session: Session) -> None:
        if isinstance(result, StatsResult):
            from ckpt_cli.cli.screens.stats import stats_result

            stats_result(result, session, show_all=show_all)
        else:
            inspect_result(result, session, show_all=show_all)

    again = options_again(type=type, step=step, also=also)
    session = Session(
        "inspect",
        json=json,
        quiet=quiet,
        strict=strict,
        verbose=verbose,
        debug=debug,
        color=color,
        progress=progress,
        path=path,
        again=again,
    )
    raise typer.Exit(session.run(work, show, lambda _: 0))
