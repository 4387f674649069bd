"""Files of several commits of one repository, as an update that was interrupted leaves them in a folder of ``hf download --local-dir``.

Beside such a folder's files, `METADATA` has three lines for each: the commit, the ETag, and when that was noted. An update notes the new
commit also for a file that did not change, when it comes to it, so that a whole update leaves one commit.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import is_file, is_folder, status_of
from ckpt_cli.files.source import read_small
from ckpt_cli.names import few
from ckpt_cli.paths import absolute
from ckpt_cli.tensors.component import Note
from ckpt_cli.urls import is_remote

METADATA = Path(".cache", "huggingface", "download")
COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
LARGEST = 1 << 12
"""Bytes of the three lines."""

SLACK = 1
"""Seconds that a file may be younger than what was noted of it, as huggingface_hub allows; a younger one was not downloaded."""


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A file of a repository: its ``name`` there, the commit that it was downloaded at, and when."""

    root: Path
    name: str
    commit: str
    when: float


def commit_notes(weights: Iterable[Path], config: Path | None) -> list[Note]:
    """A warning if weights, or weights and their config, were downloaded at several commits of a repository into one folder."""
    roots: dict[Path, Path | None] = {}
    found = [each for path in dict.fromkeys(weights) if (each := _downloaded(path, roots)) is not None]
    own = _downloaded(config, roots) if config is not None else None
    found += [own] if own is not None and own.root in {each.root for each in found} else []
    notes = []
    for root in dict.fromkeys(each.root for each in found):
        newest: dict[str, float] = {}
        for each in (each for each in found if each.root == root):
            newest[each.commit] = max(each.when, newest.get(each.commit, each.when))
        if len(newest) > 1:
            named = {commit: [each.name for each in found if each.root == root and each.commit == commit] for commit in newest}
            listed = "; ".join(f"at {commit[:12]} {few(named[commit], 3)}" for commit in sorted(newest, key=lambda commit: newest[commit]))
            why = "as an update that did not finish leaves them, and downloads of single files at different times"
            text = f"{root} has files of {len(newest)} commits of one repository, {why}: {listed}"
            notes.append(Note("warning", "mixed-commits", f"{text}; hf download into this folder again makes them one"))
    return notes


def _downloaded(path: Path, roots: dict[Path, Path | None]) -> Downloaded | None:
    """What was noted of a download of a file; None of files that came otherwise. ``roots`` are folders that were looked at before."""
    if is_remote(path):
        return None
    path = Path(absolute(path))
    root = root_of(path.parent, roots)
    if root is None:
        return None
    name = path.relative_to(root).as_posix()
    lines: list[str] = []
    with contextlib.suppress(CkptError):  # what tells nothing is no reason to refuse
        if is_file(noted := root / METADATA / f"{name}.metadata"):
            lines = read_small(noted, LARGEST).decode("utf-8", "replace").split("\n")
    with contextlib.suppress(ValueError, IndexError):
        commit, when = lines[0].strip(), float(lines[2])
        status = status_of(path)
        if COMMIT.fullmatch(commit) and status is not None and status.st_mtime - SLACK <= when:
            return Downloaded(root, name, commit, when)
    return None


def root_of(folder: Path, roots: dict[Path, Path | None]) -> Path | None:
    """The nearest folder around some files that a repository was downloaded to."""
    if folder not in roots:
        with contextlib.suppress(CkptError):
            if is_folder(folder / METADATA):
                roots[folder] = folder
        if folder not in roots:
            roots[folder] = root_of(folder.parent, roots) if folder.parent != folder else None
    return roots[folder]
