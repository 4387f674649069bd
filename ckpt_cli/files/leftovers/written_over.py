"""Whether the weights in a folder with a manifest are still those that were written with it.

A training may save into an output of ckpt, and a manifest may be copied into a folder with other weights: what it says is not about
these, and `--overwrite` must not take them for ckpt's own. Damage is told apart: a damaged file has no valid header, or the one that was
written and few other values.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_cli.errors import CkptError
from ckpt_cli.files.crc32 import crc_of
from ckpt_cli.files.folders import status_of, stays_inside
from ckpt_cli.files.manifest import NAME, Manifest
from ckpt_cli.files.safetensors_file import Entry, read_header
from ckpt_cli.files.source import Files, Source
from ckpt_cli.urls import is_remote

MOST_TENSORS, MOST_BYTES = 32, 256 << 20
"""What is read of the tensors of files that have the right size and header, but are younger than the manifest: of each, and of all."""


def written_over(folder: Path, made: Manifest, *, values: bool = True) -> list[str]:
    """The weights files of a folder that are whole, and not what its manifest says was written under their names. Raises Unreadable.

    ``values``: look at those of files that are younger than the manifest, which is written last; files of a copy may be.
    """
    written = _times(folder / NAME)
    found: list[str] = []
    left = MOST_BYTES if values else 0
    with Files() as files:
        for name, size in made.outputs.items():
            status = status_of(folder / name) if stays_inside(name) else None
            if status is None or not stat.S_ISREG(status.st_mode):
                continue
            is_younger = values and not is_remote(folder) and status.st_mtime_ns > written
            if status.st_size != size or is_younger:
                other, used = _is_another(folder / name, name, made, files, left)
                left -= used
                found += [name] if other else []
    return found


def is_of_another_folder(folder: Path, made: Manifest) -> bool:
    """Whether a manifest lists weights, and none of them are in its folder. Raises Unreadable."""
    return bool(made.outputs) and not any(stays_inside(name) and status_of(folder / name) is not None for name in made.outputs)


def _times(path: Path) -> int:
    status = status_of(path)
    return status.st_mtime_ns if status is not None else 0


def _is_another(path: Path, name: str, made: Manifest, files: Files, most: int) -> tuple[bool, int]:
    """Whether a file is another one than was written, and how many bytes of tensors were read for it, ``most`` of them."""
    try:
        source = files.source(path)
        entries = read_header(source).entries
    except CkptError:
        return False, 0  # damage, not weights of somebody else
    if source.size != made.outputs[name]:
        return True, 0
    length = 8 + int.from_bytes(source.read(0, 8), "little")
    if name in made.headers and zlib.crc32(source.read(0, length)) != made.headers[name]:
        return True, 0
    return _has_other_values(source, entries, made.checksums.get(name, {}), most)


def _has_other_values(source: Source, entries: Sequence[Entry], checksums: Mapping[str, int], most: int) -> tuple[bool, int]:
    """Whether half of the tensors of a sample have other values than were written: a training changes most, damage few."""
    known = [entry for entry in entries if entry.name in checksums and entry.nbytes]
    known.sort(key=lambda entry: zlib.crc32(os.fsencode(entry.name)))
    read, differing, compared = 0, 0, 0
    for entry in known[:MOST_TENSORS]:
        if read + entry.nbytes <= most:
            read += entry.nbytes
            compared += 1
            differing += crc_of(source, entry.offset, entry.nbytes) != checksums[entry.name]
    return compared > 0 and 2 * differing >= compared, read
