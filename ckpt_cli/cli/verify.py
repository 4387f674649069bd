"""`ckpt verify`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.names import Naming
from ckpt_cli.progress import Progress

SOURCE_PANEL = "How the source was merged (read from the manifest for outputs of ckpt)"


def verify(
    path: options.Path,
    full: Annotated[bool, typer.Option("--full", help="Read every byte: NaN, zeros, checksums, replicas.")] = False,
    sample: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--sample", metavar="SHARE", help="Read only this share of the values, such as 5% (--full, --base).", show_default=False
        ),
    ] = None,
    against: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--against", metavar="SRC", help="The run or folder it must equal, bit for bit.", show_default=False),
    ] = None,
    base: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--base", metavar="DIR", help="Compare the values with this model or checkpoint.", show_default=False),
    ] = None,
    plot: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--plot", metavar="FILE", help="Draw how far tensors moved from the base: .png, .svg or .html.", show_default=False),
    ] = None,
    type: options.Type = None,
    step: options.Step = None,
    also: options.Also = None,
    names: Annotated[
        Optional[Naming],  # noqa: UP045
        typer.Option(
            "--names", help="Names in the output: as on the hub, or as trained.", show_default=False, rich_help_panel=SOURCE_PANEL
        ),
    ] = None,
    key_map: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--key-map", metavar="FILE", help="The rules that renamed tensors.", show_default=False, rich_help_panel=SOURCE_PANEL),
    ] = None,
    include: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--include", metavar="GLOB", help="Only these tensors were written.", show_default=False, rich_help_panel=SOURCE_PANEL
        ),
    ] = None,
    exclude: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--exclude", metavar="GLOB", help="These tensors were left out.", show_default=False, rich_help_panel=SOURCE_PANEL),
    ] = None,
    lora_alpha: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--lora-alpha", metavar="X", help="LoRA alpha.", show_default=False, rich_help_panel=SOURCE_PANEL),
    ] = None,
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
    from ckpt_cli.cli.screens.verify import verify_result
    from ckpt_cli.commands import verify as verification
    from ckpt_cli.results.verify import VerifyResult

    def work(shown: Progress) -> VerifyResult:
        return verification.verify(
            path,
            type=type,
            step=step,
            also=tuple(also or ()),
            against=against,
            base=base,
            plot=plot,
            progress=shown,
            full=full,
            sample=sample,
            names=names,
            key_map=key_map,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            lora_alpha=lora_alpha,
            shard_order=shard_order,
            jobs=jobs,
        )

    session = Session("verify", json=json, quiet=quiet, strict=strict, verbose=verbose, debug=debug, color=color, progress=progress)
    raise typer.Exit(session.run(work, verify_result, lambda result: result.exit_code))
