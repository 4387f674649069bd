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
    options = options_by_command()
    own = own_options(command) | {"--help"}
    known = frozenset().union(*options.values())
    foreign = [name for name in dict.fromkeys(OPTION.findall(hint)) if name in known and name not in own]
    if not foreign:
        return hint
    if command in MERGING and options["merge"].issuperset(foreign):
        return f"ckpt merge has {' and '.join(foreign)} for this: {hint}"
    # What does not need the option is still true.
    rest = [part for part in hint.split(", or ") if not any(name in part for name in foreign)]
    return ", or ".join(rest) or None


def own_options(command: str) -> frozenset[str]:
    """The options of a command that mean there what they mean elsewhere."""
    return options_by_command().get(command, frozenset()) - ELSEWHERE.get(command, frozenset())


@cache
def options_by_command() -> Mapping[str, frozenset[str]]:
    """The options of each command, as they are typed."""
    from ckpt_cli.cli.app import root_command

    listed = root_command().commands
    return {
        name: frozenset(option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts))
        for name, found in listed.items()
    }
