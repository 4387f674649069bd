"""Sources: files that bytes are read from.

A *source* has a ``size``, an ``identity`` and ``read_at(offset, buffer)``. Files are opened read-only, must be regular
files (a FIFO would hang, a device never end), and must not change while they are in use.

Only ENOENT and ENOTDIR mean that a file is absent; any other error is reported: what cannot be accessed may hold anything.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ckpt_cli.errors import CorruptFile, SourceChanged
from ckpt_cli.files.descriptors import ABSENT, Identity, beginning, descriptor_budget, opened, pread, unreadable
from ckpt_cli.files.pickle_template import Templates
from ckpt_cli.paths import absolute
from ckpt_cli.progress import Progress, shown_on, stages
from ckpt_cli.urls import Address, address_of, is_remote

if TYPE_CHECKING:
    from ckpt_cli.files.remote.source import RemoteFiles

Parsed = TypeVar("Parsed")
MAX_PARSED = 2
"""Files that are kept as they were parsed: a pickle of many tensors takes some memory."""


class Watched(Protocol):
    """What must not change until an output is made of it."""

    @property
    def identity(self) -> Identity:
        """Tells whether it is still what was described."""
        ...

    def check_unchanged(self) -> None:
        """Raise SourceChanged unless it still is what it was when it was first looked at."""
        ...


class Source(Watched, Protocol):
    """Where bytes come from: a plain file, or a stream that is inflated while it is read."""

    @property
    def size(self) -> int:
        """Bytes in all."""
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

    def before_reading(self, place: int, start: int, length: int, check: Callable[[bytes], None]) -> None:
        """As that of a file, for offsets in the window."""
        if isinstance(self.source, FileSource):
            self.source.before_reading(self.start + place, self.start + start, length, check)
        else:
            check(self.read(start, length))


class FileSource:
    """A regular file, read with ``pread`` through the descriptors of a `Files` pool. One in a store is a `RemoteSource`."""

    __slots__ = ("_files", "identity")
    forward_only = False
    is_local = True

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
                    count = pread(fd, buffer[done:], offset + done)
                except OSError as error:
                    raise unreadable(error, self.path, "reading failed") from error
                if count == 0:
                    text = f"the file was cut while it was read: it ends at byte {offset + done}"
                    raise SourceChanged(text, path=self.path, expected=f"{self.size} bytes")
                done += count
        finally:
            self._files.give_back(self)

    def read(self, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self.read_at(offset, memoryview(data))
        return bytes(data)

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """An open descriptor, for ``copy_file_range``; it stays open until the block ends."""
        with self._files.descriptor(self) as fd:
            yield fd

    def expect(self, ranges: Iterable[tuple[int, int]], *, exactly: bool = False) -> None:
        """Tell what will be read next, in this order (first and last byte, from 0, the last excluded): here that changes nothing."""

    def before_reading(self, place: int, start: int, length: int, check: Callable[[bytes], None]) -> None:
        """Have some bytes checked before anything at ``place`` behind them is read: here at once."""
        check(self.read(start, length))

    def check_unchanged(self) -> None:
        """Raise SourceChanged unless the file still is what it was when it was first opened."""
        SideFile(self.identity).check_unchanged()


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file on a disk that lies beside weights, as it was when it was first looked at: what is read and copied later must be that."""

    identity: Identity

    def check_unchanged(self) -> None:
        """Raise SourceChanged unless it still is what it was."""
        path = self.identity.path
        try:
            now = Identity.of(path, os.stat(path))
        except ABSENT as error:
            raise SourceChanged("a source file vanished while it was being read", path=path) from error
        except OSError as error:
            raise unreadable(error, path, "a source file can no longer be accessed") from error
        if now != self.identity:
            text = f"a source file changed while it was being read: {self.identity.changes(now)}"
            raise SourceChanged(text, path=path, expected="the same file, size, mtime and ctime as at the start")


