"""How commands present themselves: help in panels as wide as the terminal, and the words that they answer to."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from ckpt_cli.cli.session import TYPED, wants_color
from ckpt_cli.cli.words import scripts
from ckpt_cli.cli.words.synonyms import COMMANDS, is_synonym, refuse_slips, rewritten

WIDEST = 120
"""Columns beyond which lines are hard to read."""

LONGEST = 26
"""Columns of options; after a longer one, its help begins on the next line."""


class Command(TyperCommand):
    """A command whose help shows panels, the most common options first, and no synonyms."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[TYPED] = tuple(args)
        words = rewritten(args, self)
        if not ctx.resilient_parsing:
            from ckpt_cli.cli.words.quotes import refuse_swallowed, refuse_unquoted
            from ckpt_cli.cli.words.together import refuse_together

            refuse_unquoted(words, self)
            refuse_swallowed(words, self)
            refuse_slips(words, self)
            refuse_together(words, self)
        return super().parse_args(ctx, words)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\n".join(self._lines(ctx, Look())) + "\n")

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        return [item for item in super().shell_complete(ctx, incomplete) if not is_synonym(item.value, self)]

    def _lines(self, ctx: Any, look: Look) -> Iterator[str]:
        arguments, panels = panels_of(self, ctx)
        takes = " ".join(metavar_of(argument) for argument in arguments)
        needed = "".join(f" {label_of(option)}" for options in panels.values() for option in options if option.required)
        yield f"{look.head('Usage:')} {ctx.command_path} {takes}{needed} [OPTIONS]"
        yield ""
        yield from look.paragraph(self.help or "")
        if arguments:
            yield ""
            yield from look.rows([(metavar_of(argument), getattr(argument, "help", "") or "") for argument in arguments])
        for panel, options in panels.items():
            yield ""
            yield look.head(f"{panel}:")
            yield from look.rows([(label_of(option), help_of(option)) for option in options])
        if self.epilog:
            yield ""
            yield look.head("Examples:")
            yield from (f"  {look.word(line)}" for line in self.epilog.splitlines())


class Group(TyperGroup):
    """`ckpt` itself: knows the commands by other names too."""

    commands: Any

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self.commands.get(cmd_name) or self.commands.get(COMMANDS.get(cmd_name, ""))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Completion is for the user's own shell where none is named, and who asks for help wants nothing installed.
        if args and args[0] in scripts.OPTIONS and {"--help", "-h"} & set(args):
            args = ["--help"]
        if args and args[0] in scripts.OPTIONS and (len(args) == 1 or args[1].startswith("-")):
            args = [args[0], scripts.own_shell(), *args[1:]]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        command = self.get_command(ctx, args[0])
        if command is None and not ctx.resilient_parsing and not args[0].startswith("-"):
            from ckpt_cli.cli.words.mistakes import no_such_command

            raise no_such_command(args[0], self.commands, args)
        return super().resolve_command(ctx, args) if command is None else (command.name, command, args[1:])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\n".join(self._lines(ctx, Look())) + "\n")

    def _lines(self, ctx: Any, look: Look) -> Iterator[str]:
        yield f"{look.head('Usage:')} {ctx.command_path} COMMAND PATH [OPTIONS]"
        yield ""
        yield from look.paragraph(self.help or "")
        yield ""
        yield look.head("Commands:")
        yield from look.rows(self.commands.summaries())
        yield ""
        yield look.head("Options:")
        yield from look.rows([(label_of(p), help_of(p)) for p in self.get_params(ctx) if not getattr(p, "hidden", False)])
        yield ""
        yield from look.paragraph(self.epilog or "")


class Look:
    """The width of a page and its colours; none off a terminal."""

    def __init__(self) -> None:
        self._width = min(shutil.get_terminal_size().columns, WIDEST)
        self._coloured = wants_color("auto", sys.stdout)

    def head(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self._coloured else text

    def word(self, text: str) -> str:
        return f"\x1b[36m{text}\x1b[0m" if self._coloured else text

    def paragraph(self, text: str) -> list[str]:
        return textwrap.wrap(text, self._width, break_long_words=False, break_on_hyphens=False)

    def rows(self, rows: Sequence[tuple[str, str]]) -> Iterable[str]:
        """Two columns; the second is wrapped between words."""
        longest = max((len(label) for label, _ in rows if len(label) <= LONGEST), default=0)
        margin = longest + 4
        for label, text in rows:
            lines = textwrap.wrap(text, self._width - margin, break_long_words=False, break_on_hyphens=False) or [""]
            first = f"  {self.word(label)}"
            if len(label) > longest:
                yield first
                yield " " * margin + lines[0]
            else:
                yield (first + " " * (margin - 2 - len(label)) + lines[0]).rstrip()
            yield from (" " * margin + line for line in lines[1:])


def panels_of(command: Any, ctx: Any) -> tuple[list[Any], dict[str, list[Any]]]:
    """The arguments of a command, and its options by panel, without what is hidden."""
    from ckpt_cli.cli.options import OUTPUT, PANELS  # the list of commands does without

    shown = [parameter for parameter in command.get_params(ctx) if not getattr(parameter, "hidden", False)]
    panels: dict[str, list[Any]] = {panel: [] for panel in PANELS}
    for parameter in shown:
        if parameter.param_type_name == "option":
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or OUTPUT, []).append(parameter)
    arguments = [parameter for parameter in shown if parameter.param_type_name == "argument"]
    return arguments, {panel: options for panel, options in panels.items() if options}


def metavar_of(parameter: Any) -> str:
    """What stands for the value of a parameter."""
    return str(parameter.metavar if parameter.metavar is not None else parameter.name.upper())


def kind_of(parameter: Any) -> str | None:
    """Whether the value of an option is a folder or a file, by what stands for it; None for values that are no path."""
    return {"DIR": "folder", "FILE": "file"}.get(metavar_of(parameter))


def label_of(parameter: Any) -> str:
    """An option as it is typed, the short name first, without synonyms."""
    names = [name for name in (*parameter.opts, *parameter.secondary_opts) if not is_synonym(name, None, parameter)]
    names.sort(key=lambda name: name.startswith("--"))
    label = ", ".join(names)
    takes = not (getattr(parameter, "is_flag", False) or getattr(parameter, "count", False))
    return f"{label} {metavar_of(parameter)}" if takes else label


def help_of(parameter: Any) -> str:
    """The help of an option, with the variable that also sets it."""
    variable = f" [{parameter.envvar}]" if parameter.envvar else ""
    return f"{parameter.help or ''}{variable}"
