"""Reporting progress: an interface that the core calls and the command line implements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, cast

LONG = 1 << 30
"""Bytes that take longer to write than a sentence to read."""


class Progress(Protocol):
    """Called from the thread that runs the command, except `advance`, which any thread may call."""

    def start(self, total_bytes: int, label: str) -> None:
        """Work on ``total_bytes`` bytes begins."""
        ...

    def advance(self, count: int, label: str) -> None:
        """``count`` more bytes are done, the last of them for the file ``label``."""
        ...

    def finish(self) -> None:
        """The work ended, well or not."""
        ...


class Stages(Protocol):
    """What a display may show besides bytes; one that has only the methods of `Progress` shows nothing of it."""

    def reading(self, done: int, total: int, what: str) -> None:
        """``done`` of ``total`` files (``what``: "rank files", say) were looked at: before any bytes are counted."""
        ...

    def flushing(self) -> None:
        """All bytes are written, and the system brings them to the disk."""
        ...

    def pushing(self, total_bytes: int, repo: str) -> bool:
        """An upload begins, which a library counts. Returns whether it may draw bars of its own on stderr."""
        ...

    def waiting(self, what: str) -> None:
        """What is done that counts no bytes (``what``: "asking transformers for X", say); called several times a second, by any thread."""
        ...

    def warning(self, code: str, text: str) -> None:
        """What should be known before long work begins, to stop it; the result says it again."""
        ...


class Silent:
    """Shows nothing."""

    def reading(self, done: int, total: int, what: str) -> None:
        pass

    def flushing(self) -> None:
        pass

    def pushing(self, total_bytes: int, repo: str) -> bool:
        return False

    def waiting(self, what: str) -> None:
        pass

    def warning(self, code: str, text: str) -> None:
        pass

    def start(self, total_bytes: int, label: str) -> None:
        pass

    def advance(self, count: int, label: str) -> None:
        pass

    def finish(self) -> None:
        pass


def stages(progress: Progress | None) -> Stages:
    """A display as one of stages."""
    return cast("Stages", progress) if all(hasattr(progress, name) for name in ("reading", "flushing", "pushing", "waiting")) else Silent()


_SHOWN: ContextVar[Stages] = ContextVar("shown")


def warn_before(progress: Progress | None, code: str, text: str, nbytes: int) -> None:
    """Show a warning before ``nbytes`` bytes are written, if that takes so long that somebody can stop it; the result says it anyway."""
    warning = getattr(progress, "warning", None)
    if warning is not None and nbytes >= LONG:
        warning(code, text)


@contextmanager
def shown_on(progress: Progress | None) -> Iterator[None]:
    """Within it, `shown` is this display: what is deep in the work and mostly takes no time need not be handed one."""
    token = _SHOWN.set(stages(progress))
    try:
        yield
    finally:
        _SHOWN.reset(token)


def shown() -> Stages:
    """The display of the command that runs in this context."""
    return _SHOWN.get(Silent())
