"""Every file below a path, whatever it is called, and the Python files that a model folder would have run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders, is_file, is_folder
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.custom_code import custom_code

MAX_CONFIG = 16 << 20


def files_below(path: Path, missed: Callable[[Path, str], None]) -> Iterator[list[Path]]:
    """The files of each folder below a path, also those behind links; links to folders are not followed, so that nothing is endless.

    ``missed`` is told what cannot be accessed, and why.
    """
    pending = [path]
    while pending:
        folder = pending.pop()
        found: list[Path] = []
        folders: list[Path] = []
        try:
            entries = Folders(everything=True).entries(folder)
        except CkptError as error:
            missed(folder, error.message)
            continue
        for entry in entries:
            try:
                if is_file(entry):
                    found.append(entry)
                elif is_folder(entry) and not entry.is_symlink():
                    folders.append(entry)
            except CkptError as error:
                missed(entry, error.message)
        yield found
        pending += folders[::-1]


def remote_code(files: list[Path]) -> list[Path]:
    """The Python files in a folder that its configs name (``auto_map``), and what these import."""
    modules = {file.stem: file for file in files if file.suffix == ".py"}
    if not modules:
        return []
    configs = [config for file in files if file.suffix == ".json" and (config := _config(file)) is not None]
    try:
        return sorted(custom_code(modules, configs, files[0].parent).values())
    except CkptError:
        return sorted(modules.values())


def _config(path: Path) -> Any:
    """A JSON file, None if it is none."""
    try:
        return json.loads(read_small(path, MAX_CONFIG))
    except (CkptError, ValueError, RecursionError):
        return None
