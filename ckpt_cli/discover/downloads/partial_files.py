"""Files of which only a part is there, as programs that download or copy leave them when they are stopped, and what these are parts of.

=====================  =======================================================================================
program                leaves
=====================  =======================================================================================
modelscope             ``._____temp/<name>`` in the folder, or beside its cache with the folder's path in it
kagglehub              ``<version>.archive`` beside the folder, and no ``<version>.complete``
aria2                  ``<name>.aria2``
rclone                 ``<name>.<8 digits>.partial``
rsync, aws, gsutil     ``.<name>.<6 letters>``, ``<name>.<8 digits>``, ``<name>_.gstmp``
browsers               ``<name>.crdownload``, ``.part``, ``.download``, ``.opdownload``
others                 ``<name>.part``, ``.partial``, ``.tmp``, ``.incomplete``, ``.filepart``
DVC, folders in sync   ``<name>.dvc``, ``<name>.nextcloud``, ``.owncloud``, ``.<name>.icloud``: pointers, until the data is asked for
=====================  =======================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ckpt_cli.files.folders import entries_in, files_in, is_file, is_folder
from ckpt_cli.names import few
from ckpt_cli.paths import absolute
from ckpt_cli.urls import is_remote

PART = re.compile(
    r"\.?(?P<name>.+?)((\.[0-9a-f]{8})?\.(part|partial|tmp|temp|incomplete|crdownload|download|opdownload|filepart|aria2(__temp)?)|_\.gstmp|\.[0-9a-f]{8})"
    r"|\.(?P<hidden>.+)\.[a-z0-9]{6}",
    re.ASCII | re.IGNORECASE,
)
"""A file that is on its way, by its name, and what it is to be called."""

POINTER = re.compile(r"\.?(?P<name>.+)\.(dvc|nextcloud|owncloud|icloud)", re.ASCII | re.IGNORECASE)
"""A file that stands for one whose data is elsewhere."""

MODELSCOPE, RANGE = "._____temp", re.compile(r"_[0-9]+_[0-9]+", re.ASCII)
"""The folder of parts, and the end of the name of one of several parts of a large file."""

LEVELS = 3
"""How far above a model the cache of modelscope has its folder of parts: beside that of the owner."""


def told_of_parts(folder: Path, is_lacking: Callable[[str], bool]) -> Iterator[str]:
    """What is said of downloads into a folder that did not finish; ``is_lacking``: whether a file of a name would be used and is not there.

    Files that are there with a record of what they lack are refused where they are read (`ckpt_cli.files.leftovers.downloads`).
    """
    names = {path.name for path in entries_in(folder)}
    # What lies above a folder of a store is not listed for this.
    of_modelscope = set[str]() if is_remote(folder) else _of_modelscope(folder)
    found = sorted(name for name in of_modelscope if is_lacking(name))
    if found:
        text = f"{_not_there(folder, found)}, since modelscope did not finish the download"
        yield f"{text}: modelscope download into this folder again gets the rest"
    parts = {part: name for part in sorted(names) if (name := whole_name(part)) is not None}
    found = [part for part, name in parts.items() if name not in names and name not in of_modelscope and is_lacking(name)]
    if found:
        pointers = [part for part in found if POINTER.fullmatch(part)]
        for those, why in (
            ([part for part in found if part not in pointers], "a download or a copy did not finish, so do it again"),
            (pointers, "the data is elsewhere, so get it with dvc pull or by the program that syncs the folder"),
        ):
            if those:
                yield f"{_not_there(folder, list(dict.fromkeys(parts[part] for part in those)))}, only {few(those, 4)}: {why}"
    if is_remote(folder):
        return
    if is_file(folder.parent / f"{folder.name}.archive") and not is_file(folder.parent / f"{folder.name}.complete"):
        yield f"{folder}: kagglehub did not finish the download, so that files may be missing: downloading the model again gets them"


def whole_name(part: str) -> str | None:
    """What the file of which a part is there is called; None for other names.

    >>> [whole_name(name) for name in ("vocab.json.part", ".merges.txt.Xa3bQz", "tokenizer.json.dvc", "tokenizer.json")]
    ['vocab.json', 'merges.txt', 'tokenizer.json', None]
    """
    if (pointer := POINTER.fullmatch(part)) is not None:
        return pointer["name"]
    fields = PART.fullmatch(part)
    return None if fields is None else fields["name"] or fields["hidden"]


def _of_modelscope(folder: Path) -> set[str]:
    """The files of which modelscope has parts, in the folder or in that of its cache."""
    here = Path(absolute(folder))
    names: set[str] = set()
    for above in (here, *here.parents[:LEVELS]):
        parts = above / MODELSCOPE / here.relative_to(above)
        if is_folder(parts):
            names |= {RANGE.sub("", path.name) for path in files_in(parts)}
    return names


def _not_there(folder: Path, names: list[str]) -> str:
    return f"{folder}: {few(names, 4)} {'is' if len(names) == 1 else 'are'} not there"
