"""Where else an output can go, if something is where it would lie: for the commands that are proposed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

from ckpt_cli import shell
from ckpt_cli.errors import OutputExists
from ckpt_cli.paths import absolute, current_folder, from_here


def free_name(path: str) -> str:
    """A name like this one that nothing has.

    >>> free_name("/no/such/folder/")
    '/no/such/folder_2'
    """
    number, stem = 2, path.rstrip("/") or path
    while os.path.lexists(f"{stem}_{number}"):
        number += 1
    return f"{stem}_{number}"


def free_file(name: str) -> str:
    """The name of a file in the current folder, or one like it that nothing has."""
    stem, end = os.path.splitext(name)
    names = itertools.chain([name], (f"{stem}_{number}{end}" for number in itertools.count(2)))
    return next(each for each in names if not os.path.lexists(each))


def beside(checkpoint: str, again: str) -> str | None:
    """A free name for a merged checkpoint if that which it has by default, with the options of ``again``, is taken, else None."""
    stem = os.path.splitext(checkpoint)[0] if os.path.isfile(checkpoint) else checkpoint.rstrip("/")
    words = shell.split(again)
    components = [f"_{value}" for option, value in itertools.pairwise(words) if option == "--type"]
    return free_name(f"{stem}_merged") if any(os.path.lexists(f"{stem}_merged{end}") for end in ("", *components)) else None


def past(error: OutputExists, typed: Sequence[str]) -> tuple[str, ...]:
    """The words of a command whose output exists, with another name for it: what is proposed is copied, so it replaces nothing."""
    from ckpt_cli.cli.options import OUTPUTS

    target, words, replaced = str(error.path), list(typed), False
    end = words.index("--") if "--" in words else len(words)
    for at, word in enumerate(typed):
        name, equals, value = word.partition("=") if word.startswith("--") and "=" in word else ("", "", word)
        if name in OUTPUTS or (at and typed[at - 1] in OUTPUTS) or _leads_to(value, target):
            words[at], replaced = f"{name}{equals}{free_name(value)}", True
    free = free_name(from_here(target))
    return tuple(words) if replaced else (*words[:end], "-o", free, *words[end:])


def _leads_to(word: str, target: str) -> bool:
    path = os.path.expanduser(word)
    return (os.path.isabs(path) or current_folder() is not None) and absolute(path) == target
