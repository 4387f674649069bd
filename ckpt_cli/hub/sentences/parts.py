"""The parts of a model of sentence-transformers, each in a folder of its own: what modules.json and the file of a Router name."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders, is_folder, stays_inside
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.assets import CONFIG, MODULES
from ckpt_cli.hub.beside.names import ROUTER_CONFIG, has_weight_suffix
from ckpt_cli.names import few, printable
from ckpt_cli.tensors.component import Note

EMPTY = "Normalize"
"""The part that has no files: repositories of the hub do not keep its folder."""

WITH_WEIGHTS = frozenset(
    {
        "Transformer", "MLMTransformer", "CLIPModel", "StaticEmbedding", "WordEmbeddings", "Dense", "LSTM", "CNN", "LayerNorm",
        "WeightedLayerPooling", "SparseAutoEncoder",
    }
)  # fmt: skip
"""Classes of parts that do not load without weights. Those of `Pooling`, `Dropout`, `BoW` and others have none."""

ROUTERS = frozenset({"Router", "Asym"})
"""Parts made of others, which a file in their folder names: `ROUTER_CONFIG`, formerly config.json."""


def parts_of(modules: Path) -> dict[str, str]:
    """The folders that a modules.json names, and the Routers in it, each with the name of the class of what is in it."""
    parts = dict[str, str]()
    for path, kind in _modules(modules):
        parts |= {path: kind} if path else {}
        if kind in ROUTERS and (not path or stays_inside(path)):
            routed = _routed(modules.parent / path) or {}
            parts |= {f"{path}/{name}" if path else name: _class(each) for name, each in routed.items() if name}
    return parts


def parts_gone(modules: Path) -> list[str]:
    """The folders that a modules.json names, that are not beside it, and without which the model does not load."""
    needed = (part for part, kind in parts_of(modules).items() if kind != EMPTY and stays_inside(part))
    return [printable(part) for part in needed if not is_folder(modules.parent / part)]


def parts_without_weights(modules: Path) -> list[str]:
    """The folders that a modules.json names, that are beside it without the weights that what is in them is loaded from."""
    needed = (part for part, kind in parts_of(modules).items() if kind in WITH_WEIGHTS and stays_inside(part))
    return [printable(part) for part in needed if is_folder(modules.parent / part) and not _holds_weights(modules.parent / part)]


def lost_own_weights(modules: Path) -> bool:
    """Whether a modules.json names a model in its own folder, and only folders of other parts there hold weights."""
    own = any(not path and kind in WITH_WEIGHTS for path, kind in _modules(modules))
    return own and not _holds_weights(modules.parent, apart=parts_of(modules))


def routers_without_file(modules: Path) -> list[str]:
    """The files that Routers in a modules.json do not load without, and that are not there."""
    routers = (path for path, kind in _modules(modules) if kind in ROUTERS and (not path or stays_inside(path)))
    lacking = (path for path in routers if is_folder(modules.parent / path) and _routed(modules.parent / path) is None)
    return [printable(f"{path}/{ROUTER_CONFIG}" if path else ROUTER_CONFIG) for path in lacking]


def part_notes(files: Mapping[str, Path]) -> list[Note]:
    """Warnings about the parts that side ``files`` name: only the weights of one model are written."""
    modules = files[MODULES]
    home, parts, notes = modules.parent, parts_of(modules), list[Note]()
    if lost := routers_without_file(modules):
        text = f"{MODULES} names a Router, which does not load without {few(lost)}: {_is(lost)} not in {home}"
        notes.append(Note("warning", "lacks-part", text))
    if parts:
        gone, hollow = parts_gone(modules), parts_without_weights(modules)
        told = [f"{few(gone)} {_is(gone)} not in {home} either"] if gone else []
        told += [f"{few(hollow)} in {home} {'holds' if len(hollow) == 1 else 'hold'} no weights"] if hollow else []
        told = told or [f"copy them from {home}"]
        if own := [part for part in parts if any(path.parent == home / part for path in files.values())]:
            told += [f"the model that belongs in {home} itself has no weights there"] if lost_own_weights(modules) else []
            told.append(f"the weights are those of {few(list(map(printable, own)))}, and are loaded from a folder of that name")
        named = few(list(map(printable, parts)))
        notes.append(Note("warning", "lacks-part", f"{MODULES} names {named}, folders that are not written: {'; '.join(told)}"))
    return notes


def _modules(modules: Path) -> Iterator[tuple[str, str]]:
    """The folder of each module, which is empty for the model's own, and its class; what cannot be read is found by other checks."""
    listed = _content(modules)
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and isinstance(path := entry.get("path"), str):
            yield path, _class(entry.get("type"))


def _routed(folder: Path) -> dict[str, Any] | None:
    """The folders that a Router names in its own, each with its class; None if no file does."""
    for content in (_content(folder / name) for name in (ROUTER_CONFIG, CONFIG)):
        if isinstance(content, dict) and isinstance(types := content.get("types"), dict):
            return types
    return None


def _content(path: Path) -> Any:
    with contextlib.suppress(CkptError):
        return parse_json(read_small(path))
    return None


def _class(kind: object) -> str:
    """The name of a class of which the whole path is given, as newer versions write it: ``...modules.dense.Dense``."""
    return str(kind).rpartition(".")[2]


def _holds_weights(folder: Path, apart: Collection[str] = ()) -> bool:
    """Whether there are weights of any form in a folder, or in one that a library has for them there (``onnx/``); not ``apart``."""
    there = Folders()
    with contextlib.suppress(CkptError):
        return any(there.files(each, has_weight_suffix) for each in (folder, *there.folders(folder, lambda name: name not in apart)))
    return True  # nothing shows that there are none


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
