"""Commands of the shell as the value of an option, of which the shell has made several words: they need quotes."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from typing import Any

from ckpt_cli import shell
from ckpt_cli.cli.words.synonyms import arguments_of, option_names, takes_value
from ckpt_cli.errors import UsageError

OPTION = "--exec"
USED = ("{output}", "CKPT_OUTPUT")
"""What a command says where the output is meant."""

REPLACED = re.compile(r"\{(output|step|run)\}|\$\{?CKPT_[A-Z]+\}?")


def refuse_unquoted(words: Sequence[str], command: Any) -> None:
    """Raise UsageError for a command without quotes: its first word is the value, and the output stands in one that follows."""
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == OPTION), None)
    names = option_names(command)
    if at is None or OPTION not in names:
        return
    _, equals, first = words[at].partition("=")
    begin = at + 1 if equals else at + 2
    first = first if equals else next(iter(words[at + 1 :]), "")
    where = [i for i, word in enumerate(words) if i >= begin and any(each in word for each in USED)]
    if not where or any(each in first for each in USED):
        return
    end = next((i for i in range(where[-1], len(words)) if words[i].partition("=")[0] in names), len(words))
    if not arguments_of(words[:at], command):
        while end > where[-1] + 1 and os.path.lexists(os.path.expanduser(words[end - 1])):
            end -= 1
    meant = shell.word(" ".join(map(_quoted, (first, *words[begin:end]))))
    again = shell.join([*words[:at], OPTION]) + f" {meant}"
    rest = f" {shell.join(words[end:])}" if words[end:] else ""
    raise UsageError(
        f"{OPTION} takes one word, and {words[begin]} follows it", expected="a command in quotes", hint=f"ckpt {command.name} {again}{rest}"
    )


def _quoted(word: str) -> str:
    """A word for the shell; what is replaced in it stays bare."""
    bare = REPLACED.sub("x", word)
    return word if shlex.quote(bare) == bare else shlex.quote(word)


def refuse_swallowed(words: Sequence[str], command: Any) -> None:
    """Raise UsageError for an option that stands where another needs its value: it would be taken for that value."""
    from ckpt_cli.cli.words.help import kind_of, metavar_of

    names, taken = option_names(command), {name: each for each in command.params for name in each.opts if takes_value(each)}
    at = 0
    while at + 1 < len(words) and words[at] != "--":
        option, value = words[at], words[at + 1]
        if option in taken and value.partition("=")[0] in names:
            expected, kind = f"{option} {metavar_of(taken[option])}", kind_of(taken[option])
            hint = f"for a {kind} of that name, write {option} ./{value}" if kind is not None else None
            raise UsageError(f"{option} needs a value, and {value} follows", expected=expected, hint=hint)
        at += 2 if option in taken else 1
