"""Several checkpoints in one word, or a weight in the word of a checkpoint: as other tools take them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any

from ckpt_cli import shell
from ckpt_cli.cli.words.help import metavar_of
from ckpt_cli.cli.words.synonyms import arguments_of
from ckpt_cli.errors import UsageError

BETWEEN = re.compile(r"([,;+]|(?<=[^/.])\.\.\.?(?=[^/.]))")
WEIGHED = re.compile(r"(?P<path>.+?)(?P<sign>[:=@*])(?P<weight>\d+(?:\.\d*)?|\.\d+)")
RARE = (",", ";", ":")
"""Signs that hardly any path has in its name; what stands at another one must be there."""


def refuse_together(words: Sequence[str], command: Any) -> None:
    """Raise UsageError for arguments that hold more than one path, or a weight, with the command as it is written here.

    Nothing is called like them, and the command takes several paths.
    """
    places = arguments_of(words, command)
    most = _most_paths(command)
    if most < 2 or not any(map(_is_absent, (words[at] for at in places))):
        return
    parts = {at: _parts(words[at]) for at in places}
    listed = [part for at in places for part in parts[at]]
    weighed = [found for part in listed if (found := _weighed(part)) is not None]
    options = [name for parameter in command.params for name in parameter.opts]
    weights: list[str] = []
    if len(weighed) == len(listed) > 1 and "--weights" in options and not _is_given(("--weights",), words):
        listed, weights = [found["path"] for found in weighed], ["--weights", ",".join(found["weight"] for found in weighed)]
    elif not len(places) < len(listed) <= most:
        return
    rest = [word for at, word in enumerate(words) if at not in places]
    again = shell.join(["ckpt", command.name, *listed, *weights, *rest])
    needs = [parameter for parameter in command.params if parameter.param_type_name == "option" and parameter.required]
    again += "".join(f" {min(each.opts, key=len)} {metavar_of(each)}" for each in needs if not _is_given(each.opts, words))
    wrong = next(words[at] for at in places if parts[at] != [words[at]] or weights)
    raise UsageError(f"nothing is called {wrong}", expected="each path as a word of its own", hint=again)


def _most_paths(command: Any) -> float:
    """How many paths a command takes as arguments."""
    taken = [each for each in command.params if each.param_type_name == "argument" and not each.hidden and metavar_of(each) != "TENSOR"]
    return math.inf if any(each.nargs == -1 for each in taken) else len(taken)


def _parts(word: str) -> list[str]:
    """The paths that a word was meant to hold: itself if it is there, or if it is an address."""
    sign = BETWEEN.search(word)
    if sign is None or not _is_absent(word):
        return [word]
    parts = [part for part in word.split(sign[0]) if part]
    return parts if sign[0] in RARE or not any(map(_is_absent, parts)) else [word]


def _weighed(word: str) -> re.Match[str] | None:
    """A path with a weight; None for a path that is there, and for an address."""
    found = WEIGHED.fullmatch(word)
    if found is None or not _is_absent(word):
        return None
    return found if found["sign"] in RARE or not _is_absent(found["path"]) else None


def _is_absent(word: str) -> bool:
    return "://" not in word and not os.path.lexists(os.path.expanduser(word))


def _is_given(names: Sequence[str], words: Sequence[str]) -> bool:
    return any(word.partition("=")[0] in names for word in words)
