"""Checks that a command has the options that a hint names, before showing the hint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

OPTION = re.compile(r"--[a-z][a-z-]+")
ELSEWHERE: Mapping[str, frozenset[str]] = {"verify": frozenset({"--base"})}
"""Options with another meaning than in `merge`, for which hints are written."""

MERGING = ("detect", "inspect", "verify", "average", "diff", "show")
"""Commands that look at what `merge` would write."""


def fitting(hint: str | None, command: str) -> str | None:
    """A hint that the user of a command can follow, or None.

    Reading is shared by all commands, so an error may name an option of another command. Options that no ckpt command has
    belong to other programs (``aws s3 cp --recursive``). A hint with a whole command is left unchanged.
    """
    if hint is None or "ckpt " in hint:
        return hint
    named = [name for name in dict.fromkeys(OPTION.findall(hint)) if name not in own_options(command) and name != "--help"]
    known = frozenset().union(*options_by_command().values()) if named else frozenset()
    foreign = [name for name in named if name in known]
    if not foreign:
        return hint
    if command in MERGING and options_of("merge").issuperset(foreign):
        return f"ckpt merge has {' and '.join(foreign)} for this: {hint}"
    # What does not need the option is still true.
    rest = [part for part in hint.split(", or ") if not any(name in part for name in foreign)]
    return ", or ".join(rest) or None


def own_options(command: str) -> frozenset[str]:
    """The options of a command that mean there what they mean elsewhere."""
    return options_of(command) - ELSEWHERE.get(command, frozenset())


def options_by_command() -> Mapping[str, frozenset[str]]:
    """The options of each command, as they are typed."""
    from ckpt_cli.cli.app import root_command

    return {name: options_of(name) for name in root_command().commands}


@cache
def options_of(command: str) -> frozenset[str]:
    """The options of a command, of which one alone is made: all together take longer than most of what commands do."""
    from ckpt_cli.cli.app import root_command

    found = root_command().commands.get(command)
    return frozenset(option for parameter in (found.params if found else ()) for option in (*parameter.opts, *parameter.secondary_opts))
