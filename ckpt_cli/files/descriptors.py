"""Descriptors of open files: how many there may be, and reads at a position on any system."""

from __future__ import annotations

import os
import threading

SEEKING = threading.Lock()
"""Where the system has no positioned reads (Windows), one thread at a time seeks and reads."""


def pread(fd: int, buffer: memoryview, offset: int) -> int:
    """Read at a position into ``buffer``; returns how many bytes there were."""
    if hasattr(os, "pread"):
        data = os.pread(fd, len(buffer), offset)
    else:
        with SEEKING:
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def descriptor_budget() -> int:
    """Half of what the process may open, at most 4096; the soft limit is raised to the hard one where that is allowed."""
    try:
        import resource
    except ImportError:
        return 128
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass
    return max(8, min(soft // 2, 4096))
