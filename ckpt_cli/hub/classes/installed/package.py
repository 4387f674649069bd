"""Which transformers is installed: its version alone does not tell, since that of a checkout stays the same from edit to edit."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache

OFTEN = 60
"""Seconds after which the files are looked at again: a process that watches a run lives for days."""

OF_NO_CLASS = re.compile(
    r"(tokenization|processing|image_processing|feature_extraction|video_processing|convert|trainer|training_args|modular)_.*"
)
"""Modules that say nothing about the tensors of a model."""

FOLDERS_OF_NO_CLASS = frozenset({"__pycache__", "cli", "data", "pipelines"})


def state_of_transformers(path: Sequence[str]) -> str | None:
    """A digest of the sizes and times of the modules that decide what a model of transformers is; nothing is imported.

    ``path`` are the places where packages are looked for. None if the package is in no folder.
    """
    folder = _folder_of("transformers", path)
    return _digest(folder, int(time.monotonic() // OFTEN)) if folder is not None else None


def _folder_of(package: str, path: Sequence[str]) -> str | None:
    """Where a package would be imported from. Checkouts may be found by finders of their own."""
    for finder in sys.meta_path:
        with contextlib.suppress(ImportError, AttributeError, TypeError, ValueError):
            spec = finder.find_spec(package, path)
            if spec is not None:
                return next(iter(spec.submodule_search_locations or ()), None)
    return None


@lru_cache(maxsize=4)
def _digest(folder: str, when: int) -> str | None:
    """The digest of a folder; ``when`` tells one look from a later one."""
    try:
        seen = sorted(_modules(folder))
    except OSError:
        return None
    lines = [f"{os.path.relpath(name, folder)} {size} {changed}" for name, size, changed in seen]
    return hashlib.sha256("\n".join([folder, *lines]).encode("utf-8", "surrogateescape")).hexdigest()[:16] if lines else None


def _modules(folder: str) -> Iterator[tuple[str, int, int]]:
    """The path, the size and the time of every module in a folder and the folders below."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                if OF_NO_CLASS.fullmatch(entry.name) is None:
                    status = entry.stat()
                    yield entry.path, status.st_size, status.st_mtime_ns
            elif entry.name not in FOLDERS_OF_NO_CLASS and entry.is_dir():
                yield from _modules(entry.path)
