"""What `watch` did."""

from __future__ import annotations

from typing import Any, Literal

from ckpt_cli.results.checkpoint import Frozen, NoteInfo
from ckpt_cli.results.written import PushInfo


class WatchEvent(Frozen):
    """One thing that happened to a step; also a line of ``watch.jsonl``.

    ``made``: merged or averaged into ``output`` (``outputs`` if there are several components) from the checkpoint ``source``, which was
    ``saved`` and ``changed`` at these times (newest mtime and ctime of its files, ns); ``steps`` are those of an average, ``options``
    those that decide what is written, as far as they were given (None in journals of older versions), ``warnings`` what was said.
    ``pushed``: the output is in a repository of the Hub, or (``exit_code``) could not be pushed, with the code and text of the error.
    ``ran``: the command for it ended with ``exit_code``, and its last JSON line is ``metrics``. ``failed``: nothing was written, with
    the code and text of the error and what to do (``hint``); or the output is there, but is not what was
    written. ``removed``: ``--keep`` removed the output. ``time`` is in ISO 8601, UTC.
    """

    event: Literal["made", "pushed", "ran", "failed", "removed"]
    time: str
    run: str
    step: int
    output: str
    source: str = ""
    outputs: tuple[str, ...] = ()
    seconds: float = 0.0
    exit_code: int = 0
    saved: int | None = None
    changed: int | None = None
    bytes: int | None = None
    steps: tuple[int, ...] = ()
    options: dict[str, Any] | None = None
    push: PushInfo | None = None
    metrics: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    error: str | None = None
    message: str | None = None
    hint: str | None = None


class WatchOutput(Frozen):
    """The newest output of a run, of this watch or an earlier one; ``made`` is the time, ``is_there`` whether its folders still are.

    ``trouble`` is what is wrong with them by the names and sizes in their manifests, None if nothing is.
    ``source`` is the checkpoint that it can be compared with: None for an average, or if it is gone.
    """

    run: str
    step: int
    output: str
    outputs: tuple[str, ...]
    made: str
    is_there: bool
    trouble: str | None = None
    source: str | None = None


class WatchResult(Frozen):
    """All that a watch did until it ended; ``waiting`` says of each run which steps are not written to their end, and why."""

    runs: tuple[str, ...]
    events: tuple[WatchEvent, ...]
    waiting: dict[str, dict[int, str]]
    newest: tuple[WatchOutput, ...] = ()
    notes: tuple[NoteInfo, ...] = ()

    @property
    def exit_code(self) -> int:
        """That of the worst failure to write or to push; 1 if only commands failed."""
        last = {
            (event.run, event.step, event.event == "pushed"): event for event in self.events if event.event in ("made", "failed", "pushed")
        }
        failed = {key: event.exit_code for key, event in last.items()}
        commands = any(event.exit_code for event in self.events if event.event == "ran")
        return max(failed.values(), default=0) or int(commands)
