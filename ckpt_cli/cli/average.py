"""`ckpt average`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional, cast

import typer

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.progress import Progress

if TYPE_CHECKING:
    from ckpt_cli.averaging.coefficients import DecayShape, Method

STEPS_PANEL = "Which steps"
METHOD_PANEL = "Weighting"


def average(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Runs, steps, component folders or files, oldest first.", show_default=False)
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="The folder to write.", show_default=False)],
    everything: Annotated[bool, typer.Option("--all", help="All complete steps of the run.", rich_help_panel=STEPS_PANEL)] = False,
    last: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--last", metavar="N", help="The newest N complete steps.", show_default=False, rich_help_panel=STEPS_PANEL),
    ] = None,
    begin: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--from", metavar="STEP", help="From this step on.", show_default=False, rich_help_panel=STEPS_PANEL),
    ] = None,
    end: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--to", metavar="STEP", help="Up to this step.", show_default=False, rich_help_panel=STEPS_PANEL),
    ] = None,
    every: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--every", metavar="N", help="Every N steps, from the first.", show_default=False, rich_help_panel=STEPS_PANEL),
    ] = None,
    steps: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--steps", metavar="A,B,...", help="Exactly these steps.", show_default=False, rich_help_panel=STEPS_PANEL),
    ] = None,
    method: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--method",
            metavar="NAME",
            help="uniform (default), weighted, linear, ema, wsm or posthoc-ema.",
            show_default=False,
            rich_help_panel=METHOD_PANEL,
        ),
    ] = None,
    weights: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--weights", metavar="A,B,...", help="One per checkpoint; may be negative.", show_default=False, rich_help_panel=METHOD_PANEL
        ),
    ] = None,
    no_normalize: Annotated[
        bool, typer.Option("--no-normalize", help="Do not divide by the sum of the weights.", rich_help_panel=METHOD_PANEL)
    ] = False,
    decay: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--decay", metavar="D", help="ema: share of the average kept per checkpoint.", show_default=False, rich_help_panel=METHOD_PANEL
        ),
    ] = None,
    half_life: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--half-life", metavar="STEPS", help="ema: steps after which half is kept.", show_default=False, rich_help_panel=METHOD_PANEL
        ),
    ] = None,
    decay_shape: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--decay-shape",
            metavar="NAME",
            help="wsm: linear (default), cosine or 1-sqrt.",
            show_default=False,
            rich_help_panel=METHOD_PANEL,
        ),
    ] = None,
    sigma_rel: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--sigma-rel", metavar="S", help="posthoc-ema: target relative width.", show_default=False, rich_help_panel=METHOD_PANEL
        ),
    ] = None,
    source_sigma_rel: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--source-sigma-rel",
            metavar="S",
            help="posthoc-ema: relative width of the saved averages.",
            show_default=False,
            rich_help_panel=METHOD_PANEL,
        ),
    ] = None,
    type: options.Type = None,
    dtype: options.Dtype = None,
    intersect: Annotated[bool, typer.Option("--intersect", help="Average only tensors that match in all checkpoints.")] = False,
    strict: options.Strict = False,
    also: options.Also = None,
    base: options.Base = None,
    carry_from_base: options.CarryFromBase = None,
    names: options.Names = "hub",
    key_map: options.KeyMap = None,
    max_shard_size: options.MaxShardSize = None,
    weights_name: options.WeightsName = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    allow_missing: options.AllowMissing = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    checksum: options.Checksum = False,
    jobs: options.Jobs = None,
    allow_overflow: options.AllowOverflow = False,
    allow_non_finite: Annotated[
        bool, typer.Option("--allow-non-finite", help="Average NaN and infinite values instead of refusing.")
    ] = False,
    allow_unequal_replicas: options.AllowUnequalReplicas = False,
    shard_order: options.Order = "auto",
    json: options.Json = False,
    quiet: options.Quiet = 0,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    color: options.Color = "auto",
    progress: options.Progress = "auto",
) -> None:
    from ckpt_cli.cli.screens.written import average_result
    from ckpt_cli.commands import average as averaging
    from ckpt_cli.results.written import AverageResult

    def work(shown: Progress) -> AverageResult:
        return averaging.average(
            paths,
            output,
            type=type,
            base=base,
            also=tuple(also or ()),
            progress=shown,
            everything=everything,
            last=last,
            begin=begin,
            end=end,
            every=every,
            steps=steps if steps is not None else (),
            method=cast("Method | None", method),
            weights=weights,
            normalize=not no_normalize,
            decay=decay,
            half_life=half_life,
            decay_shape=cast("DecayShape | None", decay_shape),
            sigma_rel=sigma_rel,
            source_sigma_rel=source_sigma_rel,
            dtype="keep" if dtype is None else dtype,
            intersect=intersect,
            strict=strict,
            names=names,
            key_map=key_map,
            max_shard_size=max_shard_size,
            weights_name=weights_name,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            carry_from_base=tuple(carry_from_base or ()),
            allow_missing=tuple(allow_missing or ()),
            overwrite=overwrite,
            jobs=jobs,
            dry_run=dry_run,
            checksum=checksum,
            allow_overflow=allow_overflow,
            allow_non_finite=allow_non_finite,
            allow_unequal_replicas=allow_unequal_replicas,
            shard_order=shard_order,
        )

    session = Session("average", json=json, quiet=quiet, strict=strict, verbose=verbose, debug=debug, color=color, progress=progress)
    raise typer.Exit(session.run(work, average_result, lambda _: 0))
