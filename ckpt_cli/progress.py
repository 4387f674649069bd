"""Reporting progress: an interface that the core calls and the command line implements."""

from __future__ import annotations

from typing import Protocol


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


class Silent:
    """Shows nothing."""

    def start(self, total_bytes: int, label: str) -> None:
        pass

    def advance(self, count: int, label: str) -> None:
        pass

    def finish(self) -> None:
        pass
