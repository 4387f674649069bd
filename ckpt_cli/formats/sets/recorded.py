"""The rank of the process that wrote a file, where the file itself says it: files that were exchanged or copied over each other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.errors import Inconsistent
from ckpt_cli.files.pickle_nodes import Call, as_dict, attributes

RANKS = ("rank", "global_rank")
HINT = "they may have been renamed or copied over each other: get them again from the nodes that wrote them"


@dataclass(frozen=True, slots=True)
class Recorded:
    """The ``rank`` that a file records (None if it does not), and how messages call the file."""

    label: str
    path: Path
    rank: int | None


def recorded_rank(entries: Mapping[Any, Any]) -> int | None:
    """The rank that is kept beside a state dict, or in the arguments of the program, as Megatron's are."""
    arguments = entries.get("args")
    fields: Mapping[Any, Any] = as_dict(arguments) or {}
    if isinstance(arguments, Call) and arguments.is_("argparse", "Namespace") and arguments.state is not None:
        fields = attributes(arguments.state)
    found = (held.get(name) for held in (entries, fields) for name in RANKS)
    return next((rank for rank in found if type(rank) is int and rank >= 0), None)


def refuse_exchanged(files: Sequence[Recorded]) -> None:
    """Raise Inconsistent unless the ranks that some files record rise in the order in which their names count.

    One process that wrote all of them, as programs that convert checkpoints do, has one rank, which tells nothing.
    """
    known = [(file, file.rank) for file in files if file.rank is not None]
    if len({rank for _, rank in known}) < 2:
        return
    for (first, before), (second, after) in itertools.pairwise(known):
        if before == after:
            text = f"{first.label} and {second.label} were both written by rank {after}"
            raise Inconsistent(text, path=second.path, expected="a file of each rank", hint=HINT)
        if before > after:
            text = f"{first.label} was written by rank {before}, {second.label} by rank {after}: they are in each other's place"
            raise Inconsistent(text, path=second.path, expected="files under the names under which they were written", hint=HINT)
