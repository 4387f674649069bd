"""No garbage collection while many values are made that all stay: the collector would walk over them again and again."""

from __future__ import annotations

import gc
from types import TracebackType


class Uncollected:
    """Pauses the cyclic garbage collector; references are counted all the same. May be nested."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = gc.isenabled()
        gc.disable()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before:
            gc.enable()
