"""The asset files that one folder has: by their names, and the code that its configs name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import Watched, read_small, side_file
from ckpt_cli.hub.beside.model_config import no_model_config
from ckpt_cli.hub.beside.names import (
    AUXILIARY,
    CONFIG,
    MAX_UNKNOWN,
    NO_ASSETS,
    OF_FOLDERS,
    OF_ROBOT_PROCESSOR,
    OF_VOCABULARY,
    PARAMS,
    ROBOT_ASSETS,
    VOCABULARIES,
    folder_read,
    has_weight_suffix,
    is_asset_name,
    is_doubtful,
    is_put_aside,
    is_unknown,
)
from ckpt_cli.hub.beside.near_names import is_near_some
from ckpt_cli.hub.beside.processors import PROCESSOR
from ckpt_cli.hub.custom_code import custom_code

OF_BAGEL = ("llm_config.json", "ema.safetensors")
NO_CODE = VOCABULARIES | OF_VOCABULARY
MAX_CONFIG = 4 << 20
"""Bytes of a config; what is larger is a vocabulary."""

DEPTHS = {ROBOT_ASSETS: 3}
"""Levels of folders that are looked at below one of `OF_FOLDERS`, where there are several."""

MOST_INNER = 64
"""Folders of one level there."""


class Seen(dict[Path, Watched]):
    """Files as they were before anything was read of them."""

    def at(self, path: Path) -> Watched:
        """A file as it was when it was first asked for. Raises what opening raises."""
        return self[path] if path in self else self.setdefault(path, side_file(path))


@dataclass(frozen=True, slots=True)
class Listed:
    """The asset files of a ``folder`` by name; one in a folder of it is called like its path there.

    ``broken`` are links that lead nowhere. ``no_configs`` are files named config.json that hold something else, and what; ``aside`` are
    copies, archives, arrays and pickles that a library may need, and large unknown files. ``near`` have names that are nearly those of
    others.
    """

    folder: Path
    files: Mapping[str, Path]
    broken: tuple[Path, ...] = ()
    no_configs: Mapping[Path, str] = field(default_factory=dict)
    aside: tuple[Path, ...] = ()
    near: tuple[Path, ...] = ()

    def only(self, wanted: Callable[[str], object]) -> dict[str, Path]:
        return {name: path for name, path in self.files.items() if wanted(name)}


def listed(folder: Path, seen: Seen, *, everything: bool, configs: Callable[[], Sequence[Any]] = list) -> Listed:
    """What a folder has: by name, or ``everything`` that is no weights; code that its configs (or ``configs``) name.

    Raises Unreadable.
    """

    def matters(name: str) -> bool:
        weights = has_weight_suffix(name) or NO_ASSETS.fullmatch(name) is not None or name == MANIFEST
        return name.endswith(".py") or is_asset_name(name) or name == AUXILIARY or (everything and not weights and not name.startswith("."))

    there = Folders()
    present = there.files(folder, matters)
    # What a loader needs may lie behind a link to a disk that is not mounted: that is not nothing.
    broken = [path for path in there.entries(folder) if path.suffix != ".py" and matters(path.name) and there.is_broken(path)]
    inner = [path for each in there.folders(folder, OF_FOLDERS.__contains__) for path in there.entries(each)]
    broken += [path for path in inner if folder_read(f"{path.parent.name}/{path.name}") is not None and there.is_broken(path)]
    bagel = any(path.name in OF_BAGEL for path in present)
    found = {path.name: path for path in present if path.suffix != ".py" and (path.name != AUXILIARY or bagel)}
    aside: list[Path] = []
    if everything:
        aside = [path for path in found.values() if is_put_aside(path.name) or (is_unknown(path.name) and _is_large(path, seen))]
        found = {name: path for name, path in found.items() if path not in aside}
        aside += there.files(folder, lambda name: has_weight_suffix(name) and is_doubtful(name))
    no_configs: dict[Path, str] = {}
    if CONFIG in found:
        seen.at(found[CONFIG])
        why = no_model_config(found[CONFIG])
        if why is not None:
            no_configs[found.pop(CONFIG)] = why
    found |= {path.name: path for path in there.files(folder, PARAMS.__eq__) if no_model_config(path) is None}
    if PROCESSOR in found:
        found |= {path.name: path for path in there.files(folder, OF_ROBOT_PROCESSOR.__contains__)}
    modules = {path.stem: path for path in present if path.suffix == ".py"}
    code = custom_code(modules, [*json_of(found.values(), seen), *configs()], folder) if modules else {}
    read = _read_by(code.values(), there.files(folder, is_unknown) if code else [])
    near = tuple(there.files(folder, is_near_some))
    return Listed(folder, found | code | read | _in_folders(folder, there), tuple(broken), no_configs, tuple(aside), near)


def _in_folders(folder: Path, there: Folders) -> dict[str, Path]:
    """What is loaded from folders in the folder, by its path there."""
    found = dict[str, Path]()
    for each in there.folders(folder, OF_FOLDERS.__contains__):
        level = [each]
        for _ in range(DEPTHS.get(each.name, 1)):
            names = {path.relative_to(folder).as_posix(): path for inner in level for path in there.files(inner)}
            found |= {name: path for name, path in names.items() if folder_read(name) is not None}
            level = [child for inner in level for child in there.folders(inner)][:MOST_INNER]
    return found


def home_of(name: str, path: Path) -> Path:
    """The folder that an asset is loaded from, also one in a folder of that."""
    return path.parents[name.count("/")]


def json_of(paths: Iterable[Path], seen: Seen) -> list[Any]:
    """The content of JSON files. An unreadable one names no code; whether it may be broken is not decided here."""
    found = []
    for path in paths:
        if path.suffix == ".json" and path.name not in NO_CODE and seen.at(path).identity.size <= MAX_CONFIG:
            with contextlib.suppress(CkptError):
                found.append(parse_json(read_small(path), path.name))
    return found


def _is_large(path: Path, seen: Seen) -> bool:
    return seen.at(path).identity.size > MAX_UNKNOWN


def _read_by(code: Iterable[Path], files: Sequence[Path]) -> dict[str, Path]:
    """The files that custom code names, such as a vocabulary of its tokenizer. Weights and pickles are none of them."""
    sources = []
    for path in code if files else ():
        with contextlib.suppress(CkptError):
            sources.append(read_small(path).decode("utf-8", "replace"))
    named = {path.name: path for path in files if any(f"{quote}{path.name}{quote}" in text for text in sources for quote in "\"'")}
    return {name: path for name, path in named.items() if not has_weight_suffix(name)}
