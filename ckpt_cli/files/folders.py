"""Listing folders and files: what exists, and what cannot be determined.

On a network disk every question takes a millisecond, and a run has ten thousand files: `Folders` lists a folder once, and answers what
is asked about its entries from that.
"""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from operator import methodcaller
from pathlib import Path, PureWindowsPath
from typing import NamedTuple, Protocol

from ckpt_cli import shell
from ckpt_cli.errors import Unreadable
from ckpt_cli.files.descriptors import ABSENT, unreadable
from ckpt_cli.files.leftovers.apple_double import is_apple_double
from ckpt_cli.urls import is_remote

DEEP = 6
"""Folders below a step that are looked into; trainers use at most four."""


class FileState(NamedTuple):
    """A file as it is now: its size in bytes, its mtime and ctime in ns. ctime notices what keeps the mtime; None: not known.

    ``place`` is what all names of it share, links included (see `place_of`); ``links`` counts those that are no symbolic links.
    """

    path: Path
    size: int
    changed: int
    ctime: int | None = None
    place: tuple[int, int] | None = None
    links: int = 1


class Entry(Protocol):
    """What a listing says of one name, as ``os.DirEntry`` does; links are followed."""

    def is_file(self) -> bool: ...

    def is_dir(self) -> bool: ...


class Folders:
    """Folders as they were when they were first looked at, each listed once. Questions about entries of others go to the system.

    Attributes that macOS kept in files of their own are passed over, unless ``everything`` is asked for.
    """

    def __init__(self, *, everything: bool = False) -> None:
        self._everything = everything
        self._listed: dict[Path, Mapping[str, Entry]] = {}
        self._sorted: dict[Path, Mapping[Path, Entry]] = {}
        self._status: dict[Path, os.stat_result | None] = {}

    def entries(self, folder: Path) -> list[Path]:
        """Everything in a folder, sorted by name; nothing if there is no such folder. Raises Unreadable if it cannot be listed."""
        return list(self._entries(folder))

    def _entries(self, folder: Path) -> Mapping[Path, Entry]:
        # Asked for hundreds of times: making and sorting the paths takes longer than to list a folder.
        if folder not in self._sorted:
            above = self._listed.get(folder.parent)
            if above is not None and folder.name not in above and folder.name:
                return {}
            found = _remote_listing(folder) if is_remote(folder) else _listing(folder, everything=self._everything)
            if found is None:
                return {}
            self._listed[folder] = found
            paths = {folder / name: entry for name, entry in found.items()}
            self._sorted[folder] = {path: paths[path] for path in sorted(paths)}
        return self._sorted[folder]

    def files(self, folder: Path, wanted: Callable[[str], object] | None = None) -> list[Path]:
        """The regular files (also behind links) in a folder, sorted by name. Links that lead nowhere are passed over.

        ``wanted`` says of a name whether it matters; nothing else is looked at. Raises Unreadable.
        """
        return self._of_kind(methodcaller("is_file"), folder, wanted)

    def folders(self, folder: Path, wanted: Callable[[str], object] | None = None) -> list[Path]:
        """The folders (also behind links) in a folder, sorted by name; ``wanted`` as for `files`. Raises Unreadable."""
        return self._of_kind(methodcaller("is_dir"), folder, wanted)

    def _of_kind(self, ask: Callable[[Entry], bool], folder: Path, wanted: Callable[[str], object] | None) -> list[Path]:
        entries = self._entries(folder).items()
        return [path for path, entry in entries if (wanted is None or wanted(path.name)) and _answer(path, entry, ask)]

    def is_there(self, path: Path) -> bool:
        """Whether there is anything at a path, also behind links. Raises Unreadable."""
        return self.is_file(path) or self.is_folder(path) or self._status_of(path) is not None

    def is_broken(self, path: Path) -> bool:
        """Whether a path is a link that leads nowhere. Raises Unreadable."""
        # What a listing tells needs no look at each of many steps.
        return not (self.is_folder(path) or self.is_file(path)) and path.is_symlink() and self._status_of(path) is None

    def is_file(self, path: Path) -> bool:
        """Whether a path is a regular file, also behind links. Raises Unreadable."""
        status = self._known(path, methodcaller("is_file"))
        return status if isinstance(status, bool) else status is not None and stat.S_ISREG(status.st_mode)

    def is_folder(self, path: Path) -> bool:
        """Whether a path is a folder, also behind links. Raises Unreadable."""
        status = self._known(path, methodcaller("is_dir"))
        return status if isinstance(status, bool) else status is not None and stat.S_ISDIR(status.st_mode)

    def _known(self, path: Path, ask: Callable[[Entry], bool]) -> bool | os.stat_result | None:
        """What the listing of the folder above says of an entry, or the system where that was not listed."""
        listed = self._listed.get(path.parent)
        if listed is None or path.name in ("", ".."):
            return self._status_of(path)
        entry = listed.get(path.name)
        return entry is not None and _answer(path, entry, ask)

    def _status_of(self, path: Path) -> os.stat_result | None:
        if path not in self._status:
            self._status[path] = status_of(path)
        return self._status[path]


def _answer(path: Path, entry: Entry, ask: Callable[[Entry], bool]) -> bool:
    try:
        return ask(entry)
    except OSError as error:
        raise unreadable(error, path, "it cannot be accessed") from error


