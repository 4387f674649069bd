"""`ckpt extract-state`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.progress import Progress


def extract_state(
    path: options.Path,
    output: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--output", "-o", metavar="DIR", help="Default: <checkpoint>_state, beside the checkpoint.", show_default=False),
    ] = None,
    type: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--type", metavar="NAME", help="Component: model, or a name listed by detect.", show_default=False),
    ] = None,
    step: options.Step = None,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Also merge the optimizer state, per parameter.")] = False,
    also: options.Also = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
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
    from ckpt_cli.cli.screens.written import extract_result
    from ckpt_cli.commands import extract_state as extracting
    from ckpt_cli.results.written import ExtractResult

    def work(shown: Progress) -> ExtractResult:
        return extracting.extract_state(
            path,
            output,
            type=type,
            step=step,
            also=tuple(also or ()),
            progress=shown,
            optimizer=optimizer,
            overwrite=overwrite,
            dry_run=dry_run,
            jobs=jobs,
            shard_order=shard_order,
            strict=strict,
        )

    session = Session("extract-state", json=json, quiet=quiet, strict=strict, verbose=verbose, debug=debug, color=color, progress=progress)
    raise typer.Exit(session.run(work, extract_result, lambda _: 0))
