"""Sources: files that bytes are read from.

A *source* has a ``size``, an ``identity`` and ``read_at(offset, buffer)``. Files are opened read-only, must be regular
files (a FIFO would hang, a device never end), and must not change while they are in use.

Only ENOENT and ENOTDIR mean that a file is absent. Every other system error is reported with the path: what
cannot be accessed may hold anything.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from ckpt_cli.errors import CorruptFile, LfsPointer, NotFound, SourceChanged, Unreadable
from ckpt_cli.files.descriptors import descriptor_budget, pread
from ckpt_cli.files.pickle_template import Templates
from ckpt_cli.progress import Progress, stages

OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


ABSENT = (FileNotFoundError, NotADirectoryError)
"""The only errors that mean that a file is absent."""

HINTS = {
    errno.EACCES: "ask its owner, or run as a user who may read it",
    errno.EPERM: "ask its owner, or run as a user who may read it",
    errno.ELOOP: "symbolic links form a loop: replace them with the file or folder itself",
    errno.ENAMETOOLONG: "the name is longer than this file system allows",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ESTALE: "the file system was remounted or the file replaced: run the command again",
}
"""What helps against a system error. For EIO and others nothing is known to help."""

Parsed = TypeVar("Parsed")
MAX_PARSED = 2
"""Files that are kept as they were parsed: a pickle of many tensors takes some memory."""

LFS_START = b"version https://git-lfs.github.com/spec/"
LFS_SIZE = 1024
"""A pointer is smaller than this (docs/spec.md of git-lfs)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What must stay the same while a file is read: path, size in bytes, mtime and ctime in ns, device and inode.

    ctime notices what keeps the mtime. Only one process compares it: other machines may see another one.
    """

    path: str
    size: int
    mtime_ns: int
    device: int
    inode: int
    ctime_ns: int = 0

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> Identity:
        return cls(path, status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino, status.st_ctime_ns)


class Source(Protocol):
    """Where bytes come from: a plain file, or a stream that is inflated while it is read."""

    @property
    def size(self) -> int:
        """Bytes in all."""
        ...

    @property
    def identity(self) -> Identity:
        """Tells whether the source is still the one that was described."""
        ...

    @property
    def path(self) -> str:
        """The file behind it."""
        ...

    @property
    def origins(self) -> tuple[Source, ...]:
        """The sources that bytes are read from in the end: itself, or those that it is computed from."""
        ...

    @property
    def forward_only(self) -> bool:
        """Whether reading backwards starts it anew, so that one worker at a time should read it."""
        ...

    def read_at(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on. Raises CorruptFile at the end of the source, Unreadable on I/O errors."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on, as a new bytes object: for headers, never for weights."""
        ...

    def check_unchanged(self) -> None:
        """Raise SourceChanged unless it still is what it was when it was first opened."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a source that is a file of its own, such as one item of a ``.distcp``: offsets count from ``start``."""

    source: Source
    start: int
    size: int

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` of the window on."""
        if offset < 0 or offset + length > self.size:
            raise CorruptFile(f"{length} bytes at {offset} lie outside of an item of {self.size} bytes", path=self.source.path)
        return self.source.read(self.start + offset, length)


class FileSource:
    """A regular file, read with ``pread`` through the descriptors of a `Files` pool."""

    __slots__ = ("_files", "identity")
    forward_only = False

    def __init__(self, files: Files, identity: Identity) -> None:
        self._files = files
        self.identity = identity

    @property
    def size(self) -> int:
        return self.identity.size

    @property
    def path(self) -> str:
        return self.identity.path

    @property
    def pickles(self) -> Templates:
        """What reads the pickles of all files of the pool."""
        return self._files.pickles

    @property
    def origins(self) -> tuple[Source, ...]:
        return (self,)

    def read_at(self, offset: int, buffer: memoryview) -> None:
        fd = self._files.take(self)
        try:
            done = 0
            while done < len(buffer):
                try:
                    count = (
                        os.preadv(fd, [buffer[done:]], offset + done) if hasattr(os, "preadv") else pread(fd, buffer[done:], offset + done)
                    )
                except OSError as error:
                    raise unreadable(error, self.path, "reading failed") from error
                if count == 0:
                    raise CorruptFile(
                        f"the file ends at byte {offset + done}",
                        path=self.path,
                        expected=f"{self.size} bytes",
                        hint="it was truncated while being read: run the command again when nothing writes to it any more",
                    )
                done += count
        finally:
            self._files.give_back(self)

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on, as a new bytes object: for headers, never for weights."""
        data = bytearray(length)
        self.read_at(offset, memoryview(data))
        return bytes(data)

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """An open descriptor, for ``copy_file_range``; it stays open until the block ends."""
        with self._files.descriptor(self) as fd:
            yield fd

    def check_unchanged(self) -> None:
        """Raise SourceChanged unless the file still is what it was when it was first opened."""
        try:
            now = Identity.of(self.path, os.stat(self.path))
        except ABSENT as error:
            raise SourceChanged("a source file vanished while it was being read", path=self.path) from error
        except OSError as error:
            raise unreadable(error, self.path, "a source file can no longer be accessed") from error
        if now != self.identity:
            raise SourceChanged(
                "a source file changed while it was being read",
                path=self.path,
                expected=f"{self.identity.size} bytes, as at the start",
            )


class Files:
    """Opens files once, keeps a bounded number of descriptors, closes them all at the end.

    Use it as a context manager. Thread-safe: reads of different threads share descriptors (``pread`` has no position).
    """

    def __init__(self, limit: int | None = None, progress: Progress | None = None) -> None:
        self._stages = stages(progress)
        self._expected: set[str] = set()
        self._opened, self._what = 0, ""
        self._limit = limit or descriptor_budget()
        self._lock = threading.Lock()
        self._sources: dict[str, FileSource] = {}
        self._idle: OrderedDict[str, int] = OrderedDict()
        self._busy: dict[str, list[int]] = {}
        self._parsed: OrderedDict[Hashable, Any] = OrderedDict()
        self.pickles = Templates()

    def expect(self, paths: Iterable[str | os.PathLike[str]], what: str = "files") -> None:
        """Tell the progress display how many of these files were opened, from now on."""
        self._expected, self._opened, self._what = {os.path.abspath(path) for path in paths}, 0, what

    def source(self, path: str | os.PathLike[str]) -> FileSource:
        """The source of ``path``; the same object for the same path. Raises NotFound or Unreadable."""
        name = os.path.abspath(path)
        with self._lock:
            self._count(name)
            if name not in self._sources:
                fd, identity = _open(name)
                self._sources[name] = FileSource(self, identity)
                self._idle[name] = fd
                self._trim()
            return self._sources[name]

    def parsed(self, path: str | os.PathLike[str], parse: Callable[[FileSource], Parsed]) -> Parsed:
        """What ``parse`` makes of a file. The last few are kept: what a file holds is often asked right before it is described."""
        source = self.source(path)
        return self.kept((source.identity, parse), lambda: parse(source))

    def kept(self, key: Hashable, make: Callable[[], Parsed]) -> Parsed:
        """What ``make`` makes, if that is not known by its ``key`` from before. The last few are kept."""
        with self._lock:
            made: Parsed | None = self._parsed.pop(key, None)
        if made is None:
            made = make()
        with self._lock:
            self._parsed[key] = made
            while len(self._parsed) > MAX_PARSED:
                self._parsed.popitem(last=False)
        return made

    @contextmanager
    def descriptor(self, source: FileSource) -> Iterator[int]:
        """An open descriptor of ``source``, not closed while the block runs."""
        fd = self.take(source)
        try:
            yield fd
        finally:
            self.give_back(source)

    def take(self, source: FileSource) -> int:
        """An open descriptor of ``source``, not closed before it is given back."""
        name = source.path
        with self._lock:
            entry = self._busy.get(name)
            if entry is None:
                fd = self._idle.pop(name, None)
                if fd is None:
                    fd, identity = _open(name)
                    if identity != source.identity:
                        os.close(fd)
                        raise SourceChanged("a source file changed while it was being read", path=name)
                entry = self._busy[name] = [fd, 0]
            entry[1] += 1
            return entry[0]

    def give_back(self, source: FileSource) -> None:
        """Let go of a descriptor that was taken."""
        name = source.path
        with self._lock:
            entry = self._busy[name]
            entry[1] -= 1
            if entry[1] == 0:
                del self._busy[name]
                self._idle[name] = entry[0]
                self._trim()

    def check_unchanged(self) -> None:
        """Raise SourceChanged unless every file that was opened still is what it was."""
        for source in list(self._sources.values()):
            source.check_unchanged()

    def close(self) -> None:
        with self._lock:
            while self._idle:
                os.close(self._idle.popitem()[1])

    def __enter__(self) -> Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _count(self, name: str) -> None:
        if name in self._expected:
            total = len(self._expected) + self._opened
            self._expected.remove(name)
            self._opened += 1
            self._stages.reading(self._opened, total, self._what)

    def _trim(self) -> None:
        while len(self._idle) > self._limit:
            os.close(self._idle.popitem(last=False)[1])


def size_of(path: str | os.PathLike[str]) -> int:
    """Bytes of a regular file, which can be opened. Raises what opening raises."""
    fd, identity = _open(os.fspath(path))
    os.close(fd)
    return identity.size


def unreadable(error: OSError, path: str | os.PathLike[str], what: str) -> Unreadable:
    """A system error about a path as a CkptError, with what helps against it."""
    return Unreadable(f"{what}: {error.strerror or error}", path=os.fspath(path), hint=HINTS.get(error.errno or 0))


def read_small(path: Path, limit: int = 64 << 20) -> bytes:
    """The content of a side file (JSON, tracker), of which so much is asked for as there is.

    Raises NotFound, Unreadable, CorruptFile above ``limit`` bytes, or SourceChanged if its size is not the one it had when it was opened.
    """
    fd, identity = _open(os.fspath(path))
    with os.fdopen(fd, "rb") as file:
        if identity.size > limit:
            raise CorruptFile(f"{identity.size} bytes is too large for a side file", path=path, expected=f"at most {limit} bytes")
        try:
            content = file.read(identity.size + 1)
        except OSError as error:
            raise unreadable(error, path, "reading failed") from error
    if len(content) != identity.size:
        raise SourceChanged(
            f"{len(content)} bytes were read of a file that had {identity.size}",
            path=path,
            hint="if something is still writing it, run the command again afterwards; a broken disk or mount also ends reads early",
        )
    return content


def begins_with(path: Path, start: bytes) -> bool:
    """Whether a file begins with these bytes, of which no more are read. Raises what opening raises."""
    fd, _ = _open(os.fspath(path))
    try:
        return _starts_with(fd, start)
    except OSError as error:
        raise unreadable(error, path, "reading failed") from error
    finally:
        os.close(fd)


def _open(name: str) -> tuple[int, Identity]:
    try:
        fd = os.open(name, OPEN_FLAGS)
    except ABSENT as error:
        raise NotFound("no such file", path=name) from error
    except OSError as error:
        raise unreadable(error, name, "the file cannot be opened") from error
    except ValueError as error:
        raise Unreadable("the file cannot be opened: the name contains a NUL byte", path=name) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable("not a regular file", path=name)
        if len(LFS_START) < status.st_size < LFS_SIZE and _starts_with(fd, LFS_START):
            raise LfsPointer("this is a Git LFS pointer, not the file itself", path=name)
    except OSError as error:
        os.close(fd)
        raise unreadable(error, name, "reading failed") from error
    except (Unreadable, LfsPointer):
        os.close(fd)
        raise
    return fd, Identity.of(name, status)


def _starts_with(fd: int, start: bytes) -> bool:
    """Whether a file that was just opened begins with these bytes; it is at its beginning again afterwards."""
    begin = os.read(fd, len(start))
    os.lseek(fd, 0, os.SEEK_SET)
    return begin == start
