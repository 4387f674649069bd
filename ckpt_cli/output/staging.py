"""A folder that appears complete or not at all: built under a temporary name beside its target, then renamed.

The folder is locked while its process lives, so a later run recognises what a killed one left. Until the context ends, a publication
can be withdrawn (`Staging.withdraw`), so that either all of several outputs appear or none. Where folders cannot be renamed (mounts of
object stores) the files move one by one, and last those without which nothing takes the folder for a model.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import uuid
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from ckpt_cli.errors import CorruptFile, NotWritable, OutputExists
from ckpt_cli.files import manifest
from ckpt_cli.files.source import Files
from ckpt_cli.names import Write
from ckpt_cli.output.sinks.files import PositionedFile, SequentialFile, takes_positions
from ckpt_cli.output.sinks.sink import Sink
from ckpt_cli.output.writer import output_errors
from ckpt_cli.tensors.parallel import Stop

MARK = ".ckpt-tmp-"
ASIDE = ".ckpt-old-"
NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EINVAL}
"""Errors of ``link`` on file systems without hard links."""

NO_RENAME = {errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM}
"""Errors of ``rename`` where folders (or files) cannot be renamed at all."""

LAST = ("config.json", manifest.NAME)
"""Without these nothing takes a folder for a model, and without the manifest ckpt not for a whole output; indices come before them."""

AT_FDCWD, RENAME_NOREPLACE, RENAME_EXCHANGE = -100, 1, 2


class Staging:
    """The temporary folder of one output. Use it as a context manager: without `publish` it is removed again."""

    def __init__(self, target: Path, write: Write = "auto") -> None:
        self.target = target
        self.in_order = write == "sequential"
        self._probes = write == "auto"
        self._made: Path | None = None
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

    def __enter__(self) -> Self:
        if self._kept:
            return self
        try:
            self._make()
        except OSError as error:
            hint = "choose another place with -o"
            raise NotWritable(f"the output folder cannot be created: {error.strerror}", path=self.target, hint=hint) from error
        try:
            with output_errors(self.target):
                if self._probes:
                    self.in_order = not takes_positions(self.folder)
                if self.in_order:
                    self._check_renames()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def create(self, name: str, size: int, stop: Stop | None = None) -> AbstractContextManager[Sink]:
        """A new file; its mode follows the umask."""
        path = self.folder / name
        return SequentialFile(path, stop) if self.in_order else PositionedFile(path, size)

    def check(self, name: str, size: int, header: bytes) -> None:
        """Raise CorruptFile unless a file on the disk has this size and this beginning, byte for byte."""
        with Files() as files:
            source = files.source(self.folder / name)
            if source.size != size or source.read(0, len(header)) != header:
                raise CorruptFile("the file that was written does not read back as planned", path=self.folder / name)

    def _check_renames(self) -> None:
        """Raise NotWritable where neither folders nor files can be renamed, so that nothing that is written could be published."""
        old, new = self.folder / ".ckpt-old", self.folder / ".ckpt-new"
        with SequentialFile(old) as file:
            file.finish()
        try:
            os.rename(old, new)
        except OSError as error:
            if error.errno in NO_RENAME:
                hint = "write to a local disk, and copy the folder there"
                raise NotWritable("files cannot be renamed on this file system", path=self.target, hint=hint) from None
            raise
        finally:
            for path in (old, new):
                path.unlink(missing_ok=True)

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
            if error.errno in NO_RENAME:
                self._publish_each()
                return
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise OutputExists("the output appeared while it was being written", path=self.target, hint="choose another -o") from error
            raise NotWritable(f"the output cannot be renamed into place: {error.strerror}", path=self.target) from error
        try:
            sync_folder(self.target.parent)
        except OSError as error:
            self.withdraw()
            raise NotWritable(f"the output cannot be synced to disk: {error.strerror}", path=self.target) from error

    def _publish_each(self) -> None:
        """The folder with its name, file by file, as folders cannot be renamed here. Nothing that holds anything is replaced."""
        self._inode = None
        if os.path.isdir(self.target) and os.listdir(self.target):
            hint = "choose another -o, or remove the old output first"
            raise NotWritable("folders cannot be renamed here, so an output cannot be replaced in one step", path=self.target, hint=hint)
        try:
            if not os.path.isdir(self.target):
                self.target.mkdir()
                self._made = self.target
        except FileExistsError as error:
            raise OutputExists("the output appeared while it was being written", path=self.target, hint="choose another -o") from error
        except OSError as error:
            raise NotWritable(f"the output cannot be created: {error.strerror}", path=self.target) from error
        self.publish_into(self.target)
        with contextlib.suppress(OSError):
            sync_folder(self.target.parent)

    def publish_into(self, folder: Path) -> None:
        """Move the files into an existing folder, replacing nothing: all of them, or none."""
        try:
            # The manifest says that the rest is whole, so it comes last.
            for path in sorted(self.folder.iterdir(), key=lambda path: order_of(path.name)):
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
        if self._made is not None:
            remove, self._made = self._made, None
            with contextlib.suppress(OSError):
                remove.rmdir()
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


def order_of(name: str) -> tuple[int, str]:
    """The order in which files appear where they cannot all at once: what makes a folder look whole comes last."""
    return (LAST.index(name) + 2 if name in LAST else int(name.endswith(".index.json"))), name


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
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(old), None, str(new))
