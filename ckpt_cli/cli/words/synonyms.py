"""Words that people bring along from other tools, and what they are here. Help and completion do not show them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

COMMANDS: Mapping[str, str] = {
    "ls": "detect",
    "list": "detect",
    "status": "detect",
    "info": "inspect",
    "convert": "merge",
    "consolidate": "merge",
    "unshard": "merge",
    "combine": "merge",
    "compare": "diff",
    "check": "verify",
    "avg": "average",
    "mean": "average",
}
"""Other names of commands; one whose command is not there is none."""

PATHS = ("--local-dir", "--path", "--input", "--input-dir", "--checkpoint")
"""How other tools ask for what is PATH here."""


WITH_VALUE = {"--report": ("--html", (".html", ".htm"))}
"""Flags after which a value may stand, of which these are the endings, and the option that takes it."""

STEPS = ("--checkpoint",)
"""Those of `PATHS` that are a step where a number follows: no path is meant by one, unless it is there."""


def rewritten(args: Sequence[str], command: Any) -> list[str]:
    """The arguments with PATH in place of an option that names it, dashes where other tools have underscores, and values for flags."""
    own = {name for parameter in command.params for name in parameter.opts}
    words: list[str] = []
    for at, word in enumerate(args):
        if word == "--":
            return [*words, *args[at:]]
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") and name.replace("_", "-") in {*own, *PATHS} else name
        option, endings = WITH_VALUE.get(name, ("", ()))
        after = value or next(iter(args[at + 1 :]), "")
        if option in own and after.lower().endswith(endings) and not after.startswith("-"):
            words += [name, f"{option}={value}"] if value else [name, option]
        elif name in STEPS and "--step" in own and after.isdecimal() and not os.path.lexists(after):
            words.append(f"--step={value}" if value else "--step")
        elif name in own or name not in PATHS:
            words.append(f"{name}{equals}{value}")
        elif equals:
            words.append(value)
    return words


def is_synonym(name: str, command: Any = None, parameter: Any = None) -> bool:
    """Whether an option is a name that help does not show: of long ones all but the first, ``-f`` too."""
    for each in [parameter] if command is None else command.params:
        if name in each.opts:
            long = [option for option in each.opts if option.startswith("--")]
            return name == "-f" or (name.startswith("--") and name != long[0])
    return False
