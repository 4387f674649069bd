"""The folder in which an output is built, emptied of what earlier runs left: what cannot be removed does not stand in the way.

What another process still has open cannot be removed on a network file system. It stays in a folder beside the new output, under a name
that nothing is built in, and the next run tries again.
"""

from __future__ import annotations

import glob
import os
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.errors import NotWritable
from ckpt_cli.files.leftovers.still_open import held_below, who_has
from ckpt_cli.names import few
from ckpt_cli.output.interrupted.place import ASIDE, MARK
from ckpt_cli.tensors.component import Note
from ckpt_cli.urls import is_remote

SET_ASIDE = "left-"
"""How folders begin whose files could not be removed."""


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def clear(path: Path, root: Path) -> None:
    """Remove a file or folder in the ``root`` of an output that is built; a folder that cannot be removed gets another name there.

    Raises NotWritable, with what stands in the way, if that is impossible too.
    """
    if path.name.startswith(SET_ASIDE):
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        remove(path)
    except OSError as error:
        if not path.is_dir() or path.is_symlink():
            raise _in_the_way(root, error) from error
        try:
            os.rename(path, root / f"{SET_ASIDE}{uuid.uuid4().hex[:12]}")
        except OSError:
            raise _in_the_way(root, error) from error


def keep_only(folder: Path, finished: Collection[str], receipts: Path | None, root: Path) -> None:
    """Make a folder with nothing but the files that an earlier run ``finished``; with none if others cannot be removed.

    What is still open must not get into the output; then what is finished is written again.
    """
    folder.mkdir(exist_ok=True)
    try:
        for path in folder.iterdir():
            if path.name not in finished:
                remove(path)
    except OSError:
        for path in filter(os.path.lexists, (*([receipts] if receipts is not None else []), folder)):
            clear(path, root)
        folder.mkdir()


def remains_notes(target: Path) -> list[Note]:
    """What is said of an older output that should be gone, and of which processes still have files open."""
    if is_remote(target):
        return []
    roots = [path for mark in (MARK, ASIDE) for path in sorted(target.parent.glob(f".{glob.escape(target.name)}{mark}*"))]
    held = [path for root in roots for path in held_below(root)]
    if not held:
        return []
    size = sum(path.lstat().st_size for path in held if path.exists())
    who = few([each for path in held for each in who_has(path)], 3) or f"a process (lsof {shell.path(held[0])} names it)"
    text = f"what {target.name} replaced is still open in {who}: its {size:,} bytes ({held[0]}) are free once that ends or lets go"
    return [Note("info", "still-open", text)]


def _in_the_way(root: Path, error: OSError) -> NotWritable:
    """The error for what an earlier run left, and that nothing can be written over."""
    held = held_below(root)
    path = held[0] if held else Path(os.fsdecode(error.filename)) if error.filename is not None else root
    path = path if path.is_absolute() else root / path
    message = f"what an earlier run left where the output is built cannot be removed: {error.strerror}"
    if not held:
        return NotWritable(message, path=path, hint=f"remove it: rm -r {shell.path(root)}, or choose another place with -o")
    who = who_has(path)
    way = f"{few(who, 3)} has it open: end that" if who else f"lsof {shell.path(path)} names the process that has it open: end that"
    return NotWritable(message, path=path, hint=f"{way}, or choose another place with -o")