def _listing(folder: Path, *, everything: bool) -> Mapping[str, Entry] | None:
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry for entry in entries if everything or not is_apple_double(entry.path)}
    except ABSENT:
        return None
    except OSError as error:
        raise unreadable(error, folder, "the folder cannot be listed") from error


def _remote_listing(folder: Path) -> Mapping[str, Entry] | None:
    from ckpt_cli.files.remote.tree import remote_entries

    return remote_entries(folder)


def broken_link(path: Path) -> Unreadable:
    """The error for a link that leads nowhere: its target may be on a disk that is not mounted, so that it may be anything."""
    return Unreadable(f"this is a link to {os.readlink(path)}, which does not exist", path=path)


def stays_inside(name: object) -> bool:
    """Whether a path that a file names stays in that file's folder.

    The rule is that of huggingface_hub (serialization/_torch.py): parsed as a Windows path on every system, so that no
    drive, root or ".." gets through.
    """
    if not isinstance(name, str) or not 0 < len(name) <= 1024 or "\0" in name:
        return False
    parsed = PureWindowsPath(name)
    return not (parsed.drive or parsed.root or ".." in parsed.parts)


def entries_in(folder: Path) -> list[Path]:
    """Everything in a folder, sorted by name; nothing if there is no such folder. Raises Unreadable if it cannot be listed."""
    return Folders().entries(folder)


def files_in(folder: Path, wanted: Callable[[str], object] | None = None) -> list[Path]:
    """The regular files (also behind links) in a folder, sorted by name. Links that lead nowhere are passed over.

    ``wanted`` says of a name whether it matters; nothing else is looked at. Raises Unreadable.
    """
    return Folders().files(folder, wanted)


def folders_in(folder: Path, wanted: Callable[[str], object] | None = None) -> list[Path]:
    """The folders (also behind links) in a folder, sorted by name; ``wanted`` as for `files_in`. Raises Unreadable."""
    return Folders().folders(folder, wanted)


def status_of(path: str | os.PathLike[str]) -> os.stat_result | None:
    """The status of a path, following links; None if nothing exists there. Raises Unreadable if that cannot be determined."""
    if is_remote(path):
        from ckpt_cli.files.remote.tree import remote_status

        return remote_status(path)
    try:
        return os.stat(path)
    except ABSENT:
        return None
    except ValueError:
        return None  # no file has a name with NUL in it
    except OSError as error:
        raise unreadable(error, path, "it cannot be accessed") from error


def place_of(path: Path) -> tuple[int, int] | None:
    """What all names of one file or folder share, links included; None if nothing exists there. Raises Unreadable."""
    status = status_of(path)
    return None if status is None else (status.st_dev, status.st_ino)


def same_file(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two paths lead to one file or folder, which is there. Raises Unreadable."""
    first, second = status_of(path), status_of(other)
    return first is not None and second is not None and os.path.samestat(first, second)


def same_content(path: Path, other: Path) -> bool:
    """Whether a store says that two of its files hold the same bytes; False if it does not tell. Raises NotFound, Unreadable."""
    from ckpt_cli.files.remote.tree import listed_file

    return is_remote(path) and is_remote(other) and listed_file(path).holds_what(listed_file(other))


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether a path exists. Raises Unreadable."""
    return status_of(path) is not None


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a regular file. Raises Unreadable."""
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder. Raises Unreadable."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def similar_hint(path: Path) -> str | None:
    """For a path that does not exist, the most similar one that does, or several; they differ in one name. Raises Unreadable."""
    missing = path
    while not is_remote(path) and status_of(missing.parent) is None and missing.parent != missing:
        missing = missing.parent
    below = path.relative_to(missing)
    names = [entry.name for entry in entries_in(missing.parent)] if status_of(missing.parent) is not None else []
    matcher = difflib.SequenceMatcher(b=missing.name.lower())
    alike: dict[float, list[Path]] = {}
    for name in names:
        matcher.set_seq1(name.lower())
        if _leads_somewhere(missing.parent / name):
            alike.setdefault(round(matcher.ratio(), 6), []).append(missing.parent / name)
    best = max(alike, default=0.0)
    if best < 0.6:  # as `difflib.get_close_matches` does
        return None
    found = [place / below for place in alike[best] if _leads_somewhere(place / below)] or alike[best]
    return f"did you mean {' or '.join(map(shell.path, found[:3]))}?"


def _leads_somewhere(path: Path) -> bool:
    """Whether a path may be proposed: a link to nothing, a loop of links and what is below a file may not."""
    try:
        return status_of(path) is not None
    except Unreadable:
        return False


def files_below(path: Path, depth: int = DEEP) -> Iterator[FileState]:
    """All files of a folder and of those in it, sorted by name, also behind links; a file itself. Raises Unreadable."""
    status = status_of(path)
    if status is None:
        return
    if not stat.S_ISDIR(status.st_mode):
        place = (status.st_dev, status.st_ino)
        yield FileState(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, place, status.st_nlink)
    elif depth:
        for entry in entries_in(path):
            yield from files_below(entry, depth - 1)


def holds_something(folder: Path) -> bool:
    """Whether there is such a folder on a disk, and anything in it that can be seen."""
    try:
        return bool(os.listdir(folder))
    except OSError:
        return False
