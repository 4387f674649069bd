"""`ckpt show`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.text import options_again
from ckpt_cli.progress import Progress


def show(
    path: options.Path,
    tensor: Annotated[str, typer.Argument(metavar="TENSOR", help="Its name, as inspect or a merged folder has it.", show_default=False)],
    part: Annotated[
        Optional[str],  # noqa: UP045 - Typer evaluates this on Python 3.10
        typer.Option("--slice", metavar="SLICE", help="Which elements, such as 0:4,:8; default: a corner.", show_default=False),
    ] = None,
    type: options.Type = None,
    step: options.Step = None,
    also: options.Also = None,
    shard_order: options.Order = "auto",
    json: options.Json = False,
    quiet: options.Quiet = 0,
    strict: options.Strict = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    color: options.Color = "auto",
) -> None:
    from ckpt_cli.cli.screens.show import show_result
    from ckpt_cli.commands import show as showing
    from ckpt_cli.results.statistics import ShowResult

    def work(_: Progress) -> ShowResult:
        return showing.show(path, tensor, part=part, type=type, step=step, also=tuple(also or ()), shard_order=shard_order)

    again = options_again(type=type, step=step, also=also)
    session = Session("show", json=json, quiet=quiet, strict=strict, verbose=verbose, debug=debug, color=color, path=path, again=again)
    raise typer.Exit(session.run(work, show_result, lambda _: 0))
