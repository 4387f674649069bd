"""`ckpt diff`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.text import argument
from ckpt_cli.names import Naming
from ckpt_cli.progress import Progress


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A run, a step, a component folder or a file.", show_default=False)],
    after: Annotated[
        Optional[str],  # noqa: UP045 - Typer evaluates this on Python 3.10
        typer.Argument(metavar="B", help="The same; without it, two steps or components of A.", show_default=False),
    ] = None,
    steps: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--steps", "--step", metavar="N,N", help="Steps of the two; one number is the step of both.", show_default=False),
    ] = None,
    type: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--type", metavar="NAME,NAME", help="Components of the two; one name is that of both.", show_default=False),
    ] = None,
    html: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--html", metavar="FILE", help="Write a page with maps and a table that sorts.", show_default=False),
    ] = None,
    plot: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--plot", metavar="FILE", help="Draw the map: .png, .svg or .html.", show_default=False),
    ] = None,
    sample: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--sample", metavar="SHARE", help="Compare only this share of the values, such as 5%.", show_default=False),
    ] = None,
    include: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--include", metavar="GLOB", help="Compare only these tensors.", show_default=False),
    ] = None,
    exclude: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--exclude", metavar="GLOB", help="Leave out these tensors.", show_default=False),
    ] = None,
    names: Annotated[
        Optional[Naming],  # noqa: UP045
        typer.Option("--names", help="Names of the hub, or as trained; default: what both have.", show_default=False),
    ] = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="End with code 1 if anything differs.")] = False,
    shard_order: options.Order = "auto",
    jobs: options.Jobs = None,
    json: options.Json = False,
    quiet: options.Quiet = 0,
    strict: options.Strict = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    color: options.Color = "auto",
    progress: options.Progress = "auto",
) -> None:
    from ckpt_cli.cli.screens.diff import diff_result
    from ckpt_cli.commands import diff as difference
    from ckpt_cli.results.diff import DiffResult

    def work(shown: Progress) -> DiffResult:
        return difference.diff(
            before,
            after,
            type=type,
            steps=steps,
            plot=plot,
            html=html,
            progress=shown,
            names=names,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            sample=sample,
            shard_order=shard_order,
            jobs=jobs,
        )

    again = f" {argument(after)}" if after is not None else ""
    again += "".join(f" {name} {argument(value)}" for name, value in (("--steps", steps), ("--type", type), ("--sample", sample)) if value)
    session = Session(
        "diff",
        json=json,
        quiet=quiet,
        strict=strict,
        verbose=verbose,
        debug=debug,
        color=color,
        progress=progress,
        path=before,
        again=again,
    )
    raise typer.Exit(session.run(work, diff_result, lambda result: int(exit_code and not result.identical)))
