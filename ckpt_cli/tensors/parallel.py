"""Threads that read: the first error of one of them, and a signal that ends the command, stop them all within a block."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from ckpt_cli.files.source import Source
from ckpt_cli.progress import Progress, Silent
from ckpt_cli.tensors.reading import expect_reads, reads_of
from ckpt_cli.tensors.tensor import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")
Advance = Callable[[int, str], None]
"""Tells how many more bytes are done, and of what. Raises Stopped where the work should end, so it is called after every block."""


class Stopped(Exception):
    """Raised in a thread that was told to stop; never seen outside of its pool."""


class Stop:
    """Whether to stop: set by the thread that runs the command, asked by workers after every block."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Raise Stopped where the work should end."""
        if self._event.is_set():
            raise Stopped


def in_threads(work: Callable[[Item], Result], items: Iterable[Item], count: int, stop: Stop) -> list[Result]:
    """The results of ``work`` for all items in their order, from ``count`` threads.

    If one fails, or the calling thread is interrupted, ``stop`` is set, what has not begun never begins, and the error is raised as
    soon as the others have noticed: ``work`` asks ``stop`` after every block.
    """

    def guarded(item: Item) -> Result:
        stop.check()
        try:
            return work(item)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(count, thread_name_prefix="ckpt") as pool:
        futures: list[Future[Result]] = []
        whole = False
        try:
            futures.extend(pool.submit(guarded, item) for item in items)
            whole = all(future.exception() is None for future in wait(futures, return_when=FIRST_EXCEPTION).done)
        finally:
            if not whole:
                stop.set()
                for future in futures:
                    future.cancel()
    errors = [future.exception() for future in futures if not future.cancelled()]
    for error in errors:
        if error is not None and not isinstance(error, Stopped):
            raise error
    stop.check()  # others who share it may have stopped this
    return [future.result() for future in futures]


def default_jobs() -> int:
    """Two workers keep a disk busy; more than eight never helped in measurements on one."""
    return max(2, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2))


def workers_for(sources: Iterable[Source], jobs: int | None) -> int:
    """Threads that read sources: one where any can only be read forward."""
    return 1 if any(source.forward_only for source in sources) else jobs or default_jobs()


def sources_of(tensors: Iterable[Tensor]) -> Iterable[Source]:
    """What tensors are read from, perhaps more than once."""
    return (piece.source for tensor in tensors for piece in tensor.pieces)


def with_progress(
    work: Callable[[Item, Advance], Result],
    items: Iterable[Item],
    tensors: Iterable[Tensor],
    *,
    jobs: int | None,
    progress: Progress | None,
    total: int,
    label: str,
) -> list[Result]:
    """`in_threads` for ``items`` that are read from ``tensors``, ``total`` bytes of them, with a display that begins as ``label``."""
    shown, stop = progress or Silent(), Stop()

    def advance(count: int, label: str) -> None:
        stop.check()
        shown.advance(count, label)

    tensors = list(tensors)
    workers = workers_for(sources_of(tensors), jobs)
    expect_reads(reads_of(tensors))
    shown.start(total, label)
    try:
        return in_threads(lambda item: work(item, advance), items, workers, stop)
    finally:
        shown.finish()
