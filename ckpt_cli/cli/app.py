"""The commands. Each parses, calls the core, and hands the result to `render`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional, cast

import typer

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.text import argument
from ckpt_cli.hub.peft_names import LoraMode
from ckpt_cli.names import Naming
from ckpt_cli.progress import Progress

if TYPE_CHECKING:
    from ckpt_cli.averaging.coefficients import DecayShape, Method

BASE_PANEL = options.BASE_PANEL
LORA_PANEL = "LoRA"

app = typer.Typer(
    name="ckpt",
    help="Look into sharded training checkpoints; merge or average them into Hugging Face folders; extract their state; verify results.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=True,
)


def _examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"  {line}" for line in lines)


def _again(*, type: str | None, step: int | None, also: list[str] | None) -> str:
    """The options that decide what is read, for the next command."""
    options = [f"--type {argument(type)}"] if type is not None else []
    options += [f"--step {step}"] if step is not None else []
    options += [f"--also {argument(folder)}" for folder in also or ()]
    return "".join(f" {option}" for option in options)


def _version(wanted: bool) -> None:
    if wanted:
        from ckpt_cli import __version__

        typer.echo(f"ckpt {__version__}")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog="Exit codes: 0 done, 1 error-level finding, 2 usage, 3 input, 4 checkpoint incomplete or inconsistent, 5 output.",
)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@app.command(
    help="Say what a path is: trainer, steps, components, world size, whether it is complete.",
    epilog=_examples("ckpt detect ./run", "ckpt detect ./run --json"),
)
def detect(
    path: options.Path,
    type: options.Type = None,
    step: options.Step = None,
    also: options.Also = None,
    json: options.Json = False,
    quiet: options.Quiet = 0,
    strict: options.Strict = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    color: options.Color = "auto",
) -> None:
    from ckpt_cli.cli import render
    from ckpt_cli.commands import inspect as inspection
    from ckpt_cli.results.inspect import DetectResult

    def work(_: Progress) -> DetectResult:
        return inspection.detect(path, type=type, step=step, also=tuple(also or ()))

    again = _again(type=type, step=step, also=also)
    session = Session("detect", json=json, quiet=quiet, strict=strict, verbose=verbose, debug=debug, color=color, path=path, again=again)
    code = session.run(work, render.detect_result, lambda result: result.exit_code)
    raise typer.Exit(code)


@app.command(
    help="Show every tensor: shape, dtype, how it is sharded; one row per group of like layers.",
    epilog=_examples("ckpt inspect ./run", "ckpt inspect ./run --type ema --all", "ckpt inspect ./run --json"),
)
def inspect(
    path: options.Path,
    type: options.Type = None,
    step: options.Step = None,
    also: options.Also = None,
    show_all: Annotated[bool, typer.Option("--all", help="One row per tensor.")] = False,
    base: options.Base = None,
    shard_order: options.Order = "auto",
    json: options.Json = False,
    quiet: options.Quiet = 0,
    strict: options.Strict = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    color: options.Color = "auto",
) -> None:
    from ckpt_cli.cli import render
    from ckpt_cli.commands import inspect as inspection
    from ckpt_cli.results.inspect import InspectResult

    def work(_: Progress) -> InspectResult:
        return inspection.inspect(path, type=type, step=step, also=tuple(also or ()), base=base, shard_order=shard_order)

    again = _again(type=type, step=step, also=also)
    session = Session("inspect", json=json, quiet=quiet, strict=strict, verbose=verbose, debug=debug, color=color, path=path, again=again)
    code = session.run(work, lambda result, session: render.inspect_result(result, session, show_all=show_all), lambda _: 0)
    raise typer.Exit(code)


@app.command(
    help="Merge shards into one Hugging Face folder, bit for bit (or cast), without loading the model.",
    epilog=_examples(
        "ckpt merge ./run",
        "ckpt merge ./run --type ema --dtype bf16",
        "ckpt merge ./run --step 100 -o ./model --dry-run",
        "ckpt merge ./run --exclude '*norm*' -o ./part",
    ),
)
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
        typer.Option("--fill-missing-from-base", help="Take tensors that the run lacks from the base.", rich_help_panel=BASE_PANEL),
    ] = False,
    carry_from_base: options.CarryFromBase = None,
    drop_extra: Annotated[
        bool, typer.Option("--drop-extra", help="Leave out tensors that the base lacks.", rich_help_panel=BASE_PANEL)
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare the values with the base as well.", rich_help_panel=BASE_PANEL)
    ] = False,
    names: options.Names = "hub",
    lora: Annotated[
        Optional[LoraMode],  # noqa: UP045
        typer.Option(
            "--lora",
            help="LoRA adapters: into the weights (default), as a PEFT folder (default for adapters alone), both, or as they are.",
            show_default=False,
            rich_help_panel=LORA_PANEL,
        ),
    ] = None,
    lora_alpha: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--lora-alpha", metavar="X", help="The scale alpha, if no file gives it.", show_default=False, rich_help_panel=LORA_PANEL
        ),
    ] = None,
    key_map: options.KeyMap = None,
    ema_from_model: Annotated[bool, typer.Option("--ema-from-model", help="Write the model as EMA where a run has none.")] = False,
    with_state: Annotated[bool, typer.Option("--with-state", help="Write what extract-state writes beside the weights as well.")] = False,
    max_shard_size: options.MaxShardSize = None,
    weights_name: options.WeightsName = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    allow_missing: options.AllowMissing = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Add the files to the checkpoint folder; replaces nothing.")] = False,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare what was written with the source, bit for bit.")] = False,
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
    from ckpt_cli.cli import render
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

    again = _again(type=None, step=None, also=also)
    session = Session(
        "merge", json=json, quiet=quiet, strict=strict, verbose=verbose, debug=debug, color=color, progress=progress, again=again
    )
    raise typer.Exit(session.run(work, render.merge_result, lambda result: result.exit_code))


STEPS_PANEL = "Which steps"
METHOD_PANEL = "How much each weighs"


@app.command(
    help="Average checkpoints into one Hugging Face folder, straight from their shards; every element is rounded once.",
    epilog=_examples(
        "ckpt average ./run --last 5 -o ./averaged",
        "ckpt average ./run --from 100 --to 500 --every 100 -o ./bf16 --dtype bf16",
        "ckpt average run/checkpoint-100 run/checkpoint-200 --weights 3,7 -o ./mix",
        "ckpt average ./run --all --method ema --decay 0.8 -o ./ema --dry-run",
    ),
)
def average(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Runs, steps, component folders or files, from old to new.", show_default=False)
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
        typer.Option("--decay", metavar="D", help="ema: what is kept per checkpoint.", show_default=False, rich_help_panel=METHOD_PANEL),
    ] = None,
    half_life: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--half-life", metavar="STEPS", help="ema: half is kept after so many steps.", show_default=False, rich_help_panel=METHOD_PANEL
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
            "--sigma-rel", metavar="S", help="posthoc-ema: relative width wanted.", show_default=False, rich_help_panel=METHOD_PANEL
        ),
    ] = None,
    source_sigma_rel: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--source-sigma-rel",
            metavar="S",
            help="posthoc-ema: relative width of what was saved.",
            show_default=False,
            rich_help_panel=METHOD_PANEL,
        ),
    ] = None,
    type: options.Type = None,
    dtype: options.Dtype = None,
    intersect: Annotated[bool, typer.Option("--intersect", help="Average what all have alike, leave out the rest.")] = False,
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
    allow_non_finite: Annotated[bool, typer.Option("--allow-non-finite", help="Average NaN and infinite values all the same.")] = False,
    allow_unequal_replicas: options.AllowUnequalReplicas = False,
    shard_order: options.Order = "auto",
    json: options.Json = False,
    quiet: options.Quiet = 0,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    color: options.Color = "auto",
    progress: options.Progress = "auto",
) -> None:
    from ckpt_cli.cli import render
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
    raise typer.Exit(session.run(work, render.average_result, lambda _: 0))


@app.command(
    name="extract-state",
    help="Write what is not a weight: scheduler, random states, counters, dataloaders, and on request the optimizer.",
    epilog=_examples(
        "ckpt extract-state ./run",
        "ckpt extract-state ./run --step 200 --optimizer -o ./state",
        "ckpt extract-state ./run -o ./again --json",
    ),
)
def extract_state(
    path: options.Path,
    output: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--output", "-o", metavar="DIR", help="Default: <checkpoint>_state, beside the checkpoint.", show_default=False),
    ] = None,
    type: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--type", metavar="NAME", help="Component: model, or a name that detect lists.", show_default=False),
    ] = None,
    step: options.Step = None,
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Merge the optimizer's state per parameter as well.")] = False,
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
    from ckpt_cli.cli import render
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
    raise typer.Exit(session.run(work, render.extract_result, lambda _: 0))


SOURCE_PANEL = "How the source was merged (the manifest says it for outputs of ckpt)"


@app.command(
    help="Prove that a model folder is right: headers, config and names; every byte; against its source; against a base.",
    epilog=_examples(
        "ckpt verify ./merged",
        "ckpt verify ./merged --full",
        "ckpt verify ./merged --against ./run",
        "ckpt verify ./merged --base ./base --plot drift.png",
        "ckpt verify ./run --full --sample 5%",
    ),
)
def verify(
    path: options.Path,
    full: Annotated[bool, typer.Option("--full", help="Read every byte: NaN, zeros, checksums, replicas.")] = False,
    sample: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--sample", metavar="SHARE", help="Of --full and --base only this share of the values: 5%.", show_default=False),
    ] = None,
    against: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--against", metavar="SRC", help="The run or folder that it must equal, bit for bit.", show_default=False),
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
        typer.Option("--names", help="Names of the output: of the hub, or as trained.", show_default=False, rich_help_panel=SOURCE_PANEL),
    ] = None,
    key_map: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--key-map", metavar="FILE", help="The rules that renamed.", show_default=False, rich_help_panel=SOURCE_PANEL),
    ] = None,
    include: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--include", metavar="GLOB", help="Only these were written.", show_default=False, rich_help_panel=SOURCE_PANEL),
    ] = None,
    exclude: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--exclude", metavar="GLOB", help="These were left out.", show_default=False, rich_help_panel=SOURCE_PANEL),
    ] = None,
    lora_alpha: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--lora-alpha", metavar="X", help="Of LoRA adapters.", show_default=False, rich_help_panel=SOURCE_PANEL),
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
    from ckpt_cli.cli import verify_screen
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
    raise typer.Exit(session.run(work, verify_screen.verify_result, lambda result: result.exit_code))
