"""The rank of the process that wrote a file, where the file itself says it: files that were exchanged or copied over each other."""

from __future__ import annotations

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


def refuse_exchanged(*lines: Sequence[Recorded]) -> None:
    """Raise Inconsistent unless the ranks that some files record all differ, and rise along each line of files in the order of their names.

    One process that wrote all files, as programs that convert checkpoints do, has one rank, which tells nothing.
    """
    files = list({file.path: file for line in lines for file in line if file.rank is not None}.values())
    if len({file.rank for file in files}) < 2:
        return
    first_of: dict[int | None, Recorded] = {}
    for file in files:
        if (first := first_of.setdefault(file.rank, file)) is not file:
            text = f"{first.label} and {file.label} were both written by rank {file.rank}"
            raise Inconsistent(text, path=file.path, expected="a file of each rank", hint=HINT)
    for line in lines:
        held = [file.rank for file in line if file.rank is not None]
        for rank, due in zip(held, sorted(held), strict=True):
            if rank != due:
                # Where it belongs another file lies: the two were exchanged if that one belongs here, or more files were moved around.
                first, second = first_of[rank], first_of[held[sorted(held).index(rank)]]
                how = "they are in each other's place" if second.rank == due else "their names are in another order"
                text = f"{first.label} was written by rank {rank}, {second.label} by rank {second.rank}: {how}"
                raise Inconsistent(text, path=first.path, expected="files under the names under which they were written", hint=HINT)
