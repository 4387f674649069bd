"""Folders of side files beside the folder that was passed: ``out/tokenizer`` and ``out/components/processor`` of ``out/model``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ckpt_cli.discover.around.side_folders import (
    COMPONENTS,
    IN_PARTS,
    IN_STEPS,
    MOST_INNER,
    TOKENIZERS,
    holds_more,
    is_well_named,
    kinds_in,
    may_be_inner,
    rivals,
    words_of,
)
from ckpt_cli.discover.beside.folders import files_with_weights, is_searched, kind_of
from ckpt_cli.discover.found import Found
from ckpt_cli.errors import CkptError, Unreadable
from ckpt_cli.files.folders import Folders, is_file
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.formats.registry import recognise
from ckpt_cli.formats.step_names import is_like_step, step_of
from ckpt_cli.hub.peft_names import ADAPTER_CONFIG
from ckpt_cli.paths import absolute
from ckpt_cli.urls import is_remote

OF_ONE_MODEL = IN_STEPS | {
    *("adapter", "best", "bf16", "dcp", "dist", "distcp", "finetuned", "fp16", "fp32", "fsdp", "full", "last", "latest", "lora", "merged"),
    *("net", "peft", "pytorch", "safetensors", "sharded", "state", "trained", "weights"),
}
"""What a folder with the weights is called as a part of what a training left: the name of a run would say that others lie beside it."""

MOST_FOLDERS = 64
"""Folders that are listed to see whether another model lies there: where there are more, nothing is certain."""


def near_homes(found: Found) -> list[Path]:
    """Those whose side files are certainly those of the weights: they are called so, and no other model lies in the folder around."""
    homes: list[Path] = []
    for path, there in _spots(found):
        with contextlib.suppress(CkptError):  # what cannot be looked at is nothing that was looked for
            held = _side_folders(path, there)
            named = {folder: kinds for folder, kinds in held.items() if is_well_named(folder.name)}
            words = {word for word in words_of(path.name) if not word.isdecimal()}
            if named and words <= OF_ONE_MODEL and not _holds_another(path, there):
                homes += [folder for folder in named if not rivals(folder, named)]
    return list(dict.fromkeys(homes))


def near_folders(found: Found) -> list[Path]:
    """Those that may be, and the folder around where it has no weights of its own."""
    folders: list[Path] = []
    for path, there in _spots(found):
        with contextlib.suppress(CkptError):
            around = path.parent
            folders += _side_folders(path, there)
            if not any(there.is_file(around / name) for name in IN_PARTS) and not _has_weights(around, there):
                folders.append(around)
    return list(dict.fromkeys(folders))


def _spots(found: Found) -> Iterator[tuple[Path, Folders]]:
    """What was passed, and where a link to it leads; nothing of a step, whose run has its side files, of outputs and of stores."""
    given = found.path.parent if found.is_file else found.path
    if found.step is not None or is_remote(given) or is_file(given / MANIFEST):
        return
    path = given if given.name not in ("", "..") else Path(absolute(given))
    there = Folders()
    for each in dict.fromkeys((path, Path(os.path.realpath(path)) if path.is_symlink() else path)):
        if each.name and step_of(each.parent) is None:
            yield each, there


def _side_folders(path: Path, there: Folders) -> dict[Path, dict[str, Path]]:
    around = path.parent
    if any(there.is_file(around / name) for name in IN_PARTS):
        return {}
    folders = there.folders(around, _is_called_so)[:MOST_INNER]
    folders += there.folders(around / COMPONENTS, may_be_inner)[:MOST_INNER] if there.is_folder(around / COMPONENTS) else []
    held = {}
    for folder in (folder for folder in folders if folder != path):
        with contextlib.suppress(CkptError):
            kinds = kinds_in(folder, there)
            if kinds and not holds_more(folder, there):
                held[folder] = kinds
    return held


def _is_called_so(name: str) -> bool:
    return may_be_inner(name) and (is_well_named(name) or TOKENIZERS.fullmatch(name) is not None)


def _holds_another(path: Path, there: Folders) -> bool:
    """Whether other weights lie in the folder around than those of steps, averages and outputs, also where that is not seen at once."""
    if _has_weights(path.parent, there):
        return True
    beside = [folder for folder in there.folders(path.parent, _may_be_another) if folder != path]
    looked = 0
    for folder in beside:
        if there.is_file(folder / MANIFEST) or (folder.is_symlink() and os.path.realpath(folder) == os.path.realpath(path)):
            continue
        try:
            inner = there.folders(folder, is_searched)
            looked += 1 + len(inner)
            if looked > MOST_FOLDERS or any(step_of(each) is not None for each in inner):
                return True
            if any(_has_weights(each, there) for each in (folder, *inner)):
                return True
        except Unreadable:
            return True
    return False


def _may_be_another(name: str) -> bool:
    return is_searched(name) and not is_like_step(name) and kind_of(name) != "average"


def _has_weights(folder: Path, there: Folders) -> bool:
    return bool(there.is_file(folder / ADAPTER_CONFIG) or recognise(folder, there) or files_with_weights(folder, there))
