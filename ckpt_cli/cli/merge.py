"""`ckpt merge`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.text import options_again
from ckpt_cli.hub.peft_names import LoraMode
from ckpt_cli.progress import Progress

LORA_PANEL = "LoRA"
BASE_PANEL = options.BASE_PANEL


def merge(
    path: options.Path,
    output: options.Output = None,
    type: options.Type = None,
    step: options.Step = None,
    dtype: options.Dtype = None,
    also: options.Also = None,
    base: options.Base = None,
    match_base: Annotated[
        bool,
        typer.Option("--match-base", help="Give the output the names, shapes and dtypes of the base.", rich_help_panel=BASE_PANEL),
    ] = False,
    fill_missing_from_base: Annotated[
        bool,
        typer.Option("--fill-missing-from-base", help="Take all tensors that the run lacks from the base.", rich_help_panel=BASE_PANEL),
    ] = False,
    carry_from_base: options.CarryFromBase = None,
    drop_extra: Annotated[
        bool, typer.Option("--drop-extra", help="Leave out tensors that the base lacks.", rich_help_panel=BASE_PANEL)
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Also compare the values with the base.", rich_help_panel=BASE_PANEL)] = False,
    names: options.Names = "hub",
    lora: Annotated[
        Optional[LoraMode],  # noqa: UP045
        typer.Option(
            "--lora",
            help="LoRA adapters: fuse into the weights (default), export as a PEFT folder (default for adapters alone), both, or keep.",
            show_default=False,
            rich_help_panel=LORA_PANEL,
        ),
    ] = None,
    lora_alpha: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--lora-alpha", metavar="X", help="LoRA alpha, if no file states it.", show_default=False, rich_help_panel=LORA_PANEL),
    ] = None,
    key_map: options.KeyMap = None,
    ema_from_model: Annotated[bool, typer.Option("--ema-from-model", help="Write the model as the EMA if the run has none.")] = False,
    with_state: Annotated[bool, typer.Option("--with-state", help="Also write what extract-state writes, beside the weights.")] = False,
    max_shard_size: options.MaxShardSize = None,
    weights_name: options.WeightsName = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    allow_missing: options.AllowMissing = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Write into the checkpoint folder; never replaces a file.")] = False,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the output with the source, bit for bit.")] = False,
    checksum: options.Checksum = False,
    jobs: options.Jobs = None,
    allow_overflow: options.AllowOverflow = False,
    allow_unequal_replicas: options.AllowUnequalReplicas = False,
    shard_order: options.Order = "auto",
    json: options.Json = False,
    quiet: options.Quiet = 0,
    strict: options.Strict = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    color: options.Color = "auto",
    progress: options.Progress = "auto",
) -> None:
    from ckpt_cli.cli.screens.written import merge_result
    from ckpt_cli.commands import merge as merging
    from ckpt_cli.results.written import MergeResult

    def work(shown: Progress) -> MergeResult:
        return merging.merge(
            path,
            output,
            type=type,
            step=step,
            base=base,
            progress=shown,
            also=tuple(also or ()),
            dtype=dtype,
            match_base=match_base,
            fill_missing_from_base=fill_missing_from_base,
            carry_from_base=tuple(carry_from_base or ()),
            allow_missing=tuple(allow_missing or ()),
            drop_extra=drop_extra,
            compare=compare,
            names=names,
            lora=lora,
            lora_alpha=lora_alpha,
            key_map=key_map,
            ema_from_model=ema_from_model,
            with_state=with_state,
            max_shard_size=max_shard_size,
            weights_name=weights_name,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            overwrite=overwrite,
            in_place=in_place,
            jobs=jobs,
            dry_run=dry_run,
            verify=verify,
            checksum=checksum,
            allow_overflow=allow_overflow,
            allow_unequal_replicas=allow_unequal_replicas,
            shard_order=shard_order,
            strict=strict,
        )

    again = options_again(type=None, step=None, also=also)
    session = Session(
        "merge", json=json, quiet=quiet, strict=strict, verbose=verbose, debug=debug, color=color, progress=progress, again=again
    )
    raise typer.Exit(session.run(work, merge_result, lambda result: result.exit_code))
