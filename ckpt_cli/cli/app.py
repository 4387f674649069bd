"""The commands. Each parses, calls the core, and hands the result to `render`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.text import argument, parse_size
from ckpt_cli.progress import Progress

BASE_PANEL = "Against a base model"

app = typer.Typer(
    name="ckpt",
    help="Look into sharded training checkpoints, and merge them into Hugging Face folders.",
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
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    color: options.Color = "auto",
) -> None:
    from ckpt_cli import inspection, report
    from ckpt_cli.cli import render

    def work(_: Progress) -> report.DetectResult:
        return inspection.detect(path, type=type, step=step, also=tuple(also or ()))

    again = _again(type=type, step=step, also=also)
    session = Session("detect", json=json, quiet=quiet, verbose=verbose, debug=debug, color=color, path=path, again=again)
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
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    color: options.Color = "auto",
) -> None:
    from ckpt_cli import inspection, report
    from ckpt_cli.cli import render

    def work(_: Progress) -> report.InspectResult:
        return inspection.inspect(path, type=type, step=step, also=tuple(also or ()), base=base, shard_order=shard_order)

    again = _again(type=type, step=step, also=also)
    session = Session("inspect", json=json, quiet=quiet, verbose=verbose, debug=debug, color=color, path=path, again=again)
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
    output: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--output", "-o", metavar="DIR", help="Default: <checkpoint>_merged, beside the checkpoint.", show_default=False),
    ] = None,
    type: options.Type = None,
    step: options.Step = None,
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--dtype", metavar="DTYPE", help="keep (default), fp32, bf16 or fp16; only floats are cast.", show_default=False),
    ] = None,
    also: options.Also = None,
    base: options.Base = None,
    match_base: Annotated[
        bool, typer.Option("--match-base", help="Give the output the names, shapes and dtypes of the base.", rich_help_panel=BASE_PANEL)
    ] = False,
    fill_missing_from_base: Annotated[
        bool, typer.Option("--fill-missing-from-base", help="Take tensors that the run lacks from the base.", rich_help_panel=BASE_PANEL)
    ] = False,
    drop_extra: Annotated[
        bool, typer.Option("--drop-extra", help="Leave out tensors that the base has not.", rich_help_panel=BASE_PANEL)
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare the values with the base as well.", rich_help_panel=BASE_PANEL)
    ] = False,
    key_map: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--key-map", metavar="FILE", help="Rules that rename tensors, JSON or TOML.", show_default=False),
    ] = None,
    ema_from_model: Annotated[bool, typer.Option("--ema-from-model", help="Write the model as EMA where a run has none.")] = False,
    max_shard_size: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--max-shard-size", metavar="SIZE", help="Largest output file; default 5GB.", show_default=False),
    ] = None,
    weights_name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--weights-name", metavar="FILE", help="Name of the weights file; default model.safetensors.", show_default=False),
    ] = None,
    include: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--include", metavar="GLOB", help="Only these tensors.", show_default=False),
    ] = None,
    exclude: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--exclude", metavar="GLOB", help="Not these tensors.", show_default=False),
    ] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Add the files to the checkpoint folder; replaces nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that ckpt wrote.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and print, write nothing.")] = False,
    jobs: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--jobs", "-j", metavar="N", help="Worker threads.", show_default=False),
    ] = None,
    allow_overflow: Annotated[bool, typer.Option("--allow-overflow", help="Let values too large for fp16 become infinite.")] = False,
    allow_unequal_replicas: Annotated[
        bool, typer.Option("--allow-unequal-replicas", help="Take the lowest rank's values where replicas differ.")
    ] = False,
    shard_order: options.Order = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    color: options.Color = "auto",
    progress: options.Progress = "auto",
) -> None:
    from ckpt_cli import merging, report
    from ckpt_cli.cli import render

    def work(shown: Progress) -> report.MergeResult:
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
            drop_extra=drop_extra,
            compare=compare,
            key_map=key_map,
            ema_from_model=ema_from_model,
            max_shard_size=parse_size(max_shard_size) if max_shard_size is not None else None,
            weights_name=weights_name,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            overwrite=overwrite,
            in_place=in_place,
            jobs=jobs,
            dry_run=dry_run,
            allow_overflow=allow_overflow,
            allow_unequal_replicas=allow_unequal_replicas,
            shard_order=shard_order,
        )

    session = Session("merge", json=json, quiet=quiet, verbose=verbose, debug=debug, color=color, progress=progress)
    raise typer.Exit(session.run(work, render.merge_result, lambda _: 0))
