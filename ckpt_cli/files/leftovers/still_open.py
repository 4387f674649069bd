"""Files that were deleted while a process had them open: network file systems keep them under a name of their own until it lets go.

NFS calls them ``.nfs`` and a number, FUSE ``.fuse_hidden`` and one. Until then neither they nor the folder around them can be removed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

NAME = re.compile(r"\.nfs[0-9a-f]{16,}|\.fuse_hidden[0-9a-f]{16,}", re.ASCII | re.IGNORECASE)


def is_still_open(name: str) -> bool:
    """Whether a file has the name of one that was deleted.

    >>> is_still_open(".nfs00000000018a3f4200000007"), is_still_open(".nfs"), is_still_open("model.nfs")
    (True, False, False)
    """
    return NAME.fullmatch(name) is not None


def held_below(folder: Path) -> list[Path]:
    """The files below a folder that were deleted and are still open."""
    return [Path(above, name) for above, _, names in os.walk(folder) for name in sorted(names) if is_still_open(name)]


def who_has(path: Path) -> list[str]:
    """The processes of this machine that have a file open, as far as the system tells this user."""
    try:
        wanted = os.stat(path, follow_symlinks=False)
        numbers = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
    except OSError:
        return []
    return [f"process {number}{_called(number)}" for number in numbers if _has_open(number, wanted)]


def _has_open(number: int, wanted: os.stat_result) -> bool:
    try:
        opened = os.listdir(f"/proc/{number}/fd")
    except OSError:
        return False  # of another user, or ended
    for each in opened:
        try:
            if os.path.samestat(os.stat(f"/proc/{number}/fd/{each}"), wanted):
                return True
        except OSError:
            continue
    return _has_mapped(number, wanted)


def _has_mapped(number: int, wanted: os.stat_result) -> bool:
    """Whether a process has a file mapped, as safetensors does with the descriptor closed; the inode in the list tells."""
    try:
        with open(f"/proc/{number}/maps", encoding="utf-8", errors="replace") as lines:
            return any(parts[4] == str(wanted.st_ino) and is_still_open(os.path.basename(parts[-1].split(" (deleted)")[0].strip()))
                       for parts in (line.split(None, 5) for line in lines) if len(parts) == 6)  # fmt: skip
    except OSError:
        return False


def _called(number: int) -> str:
    try:
        with open(f"/proc/{number}/comm", encoding="utf-8", errors="replace") as file:
            return f" ({file.read(64).strip()})"
    except OSError:
        return ""
