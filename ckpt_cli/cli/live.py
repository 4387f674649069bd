"""How progress is shown: a bar on a terminal, lines in a log, JSON lines for programs, or nothing. Always on stderr.

Reading headers comes first, without a number of bytes: where it takes long, the files that were read are counted. So does asking
transformers, in a process that imports it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from ckpt_cli.cli.text import duration, elided, size
from ckpt_cli.progress import Progress, Silent, Stages

if TYPE_CHECKING:
    from ckpt_cli.cli.session import Session

EVERY = 10.0
"""Seconds between two lines of a log."""

SECOND = 1.0
"""Seconds between two events for programs."""

PATIENCE = 0.5
"""Seconds of reading before anything is said about it."""

OFTEN = 0.1
"""Seconds between two looks of a terminal."""

LABEL = 20
"""Columns of the label of a bar, whatever it says."""

NARROW = 72
"""Below this many columns a bar has no rate, and half the label."""

FLUSHING, FLUSHING_SHORT = "flushing to disk", "flushing"


class Display(Progress, Stages, Protocol):
    """A progress display of the command line; its `finish` may be called when nothing was started."""


def make_progress(session: Session) -> Display:
    """The progress display for these options and this terminal."""
    mode = session.progress
    if mode == "auto":
        bar = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        mode = "off" if session.quiet or session.json else "bar" if bar else "plain"  # type: ignore[assignment]
    if mode == "off":
        return Silent()
    if mode == "json":
        return JsonLines()
    return Plain() if mode == "plain" else Bar(session)


def write(text: str) -> None:
    """Text on stderr; if nobody reads it, the work continues."""
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(text)
        sys.stderr.flush()


class Bar:
    """One line: what is worked on, a bar, the bytes, the rate and the time left. It goes away when the work is done."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._live: Any = None
        self._task: Any = None
        self._due = time.monotonic() + PATIENCE
        self._said = False

    def reading(self, done: int, total: int, what: str) -> None:
        if total > 1:
            self.waiting(_read(done, total, what))

    def waiting(self, what: str) -> None:
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self._task, **self._fields(what))
        elif now >= self._due:
            self._due, self._said = now + OFTEN, True
            write(f"\r\x1b[2K{what}")

    def warning(self, code: str, text: str) -> None:
        self.finish()
        self._session.labelled("warning", "yellow", text)

    def start(self, total_bytes: int, label: str) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Live

        self.finish()  # one bar at a time, and none stays
        console = self._session.err()
        wide = console.width >= NARROW
        columns: list[Any] = [
            TextColumn("{task.fields[label]}", markup=False),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            TextColumn("{task.percentage:>3.0f}%", markup=False),
            TextColumn("{task.fields[amount]}", markup=False, style="dim"),
        ]
        self._width = LABEL if wide else LABEL // 2
        self._live = Live(*columns, console=console, transient=True)
        self._total, self._done, self._wide, self._started = total_bytes, 0, wide, time.monotonic()
        self._task = self._live.add_task(label, total=max(total_bytes, 1), **self._fields(label))
        self._live.start()

    def advance(self, count: int, label: str) -> None:
        self._done += count
        self._live.update(self._task, advance=count, **self._fields(label))

    def flushing(self) -> None:
        if self._live is not None:
            self._live.update(self._task, **self._fields(FLUSHING if self._wide else FLUSHING_SHORT))

    def pushing(self, total_bytes: int, repo: str) -> bool:
        self.finish()
        return True

    def finish(self) -> None:
        self._clear()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _clear(self) -> None:
        if self._said:
            write("\r\x1b[2K")
            self._said = False

    def _fields(self, label: str) -> dict[str, str]:
        """The texts beside the bar, each as wide as ever."""
        elapsed = max(time.monotonic() - self._started, 1e-9)
        rate = self._done / elapsed
        amount = f"{size(self._done):>7} of {size(self._total):<7}"
        if self._wide:
            left = duration((self._total - self._done) / rate) if rate else ""
            amount = f"{amount} {size(rate) + '/s':>9} {left:>9}"
        return {"label": elided(label, self._width).ljust(self._width), "amount": amount}


