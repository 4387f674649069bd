"""Where else an output can go, if something is where it would lie: for the commands that are proposed."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

from ckpt_cli.errors import OutputExists


def free_name(path: str) -> str:
    """A name like this one that nothing has.

    >>> free_name("/no/such/folder/")
    '/no/such/folder_2'
    """
    number, stem = 2, path.rstrip("/") or path
    while os.path.lexists(f"{stem}_{number}"):
        number += 1
    return f"{stem}_{number}"


def beside(checkpoint: str) -> str | None:
    """A free name for a merged checkpoint if one or more of those that it has by default are taken, else None."""
    stem = os.path.splitext(checkpoint)[0] if os.path.isfile(checkpoint) else checkpoint.rstrip("/")
    return free_name(f"{stem}_merged") if glob.glob(f"{glob.escape(stem)}_merged*") else None


def past(error: OutputExists, typed: Sequence[str]) -> tuple[str, ...]:
    """The words of a command whose output exists, so that it runs: with --overwrite where ckpt may replace it, else with another name."""
    from ckpt_cli.cli.options import OUTPUTS

    target, words, replaced = str(error.path), list(typed), False
    end = words.index("--") if "--" in words else len(words)
    if error.replaceable:
        return (*words[:end], "--overwrite", *words[end:])
    for at, word in enumerate(typed):
        name, equals, value = word.partition("=") if word.startswith("--") and "=" in word else ("", "", word)
        if name in OUTPUTS or (at and typed[at - 1] in OUTPUTS) or os.path.abspath(os.path.expanduser(value)) == target:
            words[at], replaced = f"{name}{equals}{free_name(value)}", True
    return tuple(words) if replaced else (*words[:end], "-o", free_name(os.path.relpath(target)), *words[end:])
