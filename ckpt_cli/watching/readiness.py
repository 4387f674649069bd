"""Whether a step of a live run is written to its end: a tracker names it, or none of its files changed for a while."""

from __future__ import annotations

import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_cli.discover.found import Found, Target, Tracker
from ckpt_cli.errors import CorruptFile
from ckpt_cli.files.folders import FileState, files_below, status_of
from ckpt_cli.files.manifest import BESIDE, read_manifest

State = tuple[FileState, ...]
"""All files of a step."""

OLD = 7200
"""Seconds. No clocks of a cluster differ by that much."""

AT_ONCE = 5_000_000_000
"""Nanoseconds from the mtime of a tracker to its ctime. A longer time is that of a copy, which reaches files in an order of its own."""


@dataclass(slots=True)
class Readiness:
    """What was seen of the steps of a run, and since when it is so (seconds of the monotonic clock)."""

    settle: float
    _seen: dict[Path, tuple[State, float]] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Why a step waits."""
        return f"no tracker written after it says that it is finished, so its files must not change for {self.settle:g} s (--settle)"

    def seconds_left(self, target: Target, found: Found) -> float:
        """How long a step must stay as it is until it counts as written; 0 if it does now.

        Trainers write trackers last, so an older step is written to its end too, if no file of it is newer than a tracker that is a
        file. Without one, files must not have changed for ``settle`` seconds, as long as they were watched: their
        times are those of another clock, and are only believed if they are hours old. A copy may keep the mtimes of days ago
        (``cp -p``, ``rsync -a``); the ctime tells when it was made. Raises Unreadable for a step that cannot be listed.
        """
        state, now = tuple(files_below(found.path)), time.monotonic()
        before, since = self._seen.get(found.path, (None, now))
        if state != before:
            since = now
            self._seen[found.path] = (state, now)
        newest = max((max(file.changed, file.ctime or 0) for file in state), default=0)
        if any(_covers(tracker, target, found, newest) for tracker in target.trackers):
            return 0.0
        is_old = time.time() - newest / 1e9 > max(OLD, self.settle)
        return 0.0 if is_old else max(0.0, self.settle - (now - since))


def _covers(tracker: Tracker, target: Target, found: Found, newest: int) -> bool:
    """Whether a tracker says that a step whose newest file was written at this time (ns) was written to its end."""
    status = None if target.run is None else status_of(target.run / tracker.name)
    written = status.st_mtime_ns if status is not None and stat.S_ISREG(status.st_mode) else None
    if tracker.said or (status is not None and written is not None and status.st_ctime_ns - written > AT_ONCE):
        return False
    if found.step is None or target.run is None or tracker.step <= found.step:
        return tracker.step == found.step
    return written is not None and newest < written


def saved_at(found: Found) -> tuple[int, int]:
    """When the last file of a step was written: the newest mtime and the newest ctime in ns, of all files in its folder."""
    files = tuple(files_below(found.path))
    return max((file.changed for file in files), default=0), max((file.ctime or 0 for file in files), default=0)


def sources_of(output: Path) -> tuple[FileState, ...]:
    """The files that an output was read from, as they were then; none if it is gone, or its manifest does not say them."""
    try:
        made = read_manifest(output)
        listed = [*made.facts["sources"], *made.facts.get(BESIDE, ())] if made is not None else ()
        return tuple(FileState(Path(one["path"]), int(one["size"]), int(one["mtime_ns"]), one.get("ctime_ns")) for one in listed)
    except (CorruptFile, TypeError, KeyError, ValueError, AttributeError):
        return ()


def is_other(file: FileState) -> bool:
    """Whether it was written again, or another file has its place; one that was removed says nothing.

    Times alone tell: of a compressed file, manifests of older versions have the size of what is in it. They have no ctime either, which
    is what notices a file that got the mtime of the one before (``cp -p``, ``rsync -t``).
    """
    status = status_of(file.path)
    return status is not None and (status.st_mtime_ns != file.changed or file.ctime not in (None, status.st_ctime_ns))


def is_saved_again(found: Found, saved: int, changed: int | None, *, in_full: bool) -> bool:
    """Whether a step was written to after it was ``saved`` (mtime) and ``changed`` (ctime; None in journals of older versions).

    ``in_full`` looks at all files, otherwise only at its first weights file.
    """
    if in_full:
        now = saved_at(found)
        return now[0] > saved or (changed is not None and now[1] > changed)
    files = found.places[0].match.files
    status = status_of(files[0]) if files else None
    return status is not None and status.st_mtime_ns > saved
