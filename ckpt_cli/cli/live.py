"""How progress is shown: a bar on a terminal, lines in a log, JSON lines for programs, or nothing. Always on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ckpt_cli.cli.text import duration, size
from ckpt_cli.progress import Progress, Silent

if TYPE_CHECKING:
    from ckpt_cli.cli.session import Session

EVERY = 10.0
"""Seconds between two lines of a log."""


def make_progress(session: Session) -> Progress:
    """The progress display for these options and this terminal."""
    mode = session.progress
    if mode == "auto":
        mode = "off" if session.quiet or session.json else "bar" if sys.stderr.isatty() else "plain"  # type: ignore[assignment]
    if mode == "off":
        return Silent()
    if mode == "json":
        return JsonLines()
    return Plain() if mode == "plain" else Bar(session)


def write_line(text: str) -> None:
    """One line on stderr; if nobody reads it, the work continues."""
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class Bar:
    """One line with bytes, rate and time left; a second one for the file that is being written, if there are several."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._live: Any = None
        self._total: Any = None

    def start(self, total_bytes: int, label: str) -> None:
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Live

        self._live = Live(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%", markup=False),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
            console=self._session.err(),
            transient=True,
        )
        self._total = self._live.add_task(label, total=max(total_bytes, 1))
        self._live.start()

    def advance(self, count: int, label: str) -> None:
        self._live.update(self._total, advance=count, description=label)

    def finish(self) -> None:
        if self._live is not None:
            self._live.stop()


class _Counting(ABC):
    """Bytes done so far, and when the next line is due."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0
        self._done = 0
        self._label = ""
        self._started = self._due = time.monotonic()

    def start(self, total_bytes: int, label: str) -> None:
        self._total, self._done, self._label = total_bytes, 0, label
        self._started = time.monotonic()
        self._due = self._started + EVERY

    def advance(self, count: int, label: str) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now >= self._due or (label != self._label and now >= self._due - EVERY + 1):
                self._due = now + EVERY
                self.tell(now - self._started)
            self._label = label

    @abstractmethod
    def finish(self) -> None: ...

    @abstractmethod
    def tell(self, elapsed: float) -> None: ...


class Plain(_Counting):
    """A line every ten seconds and for every new output file."""

    def finish(self) -> None:
        """Nothing: the result says that the work is over."""

    def tell(self, elapsed: float) -> None:
        share = 100 * self._done / max(self._total, 1)
        rate = self._done / max(elapsed, 1e-9)
        left = (self._total - self._done) / max(rate, 1.0)
        text = f"{share:3.0f}%  {size(self._done)} of {size(self._total)}  {size(rate)}/s  {duration(left)} left  {self._label}"
        write_line(text)


class JsonLines(_Counting):
    """The same for programs, and a last line when the work ends."""

    def finish(self) -> None:
        self.tell(time.monotonic() - self._started)

    def tell(self, elapsed: float) -> None:
        line = {"event": "progress", "done": self._done, "total": self._total, "seconds": round(elapsed, 3), "file": self._label}
        write_line(json.dumps(line))
