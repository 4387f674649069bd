"""A folder that appears complete or not at all: built in a hidden folder beside its target, then renamed.

That folder is locked while its process lives (`ckpt_cli.output.interrupted.place`), so a later run recognises what a killed one left, and
goes on with it if it has the same plan. Until the context ends, a publication can be withdrawn (`Staging.withdraw`), so that either all
of several outputs appear or none. Where folders cannot be renamed (mounts of object stores) the files move one by one, and last those
without which nothing takes the folder for a model.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import shutil
import stat
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from ckpt_cli import shell
from ckpt_cli.errors import CkptError, CorruptFile, NoMemory, NoSpace, NotWritable, OutputExists, Unreadable
from ckpt_cli.files import manifest
from ckpt_cli.files.source import Files
from ckpt_cli.names import Write
from ckpt_cli.output.interrupted.emptied import clear, keep_only, remove
from ckpt_cli.output.interrupted.place import ASIDE, HOLDER, MARK, RECEIPTS, Place, half_published, remove_leftovers, take, temporary_name
from ckpt_cli.output.sinks.files import PositionedFile, SequentialFile, takes_positions
from ckpt_cli.output.sinks.sink import Sink
from ckpt_cli.output.writer import output_errors, write_bytes
from ckpt_cli.tensors.parallel import Stop

NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EINVAL}
"""Errors of ``link`` on file systems without hard links."""

NO_RENAME = {errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM}
"""Errors of ``rename`` where folders (or files) cannot be renamed at all."""

LAST = ("config.json", manifest.NAME)
"""Without these nothing takes a folder for a model, and without the manifest ckpt not for a whole output; indices come before them."""

AT_FDCWD, RENAME_NOREPLACE, RENAME_EXCHANGE = -100, 1, 2


class Staging:
    """The hidden folder of one output. Use it as a context manager: without `publish` it is removed again.

    ``key`` names what is written, so that a run which finds files of the same key that an earlier one finished can keep them
    (`receipt`). With it, what is finished also stays after an error which the same command may not meet again; `kept` says where.
    """

    def __init__(self, target: Path, write: Write = "auto", key: str | None = None) -> None:
        self.target = target
        self.in_order = write == "sequential"
        self.kept: Path | None = None
        self._probes = write == "auto"
        self._made: Path | None = None
        self.folder = target
        self._key = key
        self._place: Place | None = None
        # Where an old folder waits if two cannot be exchanged. Not a name of temporary folders: should the run be killed right then, the
        # old output stays there until another has its place.
        self._aside = target.with_name(temporary_name(target).name.replace(MARK, ASIDE))
        self._inode: tuple[int, int] | None = None
        self._moved: list[tuple[Path, tuple[int, int]]] = []
        self._folders: list[Path] = []

    @classmethod
    def of(cls, folder: Path, target: Path) -> Staging:
        """A folder that is already there, to be published; it stays if that fails."""
        staging = cls(target)
        remove_leftovers(target)
        staging.folder = folder
        return staging

    def __enter__(self) -> Self:
        if self.folder != self.target:
            return self
        try:
            self._begin()
        except OSError as error:
            self._end()
            hint = "choose another place with -o"
            raise NotWritable(f"the output folder cannot be created: {error.strerror}", path=self.target, hint=hint) from error
        except NotWritable:
            if self._place is not None:
                self._place.release()  # what is finished there may be of use
            raise
        try:
            with output_errors(self.target):
                if self._probes:
                    self.in_order = not takes_positions(self.folder)
                if self.in_order:
                    self._check_renames()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _begin(self) -> None:
        """Take the place, and remove what was left in it but finished files of the same key."""
        self._place = take(self.target)
        root = self._place.root
        remove_leftovers(self.target, keep=root)
        for path in half_published(self.target):
            path.unlink()
            if path.parent != self.target:
                with contextlib.suppress(OSError):
                    path.parent.rmdir()
        if not self._place.lasting:
            self._key = None
        self.folder = root / (self._key or "output")
        finished = {path.name for path in self._receipts.iterdir()} if self._receipts is not None and self._receipts.is_dir() else set()
        for path in root.iterdir():
            if path.name != HOLDER and not (finished and path in (self.folder, self._receipts)):
                clear(path, root)
        keep_only(self.folder, finished, self._receipts, root)
        if self._receipts is not None:
            self._receipts.mkdir(exist_ok=True)

    def _end(self) -> None:
        """Remove everything that has no name of its own, and let go of the place."""
        with contextlib.suppress(OSError):
            # Only once something has its place: until then it is all that is left of the old output.
            if self._inode is not None and _inode(self.target) == self._inode:
                for folder in self.target.parent.glob(f".{glob.escape(self.target.name)}{ASIDE}*"):
                    shutil.rmtree(folder, ignore_errors=True)
        if self._place is not None:
            if self._place.is_held:
                shutil.rmtree(self._place.root, ignore_errors=True)
            self._place.release()

    @property
    def _receipts(self) -> Path | None:
        """The folder of the receipts; None if this output is not written for a run that goes on."""
        return self._place.root / f"{self._key}{RECEIPTS}" if self._place is not None and self._key is not None else None

    @property
    def resumable(self) -> bool:
        """Whether receipts of finished files are of use."""
        return self._receipts is not None

    def receipt(self, name: str) -> bytes | None:
        """What was noted of a file when it was finished, if it was."""
        if self._receipts is None:
            return None
        try:
            receipt = (self._receipts / name).read_bytes()
            if stat.S_ISREG(os.lstat(self.folder / name).st_mode):
                return receipt
        except OSError:
            pass
        self.forget(name)
        return None

    def note(self, name: str, receipt: bytes) -> None:
        """Note that a file is finished."""
        if self._receipts is not None:
            try:
                write_bytes(self._receipts / name, receipt)
            except BaseException:
                # Half a receipt must not pass for a file that the next run can keep.
                with contextlib.suppress(OSError):
                    (self._receipts / name).unlink()
                raise

    def forget(self, name: str) -> None:
        """Remove a file that was finished, to be written again."""
        if self._receipts is not None:
            for path in (self._receipts / name, self.folder / name):
                if os.path.lexists(path):
                    remove(path)

    def create(self, name: str, size: int, stop: Stop | None = None) -> AbstractContextManager[Sink]:
        """A new file; its mode follows the umask."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._receipts is not None and _may_pass(error) and self.folder.is_dir() and any(self._receipts.iterdir()):
            self.kept = self._place.root if self._place is not None else None
            if self._place is not None:
                self._place.release()
            return
        self._end()

    def sync(self) -> None:
        """Make the names inside durable; files sync themselves when they are written."""
        for folder in {self.folder, *(path for path in self.folder.rglob("*") if path.is_dir() and not path.is_symlink())}:
            sync_folder(folder)

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
            names = {path.relative_to(self.folder).as_posix(): path for path in files_beneath(self.folder)}
            for name in sorted(names, key=order_of):
                self._make(folder, (folder / name).parent)
                self._move(names[name], folder / name)
            for each in (*self._folders, folder):
                sync_folder(each)
        except BaseException as error:
            self.withdraw()
            if not isinstance(error, OSError):
                raise
            if error.errno == errno.EEXIST:
                raise OutputExists("a file of this name already exists", path=error.filename2 or error.filename or folder) from error
            raise NotWritable(f"the files cannot be moved into place: {error.strerror}", path=folder) from error

    def _make(self, folder: Path, inner: Path) -> None:
        """Make a folder inside of that of the output, with those around it that are not there."""
        for path in reversed([each for each in (inner, *inner.parents) if each.is_relative_to(folder) and not each.is_dir()]):
            self._folders.append(path)
            path.mkdir()

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
        while self._folders:
            with contextlib.suppress(OSError):
                self._folders.pop().rmdir()
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
            try:
                os.rename(self._aside, self.target)
            except OSError as error:
                message = f"neither the new output nor the old one could be renamed into place: {error.strerror}"
                hint = f"the old one is whole: mv {' '.join(map(shell.path, (self._aside, self.target)))}"
                raise NotWritable(message, path=self.target, hint=hint) from error
            raise


def _may_pass(error: BaseException | None) -> bool:
    """Whether the same command may get further another time: after a signal, or an error of the machine rather than of what it read."""
    if isinstance(error, CkptError):
        return isinstance(error, (NoSpace, NotWritable, NoMemory, Unreadable))
    return error is not None


def files_beneath(folder: Path) -> list[Path]:
    """The files of an output, also those in folders of it."""
    return [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]


def order_of(name: str) -> tuple[int, str]:
    """The order in which files appear where they cannot all at once: what makes a folder look whole comes last."""
    return (LAST.index(name) + 2 if name in LAST else int(name.endswith(".index.json"))), name


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
