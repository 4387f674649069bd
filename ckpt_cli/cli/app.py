"""The commands with their help, in the order in which `ckpt --help` lists them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Optional

import typer

from ckpt_cli.cli.words import scripts
from ckpt_cli.cli.words.help import Command, Group
from ckpt_cli.cli.words.listed import Commands, Listed

START = """ckpt {version}: from the shards of a training run to a model folder that loads

  ckpt detect ./run                what is there, and is it complete?
  ckpt merge ./run -o ./merged     write one Hugging Face folder
  ckpt verify ./merged             is it right?

next: ckpt --help, or ckpt help merge"""

LISTED: dict[str, Listed] = {}


class Root(Group):
    """`ckpt` with all commands."""

    def __init__(self, *, commands: Any = None, **given: Any) -> None:
        super().__init__(**given)
        self.commands = Commands(LISTED, Command, commands)


app = typer.Typer(
    cls=Root,
    name="ckpt",
    help="Inspect sharded training checkpoints; merge or average them into Hugging Face folders; extract training state; verify results.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from ckpt_cli import __version__

        typer.echo(f"ckpt {__version__}")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog="`ckpt help COMMAND` lists its options. Exit codes: 0 done, 1 error-level finding, 2 usage, 3 input, 4 checkpoint incomplete "
    "or inconsistent, 5 output.",
)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version.")] = False,
    install_completion: scripts.Install = None,
    show_completion: scripts.Show = None,
    json_schema: Annotated[bool, typer.Option("--json-schema", help="Print the JSON Schema of --json, of [COMMAND] or of all.")] = False,
) -> None:
    if json_schema:
        from ckpt_cli.cli.looking.json_schema import schema_text

        typer.echo(schema_text(context.invoked_subcommand))
        raise typer.Exit
    if context.invoked_subcommand is None:
        from ckpt_cli import __version__

        typer.echo(START.format(version=__version__))
        raise typer.Exit


def add(module: str, name: str, short: str, help: str, *examples: str) -> None:
    """Add a command to the list; see `Listed`."""
    LISTED[name] = Listed(module, name, short, help, examples)


add(
    "detect",
    "detect",
    "What a path holds: trainer, steps, is it complete?",
    "Show what a path holds: trainer, steps, components, world size, completeness.",
    "ckpt detect ./run",
    "ckpt detect ./run --report",
    "ckpt detect ./run --report --drift --html report.html",
    "ckpt detect ./run --json",
)
add(
    "inspect",
    "inspect",
    "Every tensor: shape, dtype and sharding",
    "Show every tensor: shape, dtype and sharding; one row per group of similar layers.",
    "ckpt inspect ./run",
    "ckpt inspect ./run --type ema --all",
    "ckpt inspect ./run --stats",
    "ckpt inspect ./run --json",
)
add(
    "merge",
    "merge",
    "Merge shards into one Hugging Face folder",
    "Merge shards into one Hugging Face folder, bit for bit (or cast), without loading the model.",
    "ckpt merge ./run",
    "ckpt merge ./run --type ema --dtype bf16",
    "ckpt merge ./run --step 100 -o ./model --dry-run",
    "ckpt merge ./run --exclude '*norm*' -o ./part",
    "ckpt merge ./run -o ./cut --max-shard-size 2GB",
)
add(
    "average",
    "average",
    "Average checkpoints into one Hugging Face folder",
    "Average checkpoints into one Hugging Face folder, straight from their shards; every element is rounded once.",
    "ckpt average ./run --last 5 -o ./averaged",
    "ckpt average ./run --from 100 --to 500 --every 100 -o ./bf16 --dtype bf16",
    "ckpt average run/checkpoint-100 run/checkpoint-200 --weights 3,7 -o ./mix",
    "ckpt average ./run --all --method ema --decay 0.8 -o ./ema --dry-run",
)
add(
    "publish",
    "publish",
    "Give an output its name once all parts are written",
    "Give an output its name, once all parts of it are written (merge --part, average --part); or push one that is there to the Hub.",
    "ckpt publish ./model",
    "ckpt publish ./model --json",
)
add(
    "watching.watch",
    "watch",
    "Merge every new step of a live run, and evaluate it",
    "Merge (or average) every new step of a live run once it is written to its end, and run a command for each.",
    "ckpt watch ./run --type ema --dtype bf16",
    "ckpt watch ./run --exec 'python evaluate.py {output} {step}' --keep 1 -o ./newest",
    "ckpt watch ./run --average last=2 -o ./averages --once",
)
add(
    "extract_state",
    "extract-state",
    "Write the training state: all but the weights",
    "Write everything but the weights: scheduler, random states, counters, dataloaders, optionally the optimizer.",
    "ckpt extract-state ./run",
    "ckpt extract-state ./run --step 200 --optimizer -o ./state",
    "ckpt extract-state ./run -o ./again --json",
)
add(
    "verify",
    "verify",
    "Check a model folder: names, bytes, its source",
    "Check a model folder: headers, config and names; every byte; against its source; against a base.",
    "ckpt verify ./merged",
    "ckpt verify ./merged --full",
    "ckpt verify ./merged --against ./run",
    "ckpt verify ./merged --base ./base --plot drift.png",
    "ckpt verify ./run --full --sample 5%",
    "ckpt verify ./merged --full --part 0/1 --json > part-0.json",
    "ckpt verify ./merged --gather part-0.json",
)
add(
    "looking.diff",
    "diff",
    "How far tensors moved between two checkpoints",
    "Show how far tensors moved between two checkpoints, steps or components.",
    "ckpt diff ./base ./merged",
    "ckpt diff ./run --steps 100,200 --html drift.html",
    "ckpt diff ./run --type model,ema",
    "ckpt diff ./run ./merged --exit-code -q",
)
add(
    "looking.show",
    "show",
    "Values of one tensor, and which rank holds what",
    "Show the values of one tensor, and which rank holds what of it.",
    "ckpt show ./run model.norm.weight",
    "ckpt show ./run model.embed_tokens.weight --slice 0:4,:8",
    "ckpt show ./run lm_head.weight --type ema --slice -1 --json",
)
add(
    "looking.scan",
    "scan",
    "What loading the pickles in a path would run",
    "Show what torch.load would run of every pickle in a path, whatever the files are called. Nothing is run; exit code 1: dangerous.",
    "ckpt scan ./run",
    "ckpt scan ./download --strict",
    "ckpt scan ./run --json",
)
add(
    "looking.env",
    "env",
    "Versions, extras and paths, for bug reports",
    "Show versions, extras and paths, for bug reports.",
    "ckpt env",
    "ckpt env --json",
)


@app.command(name="help", hidden=True, cls=Command, help="Show the help of a command.")
def _help(context: typer.Context, name: Annotated[Optional[str], typer.Argument(metavar="COMMAND")] = None) -> None:  # noqa: UP045
    root: Any = context.find_root()
    if name is None:
        typer.echo(root.get_help())
        return
    command = root.command.get_command(root, name)
    if command is None:
        root.command.resolve_command(root, [name])
    with command.make_context(command.name, [], parent=root, resilient_parsing=True) as inner:
        typer.echo(inner.get_help())


@cache
def root_command() -> Any:
    """`ckpt` as Typer makes it: its ``commands`` by name, its ``params``. They never change, and making them takes a while."""
    import typer.main

    return typer.main.get_command(app)


def command_of(arguments: Sequence[str]) -> tuple[str | None, Any]:
    """The command that a command line names, by its own name, and the command; None and `ckpt` itself if there is none."""
    root = root_command()
    named = next((found for word in arguments if (found := root.get_command(None, word)) is not None), None)
    return (named.name, named) if named is not None else (None, root)
