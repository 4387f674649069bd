"""How many bytes of a step are weights, optimizer and anything else: by the names of files, and by headers where a file holds several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_cli.discover.found import Found
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import files_below
from ckpt_cli.files.safetensors_file import read_header
from ckpt_cli.files.source import Files, FileSource
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.registry import format_of
from ckpt_cli.formats.safetensors.names import SUFFIX
from ckpt_cli.state.optimizer_files import is_of_optimizer
from ckpt_cli.tensors.component import Component

TORCH = (".pt", ".bin", ".pth", ".ckpt")
TOLERANCE = 1.01
"""How much larger a file of an older step may be: pickles differ by the lengths of numbers and of folder names."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes on disk. ``files`` are those with weights; ``separate`` those with nothing but the optimizer, by their place in the step.

    ``sound``: each of the latter can be opened. What is in them is not looked at.
    """

    weights: int = 0
    optimizer: int = 0
    other: int = 0
    files: Mapping[Path, int] = field(default_factory=dict)
    separate: Mapping[str, int] = field(default_factory=dict)
    sound: bool = False

    def replaces_optimizer_of(self, older: Sizes) -> bool:
        """Whether training can go on from this optimizer instead: it has all files of the older one, none of them noticeably smaller."""
        alike = all(size <= self.separate.get(name, 0) * TOLERANCE for name, size in older.separate.items())
        return self.sound and bool(self.separate) and alike

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.other


def sizes_of(found: Found, components: Sequence[Component], files: Files) -> Sizes:
    """The sizes of a step. ``components`` are those that could be described; what files with weights hold besides them is an optimizer's.

    Raises Unreadable for a folder that cannot be listed.
    """
    matched = {path for place in found.places for path in place.match.files} | {path for each in components for path in each.files}
    shared = any(_holds_optimizer(place.match, files) for place in found.places)
    of_weights, separate, opened = dict[Path, int](), dict[str, int](), list[Path]()
    other = 0
    # Without a shared disk each node has a part of the step.
    for folder in dict.fromkeys((found.path, *(home for place in found.places for home in place.more_homes))):
        for file in files_below(folder):
            if file.path in matched:
                of_weights[file.path] = file.size
            elif is_of_optimizer(file.path, folder):
                name = file.path.relative_to(folder).as_posix()
                separate[name] = separate.get(name, 0) + file.size
                opened.append(file.path)
            else:
                other += file.size
    weights = all_weights = sum(of_weights.values())
    if shared and components:
        weights = min(weights, sum(each.nbytes for each in components))
    optimizer = sum(separate.values()) + all_weights - weights
    return Sizes(weights, optimizer, other, of_weights, separate, all(_opens(path, files) for path in opened))


def folder_size(folder: Path) -> Sizes:
    """The sizes of a folder in which no weights were recognised."""
    return Sizes(other=sum(file.size for file in files_below(folder)))


def _opens(path: Path, files: Files) -> bool:
    """Whether a file is whole, as far as its end and its headers tell."""
    read: Callable[[FileSource], object] | None = TorchFile if path.suffix in TORCH else read_header if path.suffix == SUFFIX else None
    try:
        return files.source(path).size > 0 if read is None else files.parsed(path, read) is not None
    except CkptError:
        return False


def _holds_optimizer(match: Match, files: Files) -> bool:
    """Whether files with weights hold an optimizer too."""
    try:
        kind = format_of(match)
        owned = kind.optimizer_files(match, files)
        in_weights = owned is not None and not set(owned.ranks.values()).isdisjoint(match.files)
        return in_weights or kind.optimizer(match, files) is not None
    except CkptError:
        return True  # there is one, which cannot be read
