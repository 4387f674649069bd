"""Whether a step of a live run is written to its end: a tracker names it, or none of its files changed for a while."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_cli.discover.found import Found, Target
from ckpt_cli.files.folders import entries_in, status_of

State = tuple[tuple[str, int, int], ...]
"""Of every file of a step: its path, its size in bytes, its mtime in ns."""

DEEP = 6
"""Folders below a step that are looked into; trainers use at most four."""


OLD = 7200
"""Seconds. No clocks of a cluster differ by that much."""


@dataclass(slots=True)
class Readiness:
    """What was seen of the steps of a run, and since when it is so (seconds of the monotonic clock)."""

    settle: float
    _seen: dict[Path, tuple[State, float]] = field(default_factory=dict)

    def seconds_left(self, target: Target, found: Found) -> float:
        """How long a step must stay as it is until it counts as written; 0 if it does now.

        Trainers write trackers last. Without one, files must not have changed for ``settle`` seconds, as long as they were watched: their
        times are those of another clock, and are only believed if they are hours old. Raises Unreadable for a step that cannot be listed.
        """
        state, now = tuple(_files(found.path, DEEP)), time.monotonic()
        before, since = self._seen.get(found.path, (None, now))
        if state != before:
            since = now
            self._seen[found.path] = (state, now)
        if any(tracker.step == found.step and not tracker.said for tracker in target.trackers):
            return 0.0
        newest = max((mtime for _, _, mtime in state), default=0) / 1e9
        is_old = time.time() - newest > max(OLD, self.settle)
        return 0.0 if is_old else max(0.0, self.settle - (now - since))


def saved_at(found: Found) -> int:
    """When the last file of a step was written: the newest mtime in ns, of all files in its folder."""
    return max((mtime for _, _, mtime in _files(found.path, DEEP)), default=0)


def is_saved_again(found: Found, saved: int, *, in_full: bool) -> bool:
    """Whether a step was written to after it was ``saved``. ``in_full`` looks at all files, otherwise only at its first weights file."""
    if in_full:
        return saved_at(found) > saved
    files = found.places[0].match.files
    status = status_of(files[0]) if files else None
    return status is not None and status.st_mtime_ns > saved


def _files(path: Path, depth: int) -> Iterator[tuple[str, int, int]]:
    status = status_of(path)
    if status is None:
        return
    if not stat.S_ISDIR(status.st_mode):
        yield str(path), status.st_size, status.st_mtime_ns
    elif depth:
        for entry in entries_in(path):
            yield from _files(entry, depth - 1)
