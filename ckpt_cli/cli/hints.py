"""Hints name options: here is checked that the command has them, before it tells one."""

from __future__ import annotations

import re
from collections.abc import Mapping

OPTION = re.compile(r"--[a-z][a-z-]+")
ELSEWHERE: Mapping[str, frozenset[str]] = {"verify": frozenset({"--base"})}
"""Options that mean something else there than in `merge`, for which hints are written."""

MERGING = ("detect", "inspect", "verify", "average")
"""Commands that look at what `merge` would write."""


def fitting(hint: str | None, command: str) -> str | None:
    """A hint that the user of a command can follow, None where there is none.

    Reading is shared by all commands, so that an error may name an option of another one. A hint that says a whole command is
    left as it is.
    """
    if hint is None or "ckpt " in hint:
        return hint
    own = options_of(command) - ELSEWHERE.get(command, frozenset()) | {"--help"}
    foreign = [name for name in dict.fromkeys(OPTION.findall(hint)) if name not in own]
    if not foreign:
        return hint
    if command in MERGING and options_of("merge").issuperset(foreign):
        return f"ckpt merge has {' and '.join(foreign)} for this: {hint}"
    # What does not need the option is still true.
    rest = [part for part in hint.split(", or ") if not any(name in part for name in foreign)]
    return ", or ".join(rest) or None


def options_of(command: str) -> frozenset[str]:
    """The options of a command, as they are typed."""
    import typer.main

    from ckpt_cli.cli.app import app

    group = typer.main.get_command(app)
    found = getattr(group, "commands", {}).get(command)
    return frozenset(name for parameter in (found.params if found is not None else ()) for name in parameter.opts)
