"""A folder that appears complete or not at all: built under a temporary name beside its target, then renamed.

The folder is locked while its process lives, so a later run recognises what a killed one left. Until the context ends, a publication
can be withdrawn (`Staging.withdraw`), so that either all of several outputs appear or none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import uuid
from pathlib import Path

from ckpt_cli.errors import NotWritable, OutputExists
from ckpt_cli.files import manifest

MARK = ".ckpt-tmp-"
ASIDE = ".ckpt-old-"
NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EINVAL}
"""Errors of ``link`` on file systems without hard links."""

AT_FDCWD, RENAME_NOREPLACE, RENAME_EXCHANGE = -100, 1, 2


class Staging:
    """The temporary folder of one output. Use it as a context manager: without `publish` it is removed again."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = temporary_name(target)
        self._lock = -1
        self._kept = False
        self._inode: tuple[int, int] | None = None
        self._moved: list[tuple[Path, tuple[int, int]]] = []
        self.removed = remove_leftovers(target)

    @classmethod
    def of(cls, folder: Path, target: Path) -> Staging:
        """A folder that is already there, to be published; it stays if that fails."""
        staging = cls(target)
        staging.folder, staging._kept = folder, True
        return staging

    def __enter__(self) -> Staging:
        if self._kept:
            return self
        try:
            self._make()
        except OSError as error:
            hint = "choose another place with -o"
            raise NotWritable(f"the output folder cannot be created: {error.strerror}", path=self.target, hint=hint) from error
        return self

    def _make(self) -> None:
        """Make and lock the folder; again under another name if a run beside us took it for a left-over in between."""
        while True:
            self.folder.mkdir()
            try:
                self._lock = _lock(self.folder)
            except (BlockingIOError, FileNotFoundError):
                pass
            except OSError:
                return  # a file system without locks: there nothing is ever taken for a left-over
            else:
                if self.folder.is_dir():
                    return
                os.close(self._lock)
                self._lock = -1
            self.folder = temporary_name(self.target)

    def __exit__(self, *_: object) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        for folder in (self.folder, self._aside) if not self._kept else ():
            if folder.exists():
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def _aside(self) -> Path:
        """Where an old folder waits if two cannot be exchanged."""
        # Not a name of temporary folders: a run that is killed here leaves the old output aside, never to be cleaned up.
        return self.folder.with_name(self.folder.name.replace(MARK, ASIDE))

    def sync(self) -> None:
        """Make the names inside durable; files sync themselves when they are written."""
        sync_folder(self.folder)

    def publish(self, *, replace: bool) -> None:
        """Give the folder its name. ``replace``: an existing folder is swapped out in one step, and removed when the context ends.

        Raises OutputExists if something else stands there (also if it appeared meanwhile).
        """
        try:
            self._inode = _inode(self.folder)
            if replace and self.target.exists():
                self._exchange()
            else:
                self._rename()
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise OutputExists("the output appeared while it was being written", path=self.target, hint="choose another -o") from error
            raise NotWritable(f"the output cannot be renamed into place: {error.strerror}", path=self.target) from error
        try:
            sync_folder(self.target.parent)
        except OSError as error:
            self.withdraw()
            raise NotWritable(f"the output cannot be synced to disk: {error.strerror}", path=self.target) from error

    def publish_into(self, folder: Path) -> None:
        """Move the files into an existing folder, replacing nothing: all of them, or none."""
        try:
            # The manifest says that the rest is whole, so it comes last.
            for path in sorted(self.folder.iterdir(), key=lambda path: (path.name == manifest.NAME, path.name)):
                self._move(path, folder / path.name)
            sync_folder(folder)
        except BaseException as error:
            self.withdraw()
            if not isinstance(error, OSError):
                raise
            if error.errno == errno.EEXIST:
                raise OutputExists("a file of this name already exists", path=error.filename2 or error.filename or folder) from error
            raise NotWritable(f"the files cannot be moved into place: {error.strerror}", path=folder) from error

    def _move(self, path: Path, target: Path) -> None:
        """Give a file its name in the folder, without replacing one that is there."""
        # Noted before it happens: an interrupt may come right after it.
        self._moved.append((target, _inode(path)))
        try:
            os.link(path, target)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            # Without hard links an empty file takes the name first, so that only a file of ours is ever replaced.
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            self._moved.append((target, _inode(target)))
            os.replace(path, target)

    def withdraw(self) -> None:
        """Withdraw a publication: what was there before is restored. Nothing happens if there was none."""
        while self._moved:
            path, inode = self._moved.pop()
            with contextlib.suppress(OSError):
                if _inode(path) == inode:
                    path.unlink()
        with contextlib.suppress(OSError):
            if self._inode is None or _inode(self.target) != self._inode:
                return
            if self.folder.exists():
                _renameat2(self.folder, self.target, RENAME_EXCHANGE)
            else:
                os.rename(self.target, self.folder)
                if self._aside.exists():
                    os.rename(self._aside, self.target)
            sync_folder(self.target.parent)

    def _rename(self) -> None:
        if not _renameat2(self.folder, self.target, RENAME_NOREPLACE):
            # rename(2) replaces nothing but an empty folder.
            os.rename(self.folder, self.target)

    def _exchange(self) -> None:
        if _renameat2(self.folder, self.target, RENAME_EXCHANGE):
            return
        os.rename(self.target, self._aside)
        try:
            os.rename(self.folder, self.target)
        except BaseException:
            os.rename(self._aside, self.target)
            raise


def temporary_name(target: Path) -> Path:
    """A name beside the target that is recognised as temporary."""
    return target.parent / f".{target.name}{MARK}{uuid.uuid4().hex[:12]}"


def remove_leftovers(target: Path) -> list[Path]:
    """Remove temporary folders for this target that a killed process left; those in use are locked and stay."""
    removed = []
    with contextlib.suppress(OSError):
        for folder in target.parent.glob(f".{glob.escape(target.name)}{MARK}*"):
            with contextlib.suppress(OSError):
                lock = _lock(folder)
                try:
                    shutil.rmtree(folder)
                    removed.append(folder)
                finally:
                    os.close(lock)
    return removed


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk; file systems that cannot do that, and folders that may be written but not read, are left alone."""
    try:
        fd = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except PermissionError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def _inode(path: Path) -> tuple[int, int]:
    """What a folder is, whatever its name."""
    status = os.stat(path, follow_symlinks=False)
    return status.st_dev, status.st_ino


def _lock(folder: Path) -> int:
    """A descriptor of the folder that holds an exclusive lock until it is closed; OSError if another process has it."""
    import fcntl

    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _renameat2(old: Path, new: Path, flags: int) -> bool:
    """``renameat2`` of Linux; False where it does not exist or the file system lacks it. Other failures raise OSError."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if call(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(number, os.strerror(number), str(old), None, str(new))
