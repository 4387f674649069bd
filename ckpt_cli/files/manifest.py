"""Reading ``ckpt-manifest.json``, which says where an output came from: ``--overwrite`` trusts only it, `verify` uses it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ckpt_cli.errors import CkptError, CorruptFile, IncompleteError, Unreadable, reading
from ckpt_cli.files.folders import Folders, entries_in, is_file, is_folder
from ckpt_cli.files.leftovers.still_open import is_still_open
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import Files, Watched, read_small
from ckpt_cli.names import few, printable

NAME = "ckpt-manifest.json"
PUBLISHING = ".ckpt-publishing"
"""Where files appear one by one: this one names them until all are there. What it names is an output that is not whole."""

SCHEMA = 1
KINDS = {"options": dict, "outputs": dict, "side_files": list}
"""What every manifest of this format has, and of which type."""

BESIDE = "beside"
"""The files beside the weights that an output was made of, as ``sources`` are those with weights."""

LEFT_OUT, FUSED = "left_out", "fused_adapters"
"""Facts about an output that those made from it inherit."""

SIDE_SIZES = "side_sizes"
"""The sizes of the files beside the weights that were written; an older manifest has none."""

KEPT = "kept_in_fp32"
"""The tensors that ``--dtype`` left in fp32; an older manifest does not say any, as all were cast."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a manifest: ``outputs`` are weight files with their sizes in bytes, ``checksums`` CRC-32 by file and tensor.

    ``headers`` are those of the headers of weights files, ``side_sizes`` the bytes of files beside these; an older manifest has none.
    """

    command: str
    options: Mapping[str, Any]
    outputs: Mapping[str, int]
    side_files: tuple[str, ...]
    checksums: Mapping[str, Mapping[str, int]]
    side_checksums: Mapping[str, int]
    facts: Mapping[str, Any]
    headers: Mapping[str, int]
    side_sizes: Mapping[str, int]

    @property
    def left_out(self) -> tuple[str, ...]:
        """The tensors that a whole output would have: what filters, a key map, --intersect or --allow-missing left out, now or before."""
        return self._texts(LEFT_OUT)

    @property
    def kept_in_fp32(self) -> tuple[str, ...]:
        """The tensors that are in fp32 although the others were cast to 16 bits."""
        return self._texts(KEPT)

    @property
    def fused_adapters(self) -> tuple[str, ...]:
        """The checksums of all adapters that are in the weights (`ckpt_cli.lora.digest`)."""
        return self._texts(FUSED)

    @property
    def filters(self) -> tuple[str, ...]:
        """The options that left tensors out, as they were given."""
        names = ("include", "exclude", "allow_missing")
        return tuple(f"--{name.replace('_', '-')} {value}" for name in names for value in _listed(self.options.get(name)))

    def _texts(self, key: str) -> tuple[str, ...]:
        return _listed(self.facts.get(key))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, None if it has none. Raises CorruptFile for one that is damaged."""
    path = folder / NAME
    if not is_file(path):
        return None
    with reading(path):
        content = parse_json(read_small(path), "the manifest")
        if not isinstance(content, dict) or content.get("tool") != "ckpt":
            raise CorruptFile("the manifest was not written by ckpt")
        if not _is_ours(content) or content["schema"] != SCHEMA:
            raise _other_format(content)
        listed = content.get("checksums")
        files = listed.get("files") if isinstance(listed, dict) and listed.get("algorithm") == "crc32" else None
        sides = listed.get("side_files") if isinstance(listed, dict) else None
        heads = listed.get("headers") if isinstance(listed, dict) else None
        try:
            side_checksums = {str(name): int(crc, 16) for name, crc in (sides or {}).items()}
            headers = {str(name): int(crc, 16) for name, crc in (heads or {}).items()}
            checksums = {file: {name: int(crc, 16) for name, crc in known.items()} for file, known in (files or {}).items()}
            outputs = {str(name): int(size) for name, size in content["outputs"].items()}
            side_sizes = {str(name): int(size) for name, size in (content.get(SIDE_SIZES) or {}).items()}
        except (AttributeError, OverflowError, TypeError, ValueError):
            raise CorruptFile("the manifest lists invalid sizes or checksums") from None
    side = tuple(name for name in content["side_files"] if isinstance(name, str))
    return Manifest(
        command=str(content.get("command")),
        options=content["options"],
        outputs=outputs,
        side_files=side,
        checksums=checksums,
        side_checksums=side_checksums,
        facts=content,
        headers=headers,
        side_sizes=side_sizes,
    )


