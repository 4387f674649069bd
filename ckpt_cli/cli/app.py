"""The commands with their help, in the order in which `ckpt --help` lists them."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_cli.cli.average import average
from ckpt_cli.cli.detect import detect
from ckpt_cli.cli.extract_state import extract_state
from ckpt_cli.cli.inspect import inspect
from ckpt_cli.cli.looking.diff import diff
from ckpt_cli.cli.looking.env import env
from ckpt_cli.cli.looking.show import show
from ckpt_cli.cli.merge import merge
from ckpt_cli.cli.verify import verify

app = typer.Typer(
    name="ckpt",
    help="Inspect sharded training checkpoints; merge or average them into Hugging Face folders; extract training state; verify results.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=True,
)


def _examples(*lines: str) -> str:
    return "Examples:\n\n" + "\n\n".join(f"  {line}" for line in lines)


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
    json_schema: Annotated[bool, typer.Option("--json-schema", help="Print the JSON Schema of --json, of [COMMAND] or of all.")] = False,
) -> None:
    if json_schema:
        from ckpt_cli.cli.looking.json_schema import schema_text

        typer.echo(schema_text(context.invoked_subcommand))
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


app.command(
    help="Show what a path holds: trainer, steps, components, world size, completeness.",
    epilog=_examples("ckpt detect ./run", "ckpt detect ./run --json"),
)(detect)
app.command(
    help="Show every tensor: shape, dtype and sharding; one row per group of similar layers.",
    epilog=_examples(
        "ckpt inspect ./run", "ckpt inspect ./run --type ema --all", "ckpt inspect ./run --stats", "ckpt inspect ./run --json"
    ),
)(inspect)
app.command(
    help="Merge shards into one Hugging Face folder, bit for bit (or cast), without loading the model.",
    epilog=_examples(
        "ckpt merge ./run",
        "ckpt merge ./run --type ema --dtype bf16",
        "ckpt merge ./run --step 100 -o ./model --dry-run",
        "ckpt merge ./run --exclude '*norm*' -o ./part",
    ),
)(merge)
app.command(
    help="Average checkpoints into one Hugging Face folder, straight from their shards; every element is rounded once.",
    epilog=_examples(
        "ckpt average ./run --last 5 -o ./averaged",
        "ckpt average ./run --from 100 --to 500 --every 100 -o ./bf16 --dtype bf16",
        "ckpt average run/checkpoint-100 run/checkpoint-200 --weights 3,7 -o ./mix",
        "ckpt average ./run --all --method ema --decay 0.8 -o ./ema --dry-run",
    ),
)(average)
app.command(
    name="extract-state",
    help="Write everything but the weights: scheduler, random states, counters, dataloaders, optionally the optimizer.",
    epilog=_examples(
        "ckpt extract-state ./run",
        "ckpt extract-state ./run --step 200 --optimizer -o ./state",
        "ckpt extract-state ./run -o ./again --json",
    ),
)(extract_state)
app.command(
    help="Check a model folder: headers, config and names; every byte; against its source; against a base.",
    epilog=_examples(
        "ckpt verify ./merged",
        "ckpt verify ./merged --full",
        "ckpt verify ./merged --against ./run",
        "ckpt verify ./merged --base ./base --plot drift.png",
        "ckpt verify ./run --full --sample 5%",
    ),
)(verify)
app.command(
    help="Show how far tensors moved between two checkpoints, steps or components.",
    epilog=_examples(
        "ckpt diff ./base ./merged",
        "ckpt diff ./run --steps 100,200 --html drift.html",
        "ckpt diff ./run --type model,ema",
        "ckpt diff ./run ./merged --exit-code -q",
    ),
)(diff)
app.command(
    help="Show the values of one tensor, and which rank holds what of it.",
    epilog=_examples(
        "ckpt show ./run model.norm.weight",
        "ckpt show ./run model.embed_tokens.weight --slice 0:4,:8",
        "ckpt show ./run lm_head.weight --type ema --slice -1 --json",
    ),
)(show)
app.command(
    help="Show versions, extras and paths, for bug reports.",
    epilog=_examples("ckpt env", "ckpt env --json"),
)(env)
app.command(name="compare", hidden=True, help="The same as diff.")(diff)
