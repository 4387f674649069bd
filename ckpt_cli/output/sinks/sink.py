"""One file that is being written: what `ckpt_cli.output.writer` gives its bytes to, whichever way they take."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol

from typing_extensions import Self

from ckpt_cli.output.plan import CopyWork
from ckpt_cli.tensors.parallel import Stop

PAUSE = 0.05
"""Seconds between two looks at whether the others stopped, while a thread waits for its turn."""


class Sink(Protocol):
    """A file that several threads fill. Leaving its context lets go of it; only after `finish` it is whole and durable."""

    def put(self, offset: int, data: memoryview) -> None:
        """Write bytes at a position; they may be reused afterwards."""
        ...

    def copy(self, work: CopyWork) -> int:
        """How many bytes of a range the system copied by itself; the caller puts the rest."""
        ...

    def finish(self) -> None:
        """All bytes were put."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class Output(Protocol):
    """Where an output is built until it is published. Leaving its context removes what was not, or keeps what is finished."""

    target: Path
    folder: Path
    in_order: bool
    """Whether its files are filled front to back."""
    kept: Path | None
    """Where finished files wait for the next run, once the context was left with an error after which they are of use."""

    def create(self, name: str, size: int, stop: Stop | None = None) -> AbstractContextManager[Sink]:
        """A new file of ``size`` bytes; ``stop`` tells threads which wait in it that the others stopped."""
        ...

    def check(self, name: str, size: int, header: bytes) -> None:
        """Raise CorruptFile if a file does not read back with this size and beginning, where it can be read before it is published."""
        ...

    @property
    def resumable(self) -> bool:
        """Whether receipts of finished files are of use: another run may go on with them."""
        ...

    def receipt(self, name: str) -> bytes | None:
        """What was noted of a file when an earlier run finished it, if it did."""
        ...

    def note(self, name: str, receipt: bytes) -> None:
        """Note that a file is finished."""
        ...

    def forget(self, name: str) -> None:
        """A file that was finished is to be written again."""
        ...

    def sync(self) -> None:
        """All files are there."""
        ...

    def publish(self, *, replace: bool) -> None:
        """Give the output its name. ``replace``: in place of what stands there. Raises OutputError."""
        ...

    def publish_into(self, folder: Path) -> None:
        """Add the files to a folder, replacing nothing: all of them, or none. Raises OutputError."""
        ...

    def withdraw(self) -> None:
        """Withdraw the publication, for the sake of another that failed."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class BegunAnew:
    """The part of an `Output` of which nothing stays after an error."""

    kept: Path | None = None
    resumable = False

    def receipt(self, name: str) -> bytes | None:
        return None

    def note(self, name: str, receipt: bytes) -> None: ...

    def forget(self, name: str) -> None: ...


class FrontToBack:
    """A sink that takes its bytes in their order only: a thread that is early waits until those before it have put theirs.

    Threads take their work in the order of the file, so that the one whose turn it is never waits for another, and one tile of
    each of them is all that is read ahead.
    """

    def __init__(self, stop: Stop | None = None) -> None:
        self._stop = stop or Stop()
        self._turn = threading.Condition()
        self.position = 0

    def append(self, data: memoryview) -> None:
        """Write bytes behind the others; one thread at a time calls this."""
        raise NotImplementedError

    def put(self, offset: int, data: memoryview) -> None:
        with self._turn:
            while self.position != offset:
                self._turn.wait(PAUSE)
                self._stop.check()
        self.append(data)
        with self._turn:
            self.position += len(data)
            self._turn.notify_all()

    def copy(self, work: CopyWork) -> int:
        return 0
