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
"""What is read of the tensors of a file that has the right size and header, but is younger than the manifest."""


def written_over(folder: Path, made: Manifest) -> list[str]:
    """The weights files of a folder that are whole, and not what its manifest says was written under their names. Raises Unreadable.

    Values are looked at where a file is younger than the manifest, which is written last; those of a copy may be.
    """
    written = _times(folder / NAME)
    found: list[str] = []
    with Files() as files:
        for name, size in made.outputs.items():
            status = status_of(folder / name) if stays_inside(name) else None
            if status is None or not stat.S_ISREG(status.st_mode):
                continue
            is_younger = not is_remote(folder) and status.st_mtime_ns > written
            if (status.st_size != size or is_younger) and _is_another(folder / name, name, made, files):
                found.append(name)
    return found


def is_of_another_folder(folder: Path, made: Manifest) -> bool:
    """Whether a manifest lists weights, and none of them are in its folder. Raises Unreadable."""
    return bool(made.outputs) and not any(stays_inside(name) and status_of(folder / name) is not None for name in made.outputs)


def _times(path: Path) -> int:
    status = status_of(path)
    return status.st_mtime_ns if status is not None else 0


def _is_another(path: Path, name: str, made: Manifest, files: Files) -> bool:
    try:
        source = files.source(path)
        entries = read_header(source).entries
    except CkptError:
        return False  # damage, not weights of somebody else
    if source.size != made.outputs[name]:
        return True
    length = 8 + int.from_bytes(source.read(0, 8), "little")
    if name in made.headers and zlib.crc32(source.read(0, length)) != made.headers[name]:
        return True
    return _has_other_values(source, entries, made.checksums.get(name, {}))


def _has_other_values(source: Source, entries: Sequence[Entry], checksums: Mapping[str, int]) -> bool:
    """Whether half of the tensors of a sample have other values than were written: a training changes most, damage few."""
    known = sorted(
        (entry for entry in entries if entry.name in checksums and entry.nbytes), key=lambda entry: zlib.crc32(os.fsencode(entry.name))
    )
    left, differing, compared = MOST_BYTES, 0, 0
    for entry in known[:MOST_TENSORS]:
        if entry.nbytes <= left:
            left -= entry.nbytes
            compared += 1
            differing += crc_of(source, entry.offset, entry.nbytes) != checksums[entry.name]
    return compared > 0 and 2 * differing >= compared
