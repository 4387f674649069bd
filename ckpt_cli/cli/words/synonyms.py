"""Words that people bring along from other tools, and what they are here. Help and completion do not show them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ckpt_cli import shell
from ckpt_cli.cli.words.periods import UNIT
from ckpt_cli.errors import UsageError

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

OTHER_DASHES = "\u2013\u2014"
"""What chats and word processors make of two minus signs."""

DASHES = f"-{OTHER_DASHES}"
ONCE = ("type", "step", "steps", "weights")
LISTS = ("--steps", "--weights")
NUMBER = re.compile(r"\d[\d.,e]*", re.ASCII)
UNITS = {"--max-shard-size": re.compile(r"[kmgt]i?b?", re.IGNORECASE)} | dict.fromkeys(("--interval", "--settle"), re.compile(UNIT))
"""What may follow a number of these options after a space."""

STEPS = ("--checkpoint",)
"""Those of `PATHS` that are a step where a number follows: no path is meant by one, unless it is there."""


def rewritten(args: Sequence[str], command: Any) -> list[str]:
    """The arguments with PATH in place of an option that names it, dashes where other tools have underscores, and values for flags."""
    own = {name for parameter in command.params for name in parameter.opts}
    valued = {name for parameter in command.params if not getattr(parameter, "is_flag", False) for name in parameter.opts}
    words: list[str] = []
    args = joined(args, valued)
    for at, word in enumerate(args):
        if word == "--":
            return [*words, *args[at:]]
        name, equals, value = word.partition("=")
        if equals and value and len(name) == 2 and name in valued:
            words += [name, value]
            continue
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


def joined(args: Sequence[str], options: Collection[str]) -> list[str]:
    """The arguments with values in one that spaces have cut: ``--steps 100, 200`` and ``--max-shard-size 5 GB``.

    What is there under that name is a path.
    """
    words: list[str] = []
    for word in args:
        option = words[-2] if len(words) > 1 and words[-2] in options else ""
        more = NUMBER.fullmatch(word) if option in LISTS else UNITS[option].fullmatch(word) if option in UNITS else None
        if more is None or not NUMBER.fullmatch(words[-1]) or os.path.lexists(word):
            words.append(word)
        else:
            words[-1] += word if option in UNITS or words[-1].endswith(",") else f",{word}"
    return words


def refuse_slips(words: Sequence[str], command: Any) -> None:
    """Raise UsageError for options with another dash or with none, and for two values of an option that says what is read.

    Of two steps or components one would be left out without a word.
    """
    names = {name for parameter in command.params for name in parameter.opts}
    for at, word in enumerate(words):
        option = f"--{word.lstrip(DASHES).partition('=')[0]}"
        if word == "--":
            break
        if option in names and word.startswith(tuple(OTHER_DASHES)):
            raise UsageError(f"{word} begins with a dash that is no minus", hint=f"options begin with two minus signs: {option}")
        bare, equals, value = word.partition("=")
        if equals and f"--{bare}" in names and not os.path.lexists(word) and words[at - 1] not in names:
            raise UsageError(f"{word} is no option", hint=f"did you mean --{bare} {shell.word(value)}?")
    for parameter in command.params:
        if parameter.name not in ONCE or getattr(parameter, "multiple", False):
            continue
        given = []
        for at, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name == "--":
                break
            if name in parameter.opts:
                given.append(value if equals else next(iter(words[at + 1 :]), ""))
        if len(set(given)) > 1:
            option, joined_values = parameter.opts[0], ",".join(given)
            hints = {"type": "--type both takes both, --type all all", "step": f"one step: --step {given[-1]}"}
            hint = hints.get(parameter.name, f"did you mean {option} {joined_values}?")
            raise UsageError(f"{option} is given {len(given)} times", expected="one value", hint=hint)


def option_names(command: Any) -> frozenset[str]:
    """All names of the options of a command."""
    return frozenset(name for parameter in command.params if parameter.param_type_name == "option" for name in _names(parameter))


def takes_value(parameter: Any) -> bool:
    """Whether the word after an option is its value."""
    return parameter.param_type_name == "option" and not (parameter.is_flag or parameter.count)


def arguments_of(words: Sequence[str], command: Any) -> list[int]:
    """The places of the words that are no options and no values of options."""
    valued = {name for parameter in command.params if takes_value(parameter) for name in _names(parameter)}
    found: list[int] = []
    is_value = False
    for at, word in enumerate(words):
        if word == "--":
            return [*found, *range(at + 1, len(words))]
        if not is_value and not (word.startswith("-") and len(word) > 1):
            found.append(at)
        is_value = not is_value and word in valued
    return found


def _names(parameter: Any) -> tuple[str, ...]:
    return (*parameter.opts, *parameter.secondary_opts)


def is_synonym(name: str, command: Any = None, parameter: Any = None) -> bool:
    """Whether an option is a name that help does not show: of long ones all but the first, ``-f`` too."""
    for each in [parameter] if command is None else command.params:
        if name in each.opts:
            long = [option for option in each.opts if option.startswith("--")]
            return name == "-f" or (name.startswith("--") and name != long[0])
    return False
