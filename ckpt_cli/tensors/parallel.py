"""Threads that read: the first error of one of them, and a signal that ends the command, stop them all within a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


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
    return [future.result() for future in futures]
