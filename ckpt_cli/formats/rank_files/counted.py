"""Files whose numbers count ranks or steps, ``checkpoint_0.pt`` and ``checkpoint_1.pt``: what is in the first one tells.

``checkpoint_<rank>.pt`` is what torch's own checkpointer writes (torch.distributed.checkpoint._experimental, torch 2.13), and what many
programs call the save of an epoch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.rank_files.dtensor import LocalReader
from ckpt_cli.formats.rank_files.reader import announced_size, read_rank_file
from ckpt_cli.formats.torch_files.groups import groups_of

MODEL = "model"

COUNTED = re.compile(r"(?P<stem>[A-Za-z][A-Za-z_.-]*[-_.]?)(?P<number>[0-9]{1,4})\.(pt|pth|th|bin|ckpt)", re.ASCII)
"""A name with one number, at its end."""

KEPT = 64


def counted_ranks(path: Path, there: Folders) -> Mapping[int, Path]:
    """The files called like one, by rank, if the first of them holds distributed tensors of more ranks than any number; else nothing.

    Ranks count from 0 on. No other file is looked into, and none is listed where that one says nothing: there may be thousands.
    """
    fields = COUNTED.fullmatch(path.name)
    if fields is None:
        return {}
    start, end = fields.span("number")
    first = path.with_name(path.name[:start] + (f"{0:0{end - start}d}" if path.name[start] == "0" else "0") + path.name[end:])
    ranks = _ranks_told(first) if there.is_file(first) else 0
    if ranks < 2:
        return {}
    like = re.compile(re.escape(fields["stem"]) + "([0-9]{1,4})" + re.escape(path.suffix), re.ASCII)
    found = {int(match[1]): other for other in there.files(path.parent, like.fullmatch) if (match := like.fullmatch(other.name))}
    return dict(sorted(found.items())) if len(found) > 1 and max(found) < ranks else {}


def _ranks_told(path: Path) -> int:
    try:
        state = path.stat()
    except OSError:
        return 0
    return _ranks_in(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=KEPT)
def _ranks_in(path: Path, size: int, changed: int) -> int:
    """How many ranks the tensors of a file, of this size and time, say there are; 0 for files that say nothing."""
    del size, changed
    try:
        with Files() as files:
            file = files.parsed(path, TorchFile)
            main = groups_of(file, MODEL, LocalReader(file, 0))[1][0].name
            return announced_size(read_rank_file(0, path, files, MODEL, None, main).state)
    except CkptError:
        return 0  # what cannot be read says so where it is read
