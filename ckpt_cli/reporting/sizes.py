"""How many bytes of a step are weights, optimizer and anything else: by the names of files, and by headers where a file holds several."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_cli.discover.found import Found
from ckpt_cli.discover.optimizers.files import is_of_optimizer
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import FileState, files_below
from ckpt_cli.files.safetensors_file import read_header
from ckpt_cli.files.source import Files, FileSource
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.registry import format_of
from ckpt_cli.formats.safetensors.names import SUFFIX
from ckpt_cli.tensors.component import Component

TORCH = (".pt", ".bin", ".pth", ".th", ".ckpt")
TOLERANCE = 1.01
"""How much larger a file of an older step may be: pickles differ by the lengths of numbers and of folder names."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes on disk, of a file that has several names once. ``files`` are all, ``homes`` the folders that they were found in.

    ``separate`` are the files with nothing but the optimizer, by their place in the step. ``sound``: each of these can be opened. What is
    in them is not looked at.
    """

    weights: int = 0
    optimizer: int = 0
    other: int = 0
    files: tuple[FileState, ...] = ()
    separate: Mapping[str, tuple[FileState, ...]] = field(default_factory=dict)
    sound: bool = False
    homes: tuple[Path, ...] = ()

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.other

    @property
    def places(self) -> frozenset[Hashable]:
        """All files, whatever they are called."""
        return frozenset(map(identity, self.files))

    @property
    def of_optimizer(self) -> frozenset[Path]:
        return frozenset(file.path for files in self.separate.values() for file in files)

    def replaces_optimizer_of(self, older: Sizes, before: Collection[Hashable]) -> bool:
        """Whether training can go on from this optimizer instead: it has all files of the older one, none of them noticeably smaller.

        ``before`` are the files of all steps before this one: what is one of them, by a link, is the optimizer of another step.
        """
        alike = all(_size(files) <= _size(self.separate.get(name, ())) * TOLERANCE for name, files in older.separate.items())
        own = not any(identity(file) in before for files in self.separate.values() for file in files)
        return self.sound and bool(self.separate) and alike and own

    def freed(self, paths: Collection[Path], elsewhere: Collection[Hashable]) -> int:
        """The bytes that are free once these files of the step are removed, if all of their names are among them.

        ``elsewhere`` are the files of other steps: what is one of them is needed there, or not freed here. Neither is what lies elsewhere.
        """
        names: dict[Hashable, list[FileState]] = {}
        for file in self.files:
            names.setdefault(identity(file), []).append(file)
        inside = [os.path.realpath(home) for home in self.homes]
        freed = 0
        for place, files in names.items():
            if place in elsewhere or not all(file.path in paths for file in files):
                continue
            real = {os.path.realpath(file.path) for file in files}
            if files[0].links <= len(real) and all(any(Path(path).is_relative_to(home) for home in inside) for path in real):
                freed += files[0].size
        return freed


def identity(file: FileState) -> Hashable:
    """Equal for all names of a file. A disk that numbers no files has only their names."""
    return file.place if file.place is not None and file.place[1] else os.path.realpath(file.path)


def disk_size(sizes: Iterable[Sizes]) -> int:
    """Bytes of all steps together."""
    return _size(file for each in sizes for file in each.files)


def _size(files: Iterable[FileState]) -> int:
    return sum({identity(file): file.size for file in files}.values())


def sizes_of(found: Found, components: Sequence[Component], files: Files) -> Sizes:
    """The sizes of a step. ``components`` are those that could be described; what files with weights hold besides them is an optimizer's.

    Raises Unreadable for a folder that cannot be listed.
    """
    matched = {path for place in found.places for path in place.match.files} | {path for each in components for path in each.files}
    shared = any(_holds_optimizer(place.match, files) for place in found.places)
    of_weights, separate, held = list[FileState](), dict[str, tuple[FileState, ...]](), list[FileState]()
    # Without a shared disk each node has a part of the step.
    homes = tuple(dict.fromkeys((found.path, *(home for place in found.places for home in place.more_homes))))
    for folder in homes:
        for file in files_below(folder):
            held.append(file)
            if file.path in matched:
                of_weights.append(file)
            elif is_of_optimizer(file.path, folder):
                name = file.path.relative_to(folder).as_posix()
                separate[name] = (*separate.get(name, ()), file)
    weights = _size(of_weights)
    if shared and components:
        weights = min(weights, sum(each.nbytes for each in components))
    opened = [file for named in separate.values() for file in named]
    known = _size([*of_weights, *opened])
    sound = all(_opens(file.path, files) for file in opened)
    return Sizes(weights, known - weights, _size(held) - known, tuple(held), separate, sound, homes)


def folder_size(folder: Path) -> Sizes:
    """The sizes of a folder in which no weights were recognised."""
    files = tuple(files_below(folder))
    return Sizes(other=_size(files), files=files, homes=(folder,))


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
