"""Attributes that macOS keeps in a file beside a file, on disks and in archives that have no room for them: ``._NAME`` for ``NAME``."""

from __future__ import annotations

import os

from ckpt_cli.files.descriptors import OPEN_FLAGS

PREFIX = "._"
MAGIC = b"\x00\x05\x16\x07"
"""What an AppleDouble file begins with (RFC 1740)."""


def is_apple_double(path: str) -> bool:
    """Whether a file holds attributes of another, by its name and what it begins with. One that cannot be read may be anything."""
    if not os.path.basename(path).startswith(PREFIX):
        return False
    try:
        fd = os.open(path, OPEN_FLAGS)
    except OSError:
        return False
    try:
        return os.read(fd, len(MAGIC)) == MAGIC
    except OSError:
        return False
    finally:
        os.close(fd)
