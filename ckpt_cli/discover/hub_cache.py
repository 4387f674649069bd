"""A repository in the cache of huggingface_hub (``models--org--name``): the snapshot that is meant.

``refs/main`` names the commit that was downloaded last, ``snapshots/<commit>`` has its files as links into ``blobs/``.
"""

from __future__ import annotations

import re
from pathlib import Path

from ckpt_cli.discover.found import Found
from ckpt_cli.errors import CkptError, Undecidable
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import read_small
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

REPOSITORY = re.compile(r"models--.+", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
SNAPSHOTS = "snapshots"


def snapshot_of(path: Path, there: Folders) -> Path | None:
    """The snapshot of a repository's folder, or of its folder of snapshots; None for other paths.

    Raises Undecidable if there are several and no reference names one.
    """
    repository = path.parent if path.name == SNAPSHOTS else path
    if not REPOSITORY.fullmatch(repository.name) or not there.is_folder(repository / SNAPSHOTS):
        return None
    snapshots = there.folders(repository / SNAPSHOTS)
    try:
        commit = read_small(repository / "refs" / "main", 1 << 10).decode("ascii", "replace").strip()
    except CkptError:
        commit = ""
    named = [folder for folder in snapshots if COMMIT.fullmatch(commit) and folder.name == commit]
    chosen = named or snapshots
    if len(chosen) > 1:
        raise Undecidable(
            f"there are {len(chosen)} snapshots of this model, and refs/main names none of them",
            path=repository,
            expected=few([folder.name for folder in chosen], 3),
            hint="pass the folder of one of them",
        )
    return chosen[0] if chosen else None


def cached_model(path: Path) -> str | None:
    """The name of the repository that a snapshot is of, "org--name"; None for folders outside of the cache."""
    repository = path.parent.parent.name
    return repository.removeprefix("models--") if path.parent.name == SNAPSHOTS and REPOSITORY.fullmatch(repository) else None


def snapshot_notes(found: Found) -> list[Note]:
    """Which snapshot of the cache was taken."""
    name = cached_model(found.path)
    return [] if name is None else [Note("info", "snapshot", f"{name}: the snapshot {found.path.name} of the Hub cache was read")]
