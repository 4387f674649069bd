"""When the files of one save were written: if hours apart, they may be from different steps; and servers that do not tell."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ckpt_cli.errors import Unsupported
from ckpt_cli.files.source import Source, Watched
from ckpt_cli.names import few, span_text
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

MAX_SECONDS = 3600
"""No save takes as long.

Within an hour, times tell nothing. That a save writes its metadata last does not survive copying: without kept times these are in any
order and as far apart as files take to be copied, and uploads to stores are parallel. A file that was put in place of another looks like
the last one that a copy reached. Files of models that are handed on (safetensors with an index) are not asked: a download that
was resumed the day after has such times too, and what shows two exports is in the files (`ckpt_cli.formats.safetensors.two_exports`).
"""

APART = "written-apart"


def age_notes(sources: Sequence[Source]) -> list[Note]:
    """Shards do not record their step; files written hours apart are often the only sign of mixed steps."""
    times = sorted((source.identity.mtime_ns, source.path) for source in sources)
    seconds = (times[-1][0] - times[0][0]) / 1e9 if times else 0
    if seconds < MAX_SECONDS:
        return []
    oldest, newest = (path.rsplit("/", 1)[-1] for path in (times[0][1], times[-1][1]))
    text = f"{oldest} is {span_text(seconds)} older than {newest}: if they are from different steps, the result mixes them"
    return [Note("warning", APART, text)]


def origins_of(tensors: Iterable[Tensor]) -> list[Source]:
    """The files that tensors and their replicas are read from, each once."""
    read = {id(piece.source): piece.source for tensor in tensors for piece in (*tensor.pieces, *tensor.copies)}
    return list({origin.path: origin for source in read.values() for origin in source.origins}.values())


def unversioned(sources: Iterable[Watched]) -> list[str]:
    """The files that may be replaced by others of their size without a trace, sorted by path."""
    return sorted({source.identity.path for source in sources if source.identity.is_unversioned})


def unversioned_notes(sources: Iterable[Watched]) -> list[Note]:
    """A warning about files whose server has neither entity tags nor times."""
    paths = unversioned(sources)
    if not paths:
        return []
    names = few([os.path.basename(path) for path in paths], 3)
    text = (
        f"the server gives neither an ETag nor a Last-Modified time for {names}: if a file is replaced during the run, ckpt cannot notice"
    )
    return [Note("warning", "unversioned", text)]


def refuse_unversioned(sources: Iterable[Watched]) -> None:
    """Raise Unsupported if several processes could read different versions of a file without noticing."""
    paths = unversioned(sources)
    if paths:
        raise Unsupported(
            "the server gives neither an ETag nor a Last-Modified time, so nothing would show that the parts read the same file",
            path=paths[0],
            hint="run it as one process, without parts, or download the files first",
        )
