"""Looking at folders and files by their names: what is there, and what cannot be told."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path, PureWindowsPath

from ckpt_cli.files.source import ABSENT, unreadable


def stays_inside(name: object) -> bool:
    """Whether a path that a file names stays in that file's folder.

    The rule is that of huggingface_hub (serialization/_torch.py): parsed as a Windows path on every system, so that no
    drive, root or ".." gets through.
    """
    if not isinstance(name, str) or not 0 < len(name) <= 1024 or "\0" in name:
        return False
    parsed = PureWindowsPath(name)
    return not (parsed.drive or parsed.root or ".." in parsed.parts)


def entries_in(folder: Path) -> list[Path]:
    """Everything in a folder, sorted by name; nothing if there is no such folder. Raises Unreadable if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return sorted(folder / entry.name for entry in entries)
    except ABSENT:
        return []
    except OSError as error:
        raise unreadable(error, folder, "the folder cannot be listed") from error


def files_in(folder: Path, wanted: Callable[[str], object] | None = None) -> list[Path]:
    """The regular files (also behind links) in a folder, sorted by name. Links that lead nowhere are passed over.

    ``wanted`` says of a name whether it matters; nothing else is looked at. Raises Unreadable.
    """
    return [path for path in entries_in(folder) if (wanted is None or wanted(path.name)) and is_file(path)]


def folders_in(folder: Path, wanted: Callable[[str], object] | None = None) -> list[Path]:
    """The folders (also behind links) in a folder, sorted by name; ``wanted`` as for `files_in`. Raises Unreadable."""
    return [path for path in entries_in(folder) if (wanted is None or wanted(path.name)) and is_folder(path)]


def status_of(path: str | os.PathLike[str]) -> os.stat_result | None:
    """What stands at a path, also behind links; None where there is nothing. Raises Unreadable if that cannot be told."""
    try:
        return os.stat(path)
    except ABSENT:
        return None
    except ValueError:
        return None  # no file has a name with NUL in it
    except OSError as error:
        raise unreadable(error, path, "it cannot be looked at") from error


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether there is anything at a path. Raises Unreadable."""
    return status_of(path) is not None


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a regular file. Raises Unreadable."""
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder. Raises Unreadable."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)
