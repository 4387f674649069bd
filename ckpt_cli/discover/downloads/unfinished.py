"""Side files that did not arrive: what huggingface_hub leaves in a folder, or in its cache, of a download that did not finish.

What other programs leave is in `partial_files`.

In a folder of ``hf download --local-dir`` every file has a lock in `METADATA` from when it is asked for, which stays, and is noted there
once it has its name. An update removes a file before it gets it anew. In the cache a file and its lock are called by its ETag, and it has a
name in a snapshot only when it is whole. In both, a process that was killed leaves what had come as ``*.incomplete``, and its next try
leaves that where it is.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckpt_cli.discover.downloads.commits import METADATA, root_of
from ckpt_cli.discover.downloads.hub_cache import cached_model
from ckpt_cli.discover.downloads.partial_files import told_of_parts
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import entries_in, files_in
from ckpt_cli.files.source import read_small
from ckpt_cli.formats.registry import recognise
from ckpt_cli.hub.assets import HUB_FOLDER
from ckpt_cli.hub.beside.names import has_weight_suffix, is_asset_name
from ckpt_cli.names import few
from ckpt_cli.paths import absolute
from ckpt_cli.tensors.component import Note
from ckpt_cli.urls import is_remote

LOCK, NOTED, INCOMPLETE = ".lock", ".metadata", ".incomplete"
SLACK = 2.0
"""Seconds by which clocks of files may differ."""


def unfinished_notes(folders: Sequence[Path], assets: Mapping[str, Path]) -> list[Note]:
    """Warnings about files that did not arrive in the folders that side files are taken from, the nearest first.

    Nothing is said of a file that was taken from a nearer folder.
    """
    notes, roots = [], dict[Path, Path | None]()
    nearer: set[Path] = set()
    for folder in dict.fromkeys(folders):
        nearer.add(folder)
        with contextlib.suppress(CkptError, OSError):  # what cannot be looked at is found elsewhere
            homes = {home for near in nearer - {folder} for home in (near, near / HUB_FOLDER)}
            wanted = {name for name, path in assets.items() if path.parent in homes}
            # Programs that download from the Hub write to disks; what they keep beside the files costs a listing to look for.
            text = None if is_remote(folder) else _told_of_cache(folder) or _told_of_folder(folder, wanted, roots)
            told = [text] if text else _told_of_parts(folder, wanted)
            notes += [Note("warning", "unfinished-download", text) for text in told]
    return notes


# -- folders ---------------------------------------------------------------------------------------------------------


def _told_of_folder(folder: Path, taken: set[str], roots: dict[Path, Path | None]) -> str | None:
    root = root_of(Path(absolute(folder)), roots)
    if root is None:
        return None
    kept = root / METADATA / Path(absolute(folder)).relative_to(root)
    names = [path.name for path in files_in(kept)]
    there = {path.name for path in entries_in(folder)}
    asked = {name.removesuffix(LOCK) for name in names if name.endswith(LOCK)} - there - taken
    begun = {name for name in asked if any(each.startswith(f"{_short(name)}.") and each.endswith(INCOMPLETE) for each in names)}
    gone = {name for name in asked - begun if f"{name}{NOTED}" in names}
    lacking = sorted(name for name in asked if is_asset_name(name) or (name not in gone and _is_missed(name, folder)))
    if not lacking:
        return None
    why = [] if begun & {*lacking} else ["or the repository has no such file"] if not gone & {*lacking} else ["or it was removed since"]
    text = (
        f"{folder}: {few(lacking, 4)} {'is' if len(lacking) == 1 else 'are'} not there, since huggingface_hub did not finish the download"
    )
    return f"{', '.join([text, *why])}; more files may be missing: hf download into this folder again gets them"


def _told_of_parts(folder: Path, taken: set[str]) -> list[str]:
    """The same of what other programs leave in a folder."""
    there = {path.name for path in entries_in(folder)} | taken
    return list(told_of_parts(folder, lambda name: name not in there and (is_asset_name(name) or _is_missed(name, folder))))


def _short(name: str) -> str:
    """What huggingface_hub calls a file that is on its way into a folder."""
    return base64.urlsafe_b64encode(hashlib.sha1(f"{name}{NOTED}".encode(), usedforsecurity=False).digest()).decode()


def _is_missed(name: str, folder: Path) -> bool:
    """Whether a file is missed that holds weights: not beside others."""
    return has_weight_suffix(name) and not recognise(folder)


# -- the cache -------------------------------------------------------------------------------------------------------


def _told_of_cache(folder: Path) -> str | None:
    model = cached_model(folder)
    if model is None:
        return None
    repository = folder.parent.parent
    named = _commit(repository)
    others = [path for path in entries_in(folder.parent) if path != folder]
    if others and named != folder.name:
        return None
    links = [path for path in entries_in(folder) if path.is_symlink()]
    if not links:
        return None  # where there are no links, files are moved here
    # What is older was left by a download of another commit.
    begun = min(path.lstat().st_mtime for path in links) - SLACK
    count = len({path.name.partition(".")[0] for path in _started(repository) if path.stat().st_mtime >= begun})
    if not count:
        return None
    files = "a file is" if count == 1 else f"{count} files are"
    text = f"{model.replace('--', '/')}: {files} missing from the snapshot {folder.name}, since huggingface_hub did not finish the download"
    there = few(sorted(path.name for path in entries_in(folder) if is_asset_name(path.name)), 8)
    return f"{text}; there are {there or 'no side files'}, and more may be missing: hf download of this model gets them"


def _commit(repository: Path) -> str:
    with contextlib.suppress(CkptError):
        return read_small(repository / "refs" / "main", 1 << 10).decode("ascii", "replace").strip()
    return ""


def _started(repository: Path) -> Iterator[Path]:
    """Locks and parts of files of a repository that are not there as a whole: both are called by the ETag."""
    blobs = repository / "blobs"
    whole = {path.name for path in entries_in(blobs)}
    locks = repository.parent / ".locks" / repository.name
    for path in (*files_in(blobs, lambda name: name.endswith(INCOMPLETE)), *files_in(locks, lambda name: name.endswith(LOCK))):
        if path.name.partition(".")[0] not in whole:
            yield path
