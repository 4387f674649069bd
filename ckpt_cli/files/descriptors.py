"""Descriptors of open files: how many there may be, and reads at a position on any system."""

from __future__ import annotations

import os
import threading

MOST = 4096
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
    """Half of what the process may open, at most `MOST`; the soft limit is raised to twice that where the hard one allows it."""
    try:
        import resource
    except ImportError:
        return 128
    soft, hard = (MOST * 2 if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    wanted = min(hard, MOST * 2)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            soft = wanted
        except (OSError, ValueError):
            pass
    return max(8, min(soft // 2, MOST))
