"""The hidden folder beside an output in which it is built: one process at a time has it, and what a killed one left is found there.

It has the same name in every run, and is locked while its process lives; so a second run for the same output is told at its start who has
it. Where there are no locks every run has a folder of its own, and nothing is ever taken for a left-over.
"""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.errors import OutputInUse
from ckpt_cli.files import manifest
from ckpt_cli.files.leftovers.still_open import is_still_open

MARK = ".ckpt-tmp-"
ASIDE = ".ckpt-old-"
"""What stands in the name of an old output that waits for the new one, where two folders cannot be exchanged."""

STAGING = "staging"
HOLDER = "holder"
RECEIPTS = ".receipts"
TRIES, PAUSE = 10, 0.02
"""How often, and after how many seconds, a lock is tried again: others hold it for a moment when they only look."""


@dataclass(slots=True)
class Place:
    """The folder, and the descriptor that locks it (-1 where there are no locks); ``lasting``: the next run will find it."""

    root: Path
    lock: int
    lasting: bool

    @property
    def is_held(self) -> bool:
        """Whether the folder of this name is still the one that was taken: somebody may have removed it, and another run made it anew."""
        with contextlib.suppress(OSError):
            return self.lock < 0 or _is(self.root, self.lock)
        return False

    def release(self) -> None:
        """Let go of the folder, which stays unless it was removed."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def temporary_name(target: Path) -> Path:
    """A name beside the target that is recognised as temporary."""
    return target.parent / f".{target.name}{MARK}{uuid.uuid4().hex[:12]}"


def place_of(target: Path) -> Path:
    """The name that all runs for a target have in common."""
    return target.parent / f".{target.name}{MARK}{STAGING}"


def take(target: Path) -> Place:
    """Make the folder, or find it, and lock it. Raises OutputInUse if another process has it, and OSError."""
    root = place_of(target)
    for _ in range(TRIES):
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o755)
        try:
            fd = _lock(root)
        except FileNotFoundError:
            continue  # removed by the process that had it
        except BlockingIOError:
            time.sleep(PAUSE)
            continue
        except OSError:
            # No locks here, or a link or a file of this name.
            with contextlib.suppress(OSError):
                root.rmdir()
            break
        if not _is(root, fd):
            os.close(fd)  # removed in between, and made again by another
            continue
        if not _is_ours(os.fstat(fd)):
            os.close(fd)
            break
        _sign(root)
        return Place(root, fd, lasting=True)
    else:
        raise _in_use(target)
    root = temporary_name(target)
    root.mkdir()
    try:
        return Place(root, _lock(root), lasting=False)
    except OSError:
        return Place(root, -1, lasting=False)


def refuse_held(target: Path) -> None:
    """Raise OutputInUse if another process writes this output now."""
    try:
        os.close(_lock(place_of(target), shared=True))
    except BlockingIOError:
        raise _in_use(target) from None
    except OSError:
        pass


def remove_leftovers(target: Path, keep: Path | None = None) -> list[Path]:
    """Remove temporary folders for this target that killed processes left, but ``keep``; those in use are locked and stay."""
    removed = []
    for folder in _leftovers(target):
        if folder != keep:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
                removed.append(folder)
    return removed


def left_over_bytes(target: Path) -> int:
    """Bytes of the disk that a run for this target finds in use by an earlier one that was killed: it keeps or removes them."""
    total = 0
    for folder in _leftovers(target):
        for above, _, names in os.walk(folder):
            for name in names:
                if is_still_open(name):
                    continue  # no run can free it
                with contextlib.suppress(OSError):
                    total += os.stat(os.path.join(above, name), follow_symlinks=False).st_blocks * 512
    return total


def half_published(target: Path) -> list[Path]:
    """Files in an existing folder that a run which was killed gave their names there, before the manifest made them an output."""
    if os.path.lexists(target / manifest.NAME):
        return []
    linked: list[Path] = []
    for folder in place_of(target).glob("*"):
        for staged in folder.rglob("*"):
            path = target / staged.relative_to(folder)
            with contextlib.suppress(OSError):
                if os.path.samestat(os.lstat(staged), os.lstat(path)):
                    linked.append(path)
    return linked


def remove_published(target: Path) -> None:
    """Remove what a run left that was killed once its output was whole, where no later run will have this place.

    Files that have no other name stay: they are of a run that can go on.
    """
    if not os.path.lexists(target / manifest.NAME):
        return
    for folder in _leftovers(target):
        tops = [top for top in folder.glob("*/") if top.suffix != RECEIPTS]
        staged = [(path, target / path.relative_to(top)) for top in tops for path in top.rglob("*") if not path.is_dir()]
        with contextlib.suppress(OSError):
            if all(os.path.samestat(os.lstat(path), os.lstat(named)) for path, named in staged):
                shutil.rmtree(folder)


def _leftovers(target: Path) -> Iterator[Path]:
    """Temporary folders for this target that no process has; each is locked until the next one is asked for."""
    try:
        found = sorted(target.parent.glob(f".{glob.escape(target.name)}{MARK}*"))
    except OSError:
        return
    for folder in found:
        with contextlib.suppress(OSError):
            fd = _lock(folder)
            try:
                yield folder
            finally:
                os.close(fd)


def _lock(folder: Path, *, shared: bool = False) -> int:
    """A descriptor that holds a lock until it is closed. BlockingIOError if another process has one, OSError without locks."""
    import fcntl

    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _is(folder: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _is_ours(status: os.stat_result) -> bool:
    """Whether nobody else can have put anything into a folder."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _sign(root: Path) -> None:
    with contextlib.suppress(OSError):
        (root / HOLDER).write_text(f"{os.getpid()} {platform.node()}")


def _in_use(target: Path) -> OutputInUse:
    who = "another run of ckpt"
    with contextlib.suppress(OSError):
        path = place_of(target) / HOLDER
        with path.open(errors="replace") as file:
            found = re.fullmatch(r"([0-9]{1,10}) (\S{0,255})", file.read(300))
        if found:
            began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
            who = f"process {found[1]}{f' on {found[2]}' if found[2] not in ('', platform.node()) else ''}, since {began},"
    return OutputInUse(f"{who} is writing this output", path=target)
