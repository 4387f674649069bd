"""The folder of an output as it is pushed: its files, its card, and a manifest without the paths of this machine."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ckpt_cli.dtypes import BASE
from ckpt_cli.errors import CorruptFile, NotFound, PushFailed
from ckpt_cli.files.folders import is_file, stays_inside
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.manifest import Manifest, read_manifest
from ckpt_cli.files.source import read_small
from ckpt_cli.names import printable
from ckpt_cli.output.interrupted.place import temporary_name
from ckpt_cli.output.staging import sync_folder
from ckpt_cli.output.writer import output_errors, write_bytes
from ckpt_cli.pushing import card
from ckpt_cli.results.verify import VerifyResult
from ckpt_cli.urls import URL

OF_BASE = ("carry_from_base", "match_base", "fill_missing_from_base", "drop_extra")
"""Options by which a base becomes a part of the output."""


def manifest_of(folder: Path) -> Manifest:
    """The manifest of an output. Raises NotFound for other folders, and PushFailed for weights added to a checkpoint."""
    found = read_manifest(folder)
    if found is None:
        hint = "push other folders with `hf upload`"
        raise NotFound("this is no output of ckpt: it has no manifest", path=folder, expected=MANIFEST, hint=hint)
    if found.options.get("in_place"):
        raise PushFailed("the output lies among the files of the checkpoint", path=folder, hint="write it to a folder of its own with -o")
    return found


def files_of(folder: Path, manifest: Manifest) -> list[str]:
    """The names of the files to be pushed: those that the manifest lists, and a card.

    Raises CorruptFile for names that lead elsewhere, and PushFailed for links: the folder may have come from somebody else, who could
    have files of this machine pushed.
    """
    names = sorted({*manifest.outputs, *manifest.side_files, *([card.NAME] if is_file(folder / card.NAME) else [])})
    for name in names:
        path = PurePosixPath(name)
        if not stays_inside(name) or "\\" in name or str(path) != name or not path.name:
            raise CorruptFile(f"the manifest lists a file elsewhere: {printable(name)}", path=folder / MANIFEST)
        if any(os.path.islink(folder / part) for part in (path, *path.parents[:-1])):
            raise PushFailed(
                "this is a link, and only files that ckpt wrote are pushed", path=folder / name, hint="put the file in its place"
            )
    return names


def add_card(folder: Path, manifest: Manifest, verified: Sequence[VerifyResult]) -> Manifest:
    """The manifest of an output with a card: README.md is written unless there is one. Raises OutputError."""
    if is_file(folder / card.NAME):
        return manifest
    content = card.card(folder, manifest, verified).encode("utf-8", "backslashreplace")
    listed = dict(manifest.facts)
    listed["side_files"] = sorted({*manifest.side_files, card.NAME})
    known = dict(listed.get("checksums") or {})
    known["side_files"] = {**known.get("side_files", {}), card.NAME: f"{zlib.crc32(content):08x}"}
    listed["checksums"] = known
    with output_errors(folder):
        # The manifest first: what it does not list is never replaced or removed.
        for path, data in ((folder / MANIFEST, (json.dumps(listed, indent=2) + "\n").encode()), (folder / card.NAME, content)):
            temporary = temporary_name(folder)
            write_bytes(temporary, data)
            os.replace(temporary, path)
        sync_folder(folder)
    return manifest_of(folder)


def public_manifest(folder: Path, manifest: Manifest) -> bytes:
    """The manifest with paths as others may see them: below the run, or only their names."""

    def shortened(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shortened(each) for key, each in value.items()}
        if isinstance(value, list):
            return [shortened(each) for each in value]
        return card.below(value, manifest) if isinstance(value, str) and (os.path.isabs(value) or URL.fullmatch(value)) else value

    content = json.loads(read_small(folder / MANIFEST))
    if not any(manifest.options.get(name) for name in OF_BASE) and manifest.options.get("dtype") != BASE:
        # It is not needed to verify the output, where it would be looked for.
        content["base"] = None
    return (json.dumps(shortened(content), indent=2) + "\n").encode()