class Files:
    """Opens files once, keeps a bounded number of descriptors, closes them all at the end.

    Use it as a context manager. Thread-safe: reads of different threads share descriptors (``pread`` has no position). ``values``:
    whether weights will be read; if not, a format may leave for later what says where exactly they lie. ``given``: paths of the command.
    """

    def __init__(self, limit: int | None = None, progress: Progress | None = None, *, values: bool = True) -> None:
        self.values = values
        self.given: set[str] = set()
        self._stages, self._shown = stages(progress), shown_on(progress)
        self._expected: set[str] = set()
        self._opened, self._what = 0, ""
        self._limit = limit or descriptor_budget()
        self._lock = threading.Lock()
        self._sources: dict[str, FileSource] = {}
        self._idle: OrderedDict[str, int] = OrderedDict()
        self._busy: dict[str, list[int]] = {}
        self._parsed: OrderedDict[Hashable, Any] = OrderedDict()
        self._remote: RemoteFiles | None = None
        self._noted: dict[str, FileSource] = {}
        self.pickles = Templates()

    def expect(self, paths: Iterable[str | os.PathLike[str]], what: str = "files") -> None:
        """Tell the progress display how many of these files were opened, from now on."""
        self._expected, self._opened, self._what = {absolute(path) for path in paths}, 0, what
        remote = [address for path in sorted(self._expected - self._sources.keys()) if (address := address_of(path)) is not None]
        if remote:
            self._remote_files().open_soon(remote)

    def source(self, path: str | os.PathLike[str]) -> FileSource:
        """The source of ``path``; the same object for the same path. Raises NotFound or Unreadable."""
        name = absolute(path)
        with self._lock:
            self._count(name)
            if name not in self._sources:
                self._sources[name] = self._new(name, address_of(name))
            return self._noted.setdefault(name, self._sources[name])

    def watch(self, path: str | os.PathLike[str]) -> None:
        """Ask for a file that is read otherwise: what it says must hold until the end (`check_unchanged`)."""
        self.source(path)

    @contextmanager
    def noting(self) -> Iterator[dict[str, FileSource]]:
        """Note the sources that are asked for while the block runs, by path."""
        before, self._noted = self._noted, {}
        try:
            yield self._noted
        finally:
            self._noted = before

    def _new(self, name: str, address: Address | None) -> FileSource:
        if address is not None:
            return self._remote_files().source(self, address)
        fd, identity = opened(name)
        self._idle[name] = fd
        self._trim()
        return FileSource(self, identity)

    def _remote_files(self) -> RemoteFiles:
        if self._remote is None:
            from ckpt_cli.files.remote.source import RemoteFiles

            self._remote = RemoteFiles()
        return self._remote

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
                    fd, identity = opened(name)
                    if identity != source.identity:
                        os.close(fd)
                        raise SourceChanged("a source file changed while it was being read", path=name)
                entry = self._busy[name] = [fd, 0]
            entry[1] += 1
            return entry[0]

    def give_back(self, source: FileSource) -> None:
        """Let go of a descriptor that was taken."""
        with self._lock:
            entry = self._busy[name := source.path]
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
        if self._remote is not None:
            self._remote.close()

    def __enter__(self) -> Files:
        self._shown.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._shown.__exit__(None, None, None)
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
    return side_file(path).identity.size


def side_file(path: str | os.PathLike[str]) -> Watched:
    """A regular file, which can be opened, as it is now. Raises what opening raises."""
    if is_remote(path):
        from ckpt_cli.files.remote.tree import listed_file

        return listed_file(path)
    fd, identity = opened(os.fspath(path))
    os.close(fd)
    return SideFile(replace(identity, path=absolute(identity.path)))


def read_small(path: Path, limit: int = 64 << 20) -> bytes:
    """The content of a side file (JSON, tracker), of which so much is asked for as there is.

    Raises NotFound, Unreadable, CorruptFile above ``limit`` bytes, or SourceChanged if its size is not the one it had when it was opened.
    """
    if is_remote(path):
        from ckpt_cli.files.remote.tree import remote_content

        return remote_content(path, limit)
    fd, identity = opened(os.fspath(path))
    with os.fdopen(fd, "rb") as file:
        check_small(identity.size, limit, path)
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


def check_small(size: int, limit: int, path: object) -> None:
    """Raise CorruptFile if a side file is larger than any of its kind."""
    if size > limit:
        raise CorruptFile(f"{size} bytes is too large for a side file", path=path, expected=f"at most {limit} bytes")


def beginning_of(path: Path, length: int) -> bytes:
    """The first bytes of a file, no more of which is read. Raises what opening raises."""
    if is_remote(path):
        from ckpt_cli.files.remote.tree import remote_beginning

        return remote_beginning(path, length)
    fd, _ = opened(os.fspath(path))
    try:
        return beginning(fd, length)
    except OSError as error:
        raise unreadable(error, path, "reading failed") from error
    finally:
        os.close(fd)
