"""A file on its way to an object store: all of its bytes are there before it gets its name, and it has none before `Upload.complete`.

A writer of obstore tells of its parts only when bytes are added: then it waits until fewer than ``max_concurrency`` are under way. Closing
it while a part is under way that fails would leave the upload behind, and nobody could give it up any more. Therefore that number
is 1: parts are handed over several at a time, and all of these are sent at once; the next ones are collected meanwhile, and adding
nothing at all waits for the last. A whole number of parts fills the file but for some bytes, fewer than it has parts, so that all that
is left to do is the completion, which obstore gives up by itself if it fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self

from ckpt_cli.errors import CkptError, NotFound, NotWritable
from ckpt_cli.files.remote.store import Store
from ckpt_cli.output.sinks.sink import FrontToBack
from ckpt_cli.tensors.parallel import Stop

Answer = TypeVar("Answer")

PART = 8 << 20
"""Bytes of a part, nearly twice as many in files of less than two; stores want 5 MiB at least."""

MOST_PARTS = 9_990
"""S3 takes 10,000 parts of a file; larger files have larger parts."""

BATCH = 32 << 20
"""Bytes that are handed over at once: so many of a file are under way, and as many are collected."""

SMALL = 256 << 10
"""Bytes of a file that is kept until it is completed, which then takes one request."""


RUN = "ckptrun"
"""The name under which the store keeps beside a file which run wrote it; on Azure such names are of letters and digits."""


class Upload(FrontToBack):
    """A file of ``size`` bytes; ``run`` is noted beside it. Leaving its context before `finish` gives it up."""

    def __init__(self, store: Store, key: str, size: int, stop: Stop | None = None, *, run: str = "") -> None:
        super().__init__(stop)
        import obstore

        self._store, self._key, self.size = store, key, size
        part = size // max(1, min(size // PART, MOST_PARTS))
        self._in_parts = size > SMALL
        self._at_once = part * max(1, round(BATCH / part)) if self._in_parts else SMALL
        self._rest = size % part if self._in_parts else 0
        self._batch, self._filled, self._sent = memoryview(b""), 0, 0
        self._finished = self._ended = self.is_completed = False
        buffer, attributes = part if self._in_parts else SMALL + 1, {RUN: run} if run else None
        self._writer: Any = obstore.open_writer(store.raw, key, buffer_size=buffer, max_concurrency=1, attributes=attributes)

    def append(self, data: memoryview) -> None:
        while data:
            if self._filled == len(self._batch):
                self._hand_over()
                self._batch = memoryview(bytearray(min(self._at_once, self.size - self._sent)))
            count = min(len(data), len(self._batch) - self._filled)
            self._batch[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]

    def _hand_over(self) -> None:
        """Give what was collected to the store, as soon as all before is there. It is not copied, so that it must not change any more."""
        batch, self._batch, self._sent, self._filled = self._batch[: self._filled], memoryview(b""), self._sent + self._filled, 0
        self._tried(lambda: self._writer.write(batch), "writing failed")

    def finish(self) -> None:
        if self._filled:
            self._hand_over()
        self._tried(lambda: self._writer.write(b""), "writing failed")
        self._finished = True

    def complete(self) -> None:
        """Give the file its name, in place of another that has it. Raises NotWritable; then nothing of it is left, or it has its name."""
        self._ended = True
        try:
            self._tried(self._writer.close, "the file cannot be completed")
            self.is_completed = True
        except NotWritable as error:
            if self._rest:
                error.hint = f"{error.hint}; an unfinished upload of it may stay in the store"
            raise

    def abort(self) -> None:
        """Give it up, unless it was completed: what was sent is removed. It is not known to be if the store does not answer."""
        if self._ended:
            return
        self._ended = True
        with contextlib.suppress(Exception):
            self._writer.__exit__(NotWritable, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._finished:
            self.abort()

    def _tried(self, work: Callable[[], Answer], what: str) -> Answer:
        return tried(self._store, self._key, work, what)


def tried(store: Store, key: str, work: Callable[[], Answer], what: str) -> Answer:
    """What ``work`` returns. Raises NotWritable for whatever a store does not do; ``what`` says what was tried: "writing failed"."""
    try:
        return work()
    except CkptError as error:
        raise not_written(error) from None
    except Exception as error:  # noqa: BLE001 - its errors have no common base
        raise not_written(store.failed(error, key, what), what) from None


def not_written(error: CkptError, what: str | None = None) -> NotWritable:
    """An error of reading a store as one of writing to it."""
    if isinstance(error, NotFound) and what is not None and error.message == "no such file":
        return NotWritable(f"{what}: the store has ended the upload", path=error.path, hint="run the command again")
    hint = "the credentials must allow to write, list and delete there" if "access was denied" in error.message else error.hint
    return NotWritable(error.message, path=error.path, hint=hint or "run the command again")
