"""A repository in the cache of huggingface_hub (``models--org--name``): the snapshot that is meant.

``refs/main`` names the commit that was downloaded last, ``snapshots/<commit>`` has its files as links into ``blobs/``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from ckpt_cli.discover.beside.folders import files_with_weights, held_below
from ckpt_cli.discover.found import Found
from ckpt_cli.errors import CkptError, NotFound, Undecidable
from ckpt_cli.files.folders import Folders, files_in
from ckpt_cli.files.source import read_small
from ckpt_cli.formats.registry import recognise
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

REPOSITORY = re.compile(r"models--.+", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
SNAPSHOTS = "snapshots"


def snapshot_of(path: Path, there: Folders) -> Path | None:
    """The snapshot of a repository's folder, or of its folder of snapshots; None for other paths.

    Raises Undecidable if there are several and no reference names one, NotFound if the one that is named holds no weights and another does:
    loaders would not take that one.
    """
    repository = path.parent if path.name == SNAPSHOTS else path
    if not REPOSITORY.fullmatch(repository.name) or not there.is_folder(repository / SNAPSHOTS):
        return None
    snapshots = there.folders(repository / SNAPSHOTS)
    try:
        commit = read_small(repository / "refs" / "main", 1 << 10).decode("ascii", "replace").strip()
    except CkptError:
        commit = ""
    named = repository / SNAPSHOTS / commit
    if COMMIT.fullmatch(commit) and (named in snapshots or len(snapshots) == 1):
        return _named(named, snapshots, there)
    if len(snapshots) > 1:
        raise Undecidable(
            f"there are {len(snapshots)} snapshots of this model, and refs/main names none of them",
            path=repository,
            expected=few([folder.name for folder in snapshots], 3),
            hint="pass the folder of one of them",
        )
    return snapshots[0] if snapshots else None


def _named(snapshot: Path, snapshots: Sequence[Path], there: Folders) -> Path | None:
    """The snapshot that ``refs/main`` names. Raises NotFound if it holds no weights, and others do."""
    others = [folder for folder in snapshots if folder != snapshot and _holds_weights(folder, there)]
    if snapshot in snapshots and (not others or _holds_weights(snapshot, there)):
        return snapshot
    if not others:
        return None
    why = "holds no weights" if snapshot in snapshots else "is not there"
    raise NotFound(
        f"the snapshot {snapshot.name}, which refs/main names, {why}: the download may not have finished",
        path=snapshot,
        expected="a snapshot with weights",
        hint=f"download it again, or give the folder you mean: {few([str(folder) for folder in others], 3)}",
    )


def _holds_weights(folder: Path, there: Folders) -> bool:
    return bool(recognise(folder, there) or files_with_weights(folder, there) or held_below(folder, there) != [])


def repository_in(cache: Path, there: Folders) -> Path | None:
    """The repository of a cache that has one model. Raises Undecidable if there are several."""
    repositories = there.folders(cache, REPOSITORY.fullmatch)
    if len(repositories) > 1:
        raise Undecidable(
            f"there are {len(repositories)} models in this Hub cache: {few([folder.name for folder in repositories], 3)}",
            path=cache,
            expected="one of them",
            hint=f"give the folder you mean, such as {repositories[0]}",
        )
    return repositories[0] if repositories else None


def cached_model(path: Path) -> str | None:
    """The name of the repository that a snapshot is of, "org--name"; None for folders outside of the cache."""
    repository = path.parent.parent.name
    return repository.removeprefix("models--") if path.parent.name == SNAPSHOTS and REPOSITORY.fullmatch(repository) else None


def revisions_of(repository: Path) -> dict[str, str]:
    """The branches and tags of a repository in the cache, by name, and the commit that each was at when it was downloaded."""
    found: dict[str, str] = {}
    with contextlib.suppress(CkptError):
        for ref in files_in(repository / "refs"):
            found[ref.name] = read_small(ref, 1 << 10).decode("ascii", "replace").strip()
    return found


def snapshot_notes(found: Found) -> list[Note]:
    """Which snapshot of the cache was taken."""
    name = cached_model(found.path)
    return [] if name is None else [Note("info", "snapshot", f"{name}: the snapshot {found.path.name} of the Hub cache was read")]
