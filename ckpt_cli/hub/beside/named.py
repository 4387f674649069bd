"""The files that other side files name as a part of them: they go with these, from the folder that these are from.

The processors of lerobot's policies keep means and deviations in safetensors of their own, and tokenizers in folders: JSON files name them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import files_in, is_file, is_folder, stays_inside
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.source import size_of
from ckpt_cli.hub.beside.listed import MAX_CONFIG
from ckpt_cli.hub.beside.names import (
    MAX_UNKNOWN,
    NO_ASSETS,
    OF_VOCABULARY,
    TOKENIZER_CONFIG,
    VOCABULARIES,
    has_weight_suffix,
    is_asset_name,
)
from ckpt_cli.hub.beside.processors import content_of
from ckpt_cli.hub.config import Config
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

STATE = "state_file"
"""The entry without which what names it does not load."""

ARTIFACTS = "artifacts"
"""The entry of what a processor keeps in files or folders of its own, by the entry of its config that names each: lerobot's tokenizers."""

STATISTICS = re.compile(r"(\w+_)?(stats|statistics)(_(file|path|filename))?", re.ASCII)
"""Entries that name a file with numbers of the training data, or hold these themselves."""

FONT = "font"
"""The entry that names the font which a processor of videos (ERNIE 4.5 VL) writes times into pictures with."""

ARRAYS = (".safetensors", ".npy", ".npz")
"""Endings of weights that are no pickles, and may be small."""

OF_MODEL = re.compile(r"(diffusion_)?(pytorch_|adapter_)?model([._-].*)?|consolidated([._-].*)?", re.ASCII)
"""The names that loaders find weights of a model by."""

NAMING_NONE = VOCABULARIES | OF_VOCABULARY | {TOKENIZER_CONFIG}


@dataclass(frozen=True, slots=True)
class Lack:
    """What the file ``by`` does not load without, and is not passed on: its ``name`` in a model folder, and where it would be."""

    name: str
    by: Path
    place: Path


@dataclass(frozen=True, slots=True)
class Named:
    """The ``files`` that others name, by their names in a model folder, and those that they lack."""

    files: Mapping[str, Path]
    lacking: tuple[Lack, ...]


def named_by(files: Mapping[str, Path]) -> Named:
    """What side files by name, those of JSON, name as a part of them."""
    found, lacking = dict[str, Path](), list[Lack]()
    for name, path in files.items():
        if path.suffix != ".json" or name in NAMING_NONE:
            continue
        content = _small_content(path)
        for value in filter(stays_inside, _artifacts(content)):
            inside, place = (PurePosixPath(name).parent / value).as_posix(), path.parent / value
            held = {inside: place} if not is_folder(place) else {f"{inside}/{each.name}": each for each in files_in(place, str)}
            held = {own: each for own, each in held.items() if _is_passed_on(each)}
            found |= held
            if not held:
                lacking.append(Lack(inside, path, place))
        for key, value in _texts(content):
            if (
                (key not in (STATE, FONT) and STATISTICS.fullmatch(key) is None)
                or not stays_inside(value)
                or is_asset_name(Path(value).name)
            ):
                continue
            inside, place = (PurePosixPath(name).parent / value).as_posix(), path.parent / value
            if _is_passed_on(place):
                found[inside] = place
            elif key == STATE and files.get(inside) != place:
                lacking.append(Lack(inside, path, place))
    return Named(found, tuple(lacking))


def folders_named_in(folder: Path) -> set[Path]:
    """The folders in a folder that processors there name as a part of them: what is in these is not for the folder around them."""
    processors = files_in(folder, lambda name: name.endswith("processor.json"))
    return {folder / value for path in processors for value in _artifacts(_small_content(path)) if stays_inside(value)}


def not_passed_on(lacking: Sequence[Lack]) -> list[Note]:
    """Warnings about what side files need and is not written."""
    notes = []
    for by in dict.fromkeys(lack.by for lack in lacking):
        places = [lack.place for lack in lacking if lack.by == by]
        verb = "is" if len(places) == 1 else "are"
        why = f"{verb} not beside it" if not any(map(is_file, places)) else f"{verb} not written, as pickles and weights of a model are not"
        text = f"{by} does not load without {few([place.name for place in places], 3)}, which {why}"
        notes.append(Note("warning", "lacks-asset", text))
    return notes


def _small_content(path: Path) -> Config:
    with contextlib.suppress(CkptError):  # what cannot be read is found elsewhere
        return content_of(path) if size_of(path) <= MAX_CONFIG else {}
    return {}


def _is_passed_on(path: Path) -> bool:
    """Whether a file is there and may go beside other weights: no pickle, nothing large, and no name by which loaders find a model."""
    name = path.name
    if name == MANIFEST or NO_ASSETS.fullmatch(name) is not None or (has_weight_suffix(name) and path.suffix not in ARRAYS):
        return False
    return not (has_weight_suffix(name) and OF_MODEL.fullmatch(path.stem)) and is_file(path) and size_of(path) <= MAX_UNKNOWN


def _artifacts(content: Config) -> Iterator[str]:
    """What a processor says of its artifacts: paths from the folder of its file."""
    steps = content.get("steps")
    for step in steps if isinstance(steps, list) else ():
        held = step.get(ARTIFACTS) if isinstance(step, dict) else None
        yield from (value for value in (held.values() if isinstance(held, dict) else ()) if isinstance(value, str) and value)


def _texts(content: Config) -> Iterator[tuple[str, str]]:
    """The texts at any level of an object, each with the key that it has there."""
    left: list[tuple[str, Any]] = [("", content)]
    while left:
        key, value = left.pop()
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, dict):
            left += [(str(inner), each) for inner, each in value.items()]
        elif isinstance(value, list):
            left += [(key, each) for each in value]
