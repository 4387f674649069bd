"""Files of this machine: at any position where the file system allows it, front to back where it only appends."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from ckpt_cli.files.source import FileSource
from ckpt_cli.output.plan import CopyWork
from ckpt_cli.output.sinks.sink import FrontToBack
from ckpt_cli.tensors.parallel import Stop

FLAGS = os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
CANNOT_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.ETXTBSY, errno.EIO}
"""Errors of ``copy_file_range`` after which ordinary reads and writes are tried (and report a real error as their own)."""

NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""Errors of ``fsync`` where a file system has none; closing the file is all that can be done."""

APPENDS_ONLY = {errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.ESPIPE, errno.ENOSYS, errno.EBADF}
"""Errors of writing at a position where a file system cannot do that, as mounts of HDFS and of object stores say it."""


class _File:
    """A descriptor that is closed with its context."""

    def __init__(self, path: Path, flags: int) -> None:
        self._fd = os.open(path, flags | FLAGS, 0o666)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class PositionedFile(_File):
    """A file of ``size`` bytes that threads fill in any order. ``shared``: by other processes too, so that what is there stays."""

    def __init__(self, path: Path, size: int, *, shared: bool = False) -> None:
        super().__init__(path, os.O_RDWR if shared else os.O_WRONLY | os.O_EXCL)
        try:
            # The same size by whichever process comes first: nothing that is written already is lost.
            if not shared or os.fstat(self._fd).st_size != size:
                os.ftruncate(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise

    def put(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)

    def copy(self, work: CopyWork) -> int:
        source, done = work.piece.source, 0
        if not isinstance(source, FileSource) or not source.is_local or not hasattr(os, "copy_file_range"):
            return 0
        with source.descriptor() as origin:
            while done < work.nbytes:
                try:
                    count = os.copy_file_range(origin, self._fd, work.nbytes - done, work.source_offset + done, work.target_offset + done)
                except OSError as error:
                    if error.errno in CANNOT_COPY:
                        return done
                    raise
                if count == 0:
                    return done
                done += count
        return done

    def finish(self) -> None:
        os.fsync(self._fd)


class SequentialFile(FrontToBack, _File):
    """A file that is only ever appended to, by nothing but ``write``."""

    def __init__(self, path: Path, stop: Stop | None = None) -> None:
        FrontToBack.__init__(self, stop)
        _File.__init__(self, path, os.O_WRONLY | os.O_EXCL)

    def append(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.write(self._fd, data[done:])

    def finish(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in NO_SYNC:
                raise
        # Mounts of object stores say only now whether all of it arrived.
        fd, self._fd = self._fd, -1
        os.close(fd)


def takes_positions(folder: Path) -> bool:
    """Whether files in a folder can be written at any position, which one small file tells. Raises OSError if writing fails."""
    # Not the process id: parts in containers share a folder, and may have the same one.
    path = folder / f".ckpt-probe-{uuid.uuid4().hex[:12]}"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_EXCL | FLAGS, 0o666)
        try:
            try:
                os.ftruncate(fd, 2)
                os.pwrite(fd, b"\1", 1)
                os.pwrite(fd, b"\1", 0)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in APPENDS_ONLY:
                return False
            raise
    finally:
        if os.path.lexists(path):
            path.unlink()
    return True
