"""Whole paths: what a relative path or one with ``..`` leads to, as the system reads it.

``os.path.abspath`` takes ``link/..`` for the folder that the link lies in, by letters; the system goes to the one above what the link
leads to. Every path is made whole here, so that all commands mean the same by it.
"""

from __future__ import annotations

import os
from pathlib import Path

ABOVE = ".."


def absolute(path: str | os.PathLike[str]) -> str:
    """A path from the root on. Links stay in it, but for those that ``..`` follows. Raises NotFound if the current folder is gone.

    >>> absolute("/data/./run/")
    '/data/run'
    """
    try:
        return os.path.abspath(_resolved(os.fspath(path)))
    except FileNotFoundError as error:
        from ckpt_cli.errors import NotFound

        raise NotFound(
            "the current folder was removed, so a relative path leads nowhere",
            path=path,
            hint="go to a folder that is there, or pass whole paths",
        ) from error


def without_above(text: str) -> str:
    """The same path without ``..``, so that the folders in which it lies can be read from it; as it was given if it has none."""
    return absolute(text) if ABOVE in Path(text).parts else text


def _resolved(text: str) -> str:
    """A path in which all up to the last ``..`` is where the system goes."""
    parts = Path(text).parts if ABOVE in text else ()
    if ABOVE not in parts:
        return text
    last = len(parts) - parts[::-1].index(ABOVE)
    return os.path.join(os.path.realpath(os.path.join(*parts[:last])), *parts[last:])


def within(folder: Path, name: str) -> Path:
    """What a layout names from a folder, ``..`` included: the folder above is the one in which this one was found, linked or not."""
    return Path(os.path.normpath(folder / name))


def current_folder() -> Path | None:
    """Where the process is; None if that was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def from_here(path: str) -> str:
    """A whole path as short as it can be: relative to the current folder where it lies inside of it."""
    here = current_folder()
    relative = os.path.relpath(path, here) if here is not None else ABOVE
    return path if relative.startswith(ABOVE) else relative
