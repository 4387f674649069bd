"""How many bytes of a step are weights, optimizer and anything else: by the names of files, and by headers where a file holds several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.discover.found import Found
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import files_below
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.registry import format_of
from ckpt_cli.state.optimizer_files import is_of_optimizer
from ckpt_cli.tensors.component import Component


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes on disk; ``separate`` is the part of the optimizer that lies in files without weights."""

    weights: int = 0
    optimizer: int = 0
    other: int = 0
    separate: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.other


def sizes_of(found: Found, components: Sequence[Component], files: Files) -> Sizes:
    """The sizes of a step. ``components`` are those that could be described; what files with weights hold besides them is an optimizer's.

    Raises Unreadable for a folder that cannot be listed.
    """
    matched = {path for place in found.places for path in place.match.files} | {path for each in components for path in each.files}
    shared = any(_holds_optimizer(place.match, files) for place in found.places)
    of_weights = separate = other = 0
    # Without a shared disk each node has a part of the step.
    for folder in dict.fromkeys((found.path, *(home for place in found.places for home in place.more_homes))):
        for file in files_below(folder):
            if file.path in matched:
                of_weights += file.size
            elif is_of_optimizer(file.path, folder):
                separate += file.size
            else:
                other += file.size
    weights = min(of_weights, sum(each.nbytes for each in components)) if shared and components else of_weights
    return Sizes(weights, separate + of_weights - weights, other, separate)


def folder_size(folder: Path) -> Sizes:
    """The sizes of a folder in which no weights were recognised."""
    return Sizes(other=sum(file.size for file in files_below(folder)))


def _holds_optimizer(match: Match, files: Files) -> bool:
    """Whether files with weights hold an optimizer too."""
    try:
        kind = format_of(match)
        owned = kind.optimizer_files(match, files)
        in_weights = owned is not None and not set(owned.ranks.values()).isdisjoint(match.files)
        return in_weights or kind.optimizer(match, files) is not None
    except CkptError:
        return True  # there is one, which cannot be read
