"""One watch a folder of outputs: a lock that says who holds it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from ckpt_cli.errors import NotWritable, Watched

NAME = ".ckpt-watch.lock"


@contextlib.contextmanager
def only_watch(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder while the block runs. It ends with the process, however that ends.

    Raises Watched if another watch holds it, NotWritable if it cannot be taken.
    """
    import fcntl

    path = folder / NAME
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        raise NotWritable(f"the lock of the watch cannot be written: {error.strerror}", path=path) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _said(os.pread(fd, 4096, 0))
            raise Watched(f"another watch writes here{who}", path=folder, hint="let it go on, or choose another -o") from None
        except OSError as error:
            raise NotWritable(f"the folder cannot be locked: {error.strerror}", path=path, hint="choose another disk with -o") from error
        # Who holds it is only told to others: on a full disk the lock is held without that.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        yield
    finally:
        os.close(fd)


def _said(content: bytes) -> str:
    """Who holds a lock, as far as it says so."""
    try:
        said = json.loads(content)
        return f": process {int(said['pid'])} on {said['host']!s}"
    except (ValueError, KeyError, TypeError):
        return ""
