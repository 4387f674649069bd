"""Pipes and open descriptors given as paths: ``<(command)`` of a shell, ``/dev/stdin``, ``/dev/fd/3``.

A small document may come through one. Weights may not: they are read at any position, and more than once.
"""

from __future__ import annotations

import os
import re
import stat

from ckpt_cli.errors import CorruptFile, Unreadable

DESCRIPTOR = re.compile(r"/dev/(stdin|fd/[0-9]+)|/proc/(self|[0-9]+)/fd/[0-9]+", re.ASCII)
SAVE_FIRST = "write it to a file first, and pass that"

_read: dict[tuple[int, int], bytes] = {}
"""What came through the pipes that this process was started with: a document is asked for more than once, a pipe gives it once."""


def is_descriptor(path: str | os.PathLike[str]) -> bool:
    """Whether a path names an open descriptor, whatever that is.

    >>> is_descriptor("/dev/fd/63"), is_descriptor("/dev/shm/map.json")
    (True, False)
    """
    return DESCRIPTOR.fullmatch(os.fspath(path)) is not None


def piped(path: str | os.PathLike[str], limit: int) -> bytes | None:
    """All that comes through a pipe of a shell, at most ``limit`` bytes; None for anything else.

    Raises Unreadable for a named pipe, whose content is another one each time, and where reading fails, CorruptFile above ``limit``.
    """
    status = _status(path)
    if status is None or not stat.S_ISFIFO(status.st_mode):
        return None
    if not is_descriptor(path):
        raise Unreadable("this is a named pipe, which can be read only once", path=os.fspath(path), hint=SAVE_FIRST)
    key = status.st_dev, status.st_ino
    if key not in _read:
        try:
            with open(path, "rb") as file:
                content = file.read(limit + 1)
        except OSError as error:
            raise Unreadable(f"reading the pipe failed: {error.strerror or error}", path=os.fspath(path)) from error
        if len(content) > limit:
            raise CorruptFile("more comes through this pipe than a document has", path=os.fspath(path), expected=f"at most {limit} bytes")
        _read[key] = content
    return _read[key]


def refuse_pipe(path: str | os.PathLike[str]) -> None:
    """Raise Unreadable for a path of weights that is a pipe, or an open descriptor of anything but a folder."""
    status = _status(path)
    if status is None or stat.S_ISDIR(status.st_mode):
        return
    if stat.S_ISFIFO(status.st_mode):
        raise Unreadable(
            "this is a pipe, and weights are read at any position",
            path=os.fspath(path),
            expected="a folder or a file on a disk",
            hint=SAVE_FIRST,
        )
    if is_descriptor(path):
        raise Unreadable(
            "this is an open descriptor, whose file has no name here",
            path=os.fspath(path),
            expected="a folder or a file by its name",
            hint="pass the path of the file itself",
        )


def _status(path: str | os.PathLike[str]) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):
        return None