class _Counting:
    """Bytes done so far, and when the next line is due."""

    every = EVERY

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._label = ""
        self._running = False
        self._started = time.monotonic()
        self._due = self._started + PATIENCE
        self._read: tuple[int, int, str] | None = None
        self._told: tuple[int, int, str] | None = None

    def reading(self, done: int, total: int, what: str) -> None:
        if total > 1:
            self._read = done, total, what
            if self._is_due():
                self._tell_read()

    def _tell_read(self) -> None:
        self._told = self._read
        if self._read is not None:
            self.tell_reading(*self._read)

    def _end_reading(self) -> None:
        """Tell how far the reading came that something was told of: a log that ends in its middle looks as if it had stopped."""
        if self._told is not None and self._told != self._read:
            self._tell_read()
        self._read = self._told = None

    def waiting(self, what: str) -> None:
        if self._is_due():
            self.tell_waiting(what)

    def _is_due(self) -> bool:
        now = time.monotonic()
        due = now >= self._due
        if due:
            self._due = now + self.every
        return due

    def start(self, total_bytes: int, label: str) -> None:
        self._end_reading()
        self._total, self._done, self._label, self._running = total_bytes, 0, label, True
        self._started = time.monotonic()
        self._due = self._started + self.every

    def advance(self, count: int, label: str) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now >= self._due or (label != self._label and now >= self._due - self.every + SECOND):
                self._due = now + self.every
                self.tell(now - self._started)
            self._label = label

    def flushing(self) -> None:
        """Nothing, unless a display says otherwise."""

    def pushing(self, total_bytes: int, repo: str) -> bool:
        self.tell_pushing(total_bytes, repo)
        return False

    def finish(self) -> None:
        self._end_reading()
        self._running = False

    def warning(self, code: str, text: str) -> None:
        raise NotImplementedError

    def tell_reading(self, done: int, total: int, what: str) -> None:
        raise NotImplementedError

    def tell_pushing(self, total_bytes: int, repo: str) -> None:
        raise NotImplementedError

    def tell_waiting(self, what: str) -> None:
        raise NotImplementedError

    def tell(self, elapsed: float) -> None:
        raise NotImplementedError


class Plain(_Counting):
    """A line every ten seconds and for every new output file."""

    def flushing(self) -> None:
        if self._running and time.monotonic() - self._started >= EVERY:
            write(f"{FLUSHING}  {self._label}\n")

    def tell_reading(self, done: int, total: int, what: str) -> None:
        self.tell_waiting(_read(done, total, what))

    def tell_waiting(self, what: str) -> None:
        write(f"{what}\n")

    def warning(self, code: str, text: str) -> None:
        write(f"warning: {text}\n")

    def tell_pushing(self, total_bytes: int, repo: str) -> None:
        write(f"pushing {size(total_bytes)} to {repo}\n")

    def tell(self, elapsed: float) -> None:
        share = 100 * self._done / max(self._total, 1)
        rate = self._done / max(elapsed, 1e-9)
        left = (self._total - self._done) / max(rate, 1.0)
        write(f"{share:3.0f}%  {size(self._done)} of {size(self._total)}  {size(rate)}/s  {duration(left)} left  {self._label}\n")


class JsonLines(_Counting):
    """Events for programs: the totals first, one a second, and a summary when the work ends."""

    every = SECOND

    def start(self, total_bytes: int, label: str) -> None:
        super().start(total_bytes, label)
        self._event("start", total=total_bytes, file=label)

    def flushing(self) -> None:
        if self._running:
            self._event("flushing", file=self._label)

    def finish(self) -> None:
        if self._running:
            seconds = time.monotonic() - self._started
            rate = round(self._done / max(seconds, 1e-9))
            self._event("summary", done=self._done, total=self._total, seconds=round(seconds, 3), bytes_per_second=rate)
        super().finish()

    def tell_reading(self, done: int, total: int, what: str) -> None:
        self._event("reading", files=done, total_files=total, what=what)

    def warning(self, code: str, text: str) -> None:
        self._event("warning", code=code, text=text)

    def tell_pushing(self, total_bytes: int, repo: str) -> None:
        self._event("pushing", total=total_bytes, repo=repo)

    def tell_waiting(self, what: str) -> None:
        self._event("waiting", what=what)

    def tell(self, elapsed: float) -> None:
        self._event("progress", done=self._done, total=self._total, seconds=round(elapsed, 3), file=self._label)

    def _event(self, name: str, **values: object) -> None:
        write(json.dumps({"event": name, **values}) + "\n")


def _read(done: int, total: int, what: str) -> str:
    return f"reading {done} of {total} {what}"
