"""When the files of one save were written: if hours apart, they may be from different steps."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_cli.files.source import Source
from ckpt_cli.tensors.component import Note

MAX_HOURS = 1
"""No save takes as long."""


def age_notes(sources: Sequence[Source]) -> list[Note]:
    """Shards do not record their step; files written hours apart are often the only sign of mixed steps."""
    times = sorted((source.identity.mtime_ns, source.path) for source in sources)
    hours = (times[-1][0] - times[0][0]) / 3.6e12
    if hours < MAX_HOURS:
        return []
    oldest, newest = (path.rsplit("/", 1)[-1] for path in (times[0][1], times[-1][1]))
    text = f"{oldest} is {hours:.0f} hours older than {newest}: if they are from different steps, the result mixes them"
    return [Note("warning", "written-apart", text)]
