"""What else the same command was given, and is used for it: of that, nothing may say that it was passed over.

Inputs of an average, a base, or what is compared often lie beside one another, or inside of one another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ckpt_cli.files.source import Files
from ckpt_cli.paths import absolute


def give(files: Files, paths: Iterable[str | os.PathLike[str] | None]) -> None:
    """Note paths that a command was given. Whatever it opens after that knows of them."""
    files.given |= {absolute(path) for path in paths if path is not None}


def is_given_otherwise(path: Path, read: Path, files: Files) -> bool:
    """Whether what lies at a path is used for itself: it was given, or holds what was, or lies in that; ``read`` is what was opened."""
    own, opened = Path(absolute(path)), Path(absolute(read))
    given = [Path(each) for each in files.given]
    return any(each.is_relative_to(own) or (own.is_relative_to(each) and not opened.is_relative_to(each)) for each in given)
