"""Descriptors of open files: opening regular ones, how many there may be, and reads at a position on any system."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import stat
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt_cli.errors import NotFetched, NotFound, Unreadable
from ckpt_cli.files.leftovers.downloads import refuse_unfinished
from ckpt_cli.files.leftovers.pointers import POINTER_SIZE, refuse_pointer
from ckpt_cli.urls import full_name

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

STORE = -1
"""In place of the device of a file that lies in a store."""

MOST = 4096
SEEKING = threading.Lock()
"""Where the system has no positioned reads (Windows), one thread at a time seeks and reads."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What must stay the same while a file is read: path, size in bytes, mtime and ctime in ns, device, inode, ``start`` of an item in it.

    ctime notices what keeps the mtime, and is the server's: all machines see the same. Permissions change it, so plans leave it out.
    ``tag`` is what a store says of the content: an entity tag, a version, or both.
    """

    path: str
    size: int
    mtime_ns: int
    device: int
    inode: int
    ctime_ns: int = 0
    start: int = 0
    tag: str = ""

    @property
    def text(self) -> str:
        """For digests that other processes make too: path, size, mtime and tag."""
        return f"{self.path}:{self.size}:{self.mtime_ns}{self.tag and f':{self.tag}'}"

    @property
    def stamp(self) -> tuple[int, int, str]:
        """What changes with the content of a file: size, mtime and tag."""
        return self.size, self.mtime_ns, self.tag

    @property
    def is_unversioned(self) -> bool:
        """Whether nothing but the size of a file in a store tells it from another: its server has no tags and no times."""
        return self.device == STORE and not self.tag and not self.mtime_ns

    @property
    def file(self) -> tuple[object, ...]:
        """Equal for all names of one file, links included. What lies on no disk (device 0) has only its path.

        Some file systems (of FUSE, or mounts of networks) give all files one inode number: size and mtime tell these apart.
        """
        return (self.device, self.inode, self.size, self.mtime_ns) if self.device else (self.path,)

    def changes(self, now: Identity) -> str:
        """What is another than it was, in words.

        A ctime alone is changed by permissions, by a rename, and by a second hard link such as a backup makes, too.
        """
        if now.size != self.size:
            return f"it has {now.size} bytes, not {self.size}"
        if (now.device, now.inode) != (self.device, self.inode):
            return "another file is in its place"
        if now.mtime_ns != self.mtime_ns:
            return "its mtime is another, its size is the same"
        return "its ctime is another, its size and mtime are the same: it was written, linked (as cp -al does), renamed or its mode was set"

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> Identity:
        return cls(path, status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino, status.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class MadeFrom:
    """The files that a process read, by path: the stamp of each, and device, inode and ctime in ns as ``machine`` saw them."""

    machine: str
    files: Mapping[str, tuple[int, int, str]]
    seen: Mapping[str, tuple[int, int, int]]

    @classmethod
    def of(cls, identities: Iterable[Identity]) -> MadeFrom:
        """What files are to this machine, whose name is not to be read from it."""
        known = {full_name(each.path).encode("utf-8", "backslashreplace").decode(): each for each in dict.fromkeys(identities)}
        machine = hashlib.sha256(platform.node().encode("utf-8", "surrogateescape")).hexdigest()[:16]
        seen = {path: (each.device, each.inode, each.ctime_ns) for path, each in known.items()}
        return cls(machine, {path: each.stamp for path, each in known.items()}, seen)

    @property
    def digest(self) -> str:
        """The same for the same files, wherever their file system is mounted."""
        told = sorted((path, stamp, self.seen[path][1:]) for path, stamp in self.files.items())
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def differences(self, now: MadeFrom, *, copies: bool) -> list[str]:
        """The files of ``now`` that were others then, or none; ctime (and inode) tell what keeps size and mtime.

        ``copies``: other machines may have copies, so these only count for a file system that both saw: a device of one machine, or one
        with a file of the same inode and ctime. Otherwise all see one, with the same ctime, but with inodes that a mount may make up.
        """
        both = {path: (self.seen[path], place) for path, place in now.seen.items() if path in self.seen}
        here = self.machine == now.machine
        shared = {then[0] for then, place in both.values() if then[1:] == place[1:] or (here and then[0] == place[0])}
        same = {path for path, (then, p) in both.items() if (then[1:] == p[1:] or then[0] not in shared if copies else then[2] == p[2])}
        return [path for path, stamp in now.files.items() if self.files.get(path) != stamp or path not in same]


def pread(fd: int, buffer: memoryview, offset: int) -> int:
    """Read at a position into ``buffer``; returns how many bytes there were."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    if hasattr(os, "pread"):
        data = os.pread(fd, len(buffer), offset)
    else:
        with SEEKING:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def descriptor_budget() -> int:
    """Half of what the process may open, at most `MOST`; the soft limit is raised to twice that where the hard one allows it."""
    try:
        import resource
    except ImportError:
        return 128
    soft, hard = (MOST * 2 if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    wanted = min(hard, MOST * 2)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            soft = wanted
        except (OSError, ValueError):
            pass
    return max(8, min(soft // 2, MOST))


def opened(name: str) -> tuple[int, Identity]:
    """A descriptor of a regular file, and what it is. Raises NotFound, Unreadable, NotFetched."""
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
        if status.st_size < POINTER_SIZE:
            refuse_pointer(beginning(fd, status.st_size), name, status.st_size)
        refuse_unfinished(name)
    except OSError as error:
        os.close(fd)
        raise unreadable(error, name, "reading failed") from error
    except (Unreadable, NotFetched):
        os.close(fd)
        raise
    return fd, Identity.of(name, status)


def beginning(fd: int, length: int) -> bytes:
    """The first bytes of a file that was just opened; it is at its beginning again afterwards."""
    start = os.read(fd, length)
    os.lseek(fd, 0, os.SEEK_SET)
    return start


def unreadable(error: OSError, path: str | os.PathLike[str], what: str) -> Unreadable:
    """A system error about a path as a CkptError, with what helps against it."""
    return Unreadable(f"{what}: {error.strerror or error}", path=os.fspath(path), hint=HINTS.get(error.errno or 0))