def watched_manifest(folder: Path, files: Files) -> tuple[Watched, ...]:
    """The manifest of a folder as it is now, to be asked for before it is read; nothing if it has none, or none that can be opened."""
    try:
        return (files.source(folder / NAME),) if is_file(folder / NAME) else ()
    except CkptError:
        return ()  # what cannot be read says nothing


def _listed(value: object) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()


def _is_ours(content: object) -> TypeGuard[dict[str, Any]]:
    if not isinstance(content, dict) or content.get("tool") != "ckpt" or not isinstance(content.get("schema"), int):
        return False
    return all(isinstance(content.get(key), kind) for key, kind in KINDS.items())


def _other_format(content: Mapping[str, Any]) -> CorruptFile:
    """The error for a manifest that another ckpt wrote in another form."""
    schema, versions = content.get("schema"), content.get("versions")
    writer = versions.get("ckpt") if isinstance(versions, Mapping) else None
    by = f", written by ckpt {printable(writer)}" if isinstance(writer, str) else ""
    lacking = [key for key, kind in KINDS.items() if not isinstance(content.get(key), kind)]
    told = f"has format {str(schema)[:20]}" if type(schema) is int else "has no format"
    if schema == SCHEMA:
        told = f"has no {few(lacking)}, as those of the first versions or damaged ones"
    return CorruptFile(
        f"the manifest {told}{by}",
        expected=f"a manifest of format {SCHEMA} with {', '.join(KINDS)}",
        hint="read it with the ckpt that wrote it, or merge again",
    )


def publishing(names: Iterable[str], run: str) -> dict[str, Any]:
    """The content of `PUBLISHING` for the files with these names, which a run is writing."""
    return {"tool": "ckpt", "schema": SCHEMA, "run": run, "publishing": sorted(set(names))}


def foreign_entries(folder: Path) -> list[str] | None:
    """What a folder holds besides what its manifest lists; None if it has no manifest of a complete output of ckpt, nor `PUBLISHING`.

    Raises Unreadable if that cannot be told.
    """
    listed = [*_names_listed(_content(folder / NAME)), *_listed(_unfinished(folder).get("publishing"))]
    if not listed:
        return None
    return list(_foreign(folder, "", {NAME, PUBLISHING, *listed}))


def _foreign(folder: Path, above: str, known: set[str]) -> Iterator[str]:
    """What a folder holds besides the ``known`` files, also in folders of these."""
    for entry in entries_in(folder):
        name = f"{above}{entry.name}"
        if any(each.startswith(f"{name}/") for each in known) and is_folder(entry) and not os.path.islink(entry):
            yield from _foreign(entry, f"{name}/", known)
        elif (name not in known or not is_file(entry)) and not is_still_open(entry.name):
            yield name


def is_unfinished(folder: Path) -> bool:
    """Whether a folder is an output that is not whole: being published, killed at that, or written by two runs. Raises Unreadable."""
    return bool(_unfinished(folder))


def unfinished_error(folder: Path, there: Folders) -> IncompleteError | None:
    """Why a folder that `PUBLISHING` marks is not read; None if it is not marked. ``there``: what was seen of folders before."""
    if not there.is_file(folder / PUBLISHING):
        return None
    return IncompleteError(
        "this output is not whole: a run is writing it, was interrupted while its files got their names, or met another run there",
        path=folder,
        expected=f"no {PUBLISHING} in the folder",
        hint="wait for the run that writes it, or run its command again",
    )


def refuse_unfinished(folder: Path, there: Folders | None = None) -> None:
    """Raise IncompleteError for a folder that `PUBLISHING` marks."""
    error = unfinished_error(folder, there or Folders())
    if error is not None:
        raise error


def _unfinished(folder: Path) -> dict[str, Any]:
    content = _content(folder / PUBLISHING)
    return content if isinstance(content, dict) and content.get("tool") == "ckpt" else {}


def _content(path: Path) -> Any:
    """A JSON file, None if there is none."""
    try:
        return parse_json(read_small(path))
    except Unreadable:
        raise
    except CkptError:
        return None


def _names_listed(content: object) -> list[str]:
    """The files that a manifest of a complete output lists, with its own name; nothing otherwise."""
    if not _is_ours(content) or content["options"].get("in_place"):
        return []
    return [NAME, *content["outputs"], *_listed(content["side_files"])]
