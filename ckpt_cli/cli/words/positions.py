"""Which words of a command line are options, their values, and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def option_names(command: Any) -> frozenset[str]:
    """All names of the options of a command."""
    return frozenset(name for parameter in command.params if parameter.param_type_name == "option" for name in _names(parameter))


def arguments_of(words: Sequence[str], command: Any) -> list[int]:
    """The places of the words that are no options and no values of options."""
    valued = {
        name
        for parameter in command.params
        if parameter.param_type_name == "option" and not (parameter.is_flag or parameter.count)
        for name in _names(parameter)
    }
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
