"""What a command costs: seconds until it ends and until its output is on the disk, processor seconds, peak memory.

Nothing but the standard library is imported here: a process starts with the peak memory of the one that started it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

CKPT = ("-m", "ckpt_cli")
UNSYNCED = ("-c", "import os; os.fsync = lambda file: None; from ckpt_cli.cli import main; main()")
"""`ckpt` without the syncs that make its output durable: what its other work costs."""


@dataclass(frozen=True)
class Cost:
    """Of one command: wall seconds until it ended, ``durable`` until its output was on the disk too; ``peak`` resident bytes."""

    seconds: float
    durable: float
    cpu: float
    peak: int


def ckpt(*arguments: object, synced: bool = True) -> list[str]:
    """The command line of a ckpt that says nothing while it works."""
    return [sys.executable, *(CKPT if synced else UNSYNCED), *map(str, arguments), "--progress", "off"]


def timed(command: Sequence[str], output: Path | None = None, *, allowed: Sequence[int] = (0,)) -> Cost:
    """Run a command, begun when the disk is quiet; ``output`` is the folder whose files are to be on the disk in the end."""
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    complaint = process.stderr.read() if process.stderr else ""
    _, status, usage = os.wait4(process.pid, 0)
    ended = time.perf_counter()
    if os.waitstatus_to_exitcode(status) not in allowed:
        raise SystemExit(f"failed: {' '.join(command)}\n{complaint[-2000:]}")
    for path in sorted(output.rglob("*")) if output else ():
        on_disk(path)
    return Cost(ended - started, time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def on_disk(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def forget(files: Sequence[Path]) -> None:
    """Drop files from the page cache."""
    if not hasattr(os, "posix_fadvise"):
        raise SystemExit("a cold cache needs posix_fadvise")
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def in_turn(pairs: int, runs: Mapping[str, Callable[[], Cost]]) -> dict[str, list[Cost]]:
    """Costs of what is compared, run right after each other and in alternating order, so that a noisy machine hits all alike."""
    found: dict[str, list[Cost]] = {name: [] for name in runs}
    for pair in range(pairs):
        for name in list(runs)[:: -1 if pair % 2 else 1]:
            found[name].append(runs[name]())
    return found


def median(costs: Sequence[Cost]) -> dict[str, float]:
    """Medians, and the highest peak."""
    columns = {key: [asdict(cost)[key] for cost in costs] for key in ("seconds", "durable", "cpu", "peak")}
    return {key: max(values) if key == "peak" else round(statistics.median(values), 3) for key, values in columns.items()}


def ratio(ours: Sequence[Cost], theirs: Sequence[Cost], key: str) -> float:
    """The median over pairs of how many times as long they take."""
    return round(statistics.median(getattr(b, key) / getattr(a, key) for a, b in zip(ours, theirs, strict=True)), 3)
