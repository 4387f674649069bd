"""Write the completion scripts of bash, zsh and fish, and the man pages (docs/man): `python completions/generate.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ckpt_cli
from ckpt_cli.cli.app import root_command
from ckpt_cli.cli.words.help import help_of, label_of, metavar_of, panels_of
from ckpt_cli.cli.words.scripts import SCRIPTS

FILES = {"ckpt.bash": "bash", "unshard.bash": "bash", "_ckpt": "zsh", "ckpt.fish": "fish", "unshard.fish": "fish"}
"""Shells look for a script by the name of the command; zsh reads in the file for which commands it is."""

MAN = Path(__file__).parent.parent / "docs" / "man"
EXIT_CODES = {
    "0": "Done.",
    "1": "An error-level finding.",
    "2": "Usage.",
    "3": "An input is missing, unreadable or not recognised.",
    "4": "The checkpoint is incomplete or inconsistent.",
    "5": "The output cannot be written.",
    "70": "A bug in ckpt.",
    "128 + N": "Ended by signal N.",
}
VARIABLES = {
    "CKPT_COLOR": "As --color.",
    "CKPT_PROGRESS": "As --progress.",
    "CKPT_DEBUG": "As --debug.",
    "NO_COLOR, FORCE_COLOR": "Colours never, or also off a terminal.",
    "HF_HOME, HF_HUB_CACHE": "Where --base finds models by their Hub ID.",
}


def pages() -> dict[str, str]:
    """The man pages by file name: one of ckpt, and one of every command."""
    root = root_command()
    with root.make_context("ckpt", [], resilient_parsing=True) as context:
        commands = {name: command for name, command in root.commands.items() if not command.hidden}
        found = {"ckpt.1": _page("ckpt", root.help, _of_root(root, commands, context))}
        for name, command in commands.items():
            with command.make_context(name, [], parent=context, resilient_parsing=True) as inner:
                found[f"ckpt-{name}.1"] = _page(f"ckpt-{name}", command.help, _of_command(name, command, inner))
    return {name: "\n".join(lines) + "\n" for name, lines in found.items()}


def _page(name: str, text: str, body: Iterator[str]) -> list[str]:
    first = text.split(";")[0].rstrip(".")
    head = [f'.TH {name.upper()} 1 "" "ckpt {ckpt_cli.__version__}" "User Commands"', ".SH NAME", f"{_escaped(name)} \\- {_escaped(first)}"]
    return [*head, *body]


def _of_root(root: Any, commands: dict[str, Any], context: Any) -> Iterator[str]:
    yield from (".SH SYNOPSIS", ".B ckpt", "COMMAND PATH [OPTIONS]", ".SH DESCRIPTION", _escaped(root.help), ".SH COMMANDS")
    for name, command in commands.items():
        yield from _entry(f"ckpt {name}", command.short_help)
    yield ".SH OPTIONS"
    for parameter in root.get_params(context):
        yield from _entry(label_of(parameter), help_of(parameter))
    yield from _tables()
    yield from (".SH SEE ALSO", ", ".join(f"\\fBckpt\\-{_escaped(name)}\\fR(1)" for name in commands))


def _of_command(name: str, command: Any, context: Any) -> Iterator[str]:
    arguments, panels = panels_of(command, context)
    takes = " ".join(metavar_of(argument) for argument in arguments)
    yield from (".SH SYNOPSIS", f".B ckpt {_escaped(name)}", _escaped(f"{takes} [OPTIONS]"), ".SH DESCRIPTION", _escaped(command.help))
    for argument in arguments:
        yield from _entry(metavar_of(argument), argument.help)
    yield ".SH OPTIONS"
    for panel, options in panels.items():
        yield f".SS {panel}"
        for option in options:
            yield from _entry(label_of(option), help_of(option))
    yield ".SH EXAMPLES"
    for line in command.epilog.splitlines():
        yield from (".PP", ".nf", f".B {_escaped(line)}", ".fi")
    yield from _tables()
    yield from (".SH SEE ALSO", "\\fBckpt\\fR(1)")


def _tables() -> Iterator[str]:
    for title, rows in (("EXIT STATUS", EXIT_CODES), ("ENVIRONMENT", VARIABLES)):
        yield f".SH {title}"
        for label, text in rows.items():
            yield from _entry(label, text)


def _entry(label: str, text: str) -> Iterator[str]:
    yield from (".TP", f".B {_escaped(label)}", _escaped(text))


def _escaped(text: str) -> str:
    """Text in which nothing is an instruction of roff; a hyphen is one that can be copied."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def main() -> None:
    for name, shell in FILES.items():
        Path(__file__).with_name(name).write_text(SCRIPTS[shell])
    MAN.mkdir(exist_ok=True)
    for name, text in pages().items():
        (MAN / name).write_text(text)


if __name__ == "__main__":
    main()
