"""Hugging Face model folders: one safetensors file, or several with an index."""

from __future__ import annotations

import re
from pathlib import Path, PureWindowsPath
from typing import Any

from ckpt_cli.errors import CorruptFile, Inconsistent, MissingShard, reading
from ckpt_cli.files import Files, read_small
from ckpt_cli.formats.base import Match, ReadOptions
from ckpt_cli.geometry import contiguous_strides, whole
from ckpt_cli.model import Component, Piece, Tensor
from ckpt_cli.names import check_name
from ckpt_cli.safetensors_file import Entry, parse_json, read_header

FORMAT = "safetensors"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PART = re.compile(r"model-[0-9]+-of-[0-9]+\.safetensors", re.ASCII)


class HubFolder:
    """Reader of safetensors files and folders."""

    name = FORMAT

    def recognise(self, path: Path) -> list[Match]:
        if path.is_file():
            if path.name.endswith(".safetensors.index.json"):
                return [Match(FORMAT, "model", path.parent, (path,), f"index {path.name}")]
            if path.suffix == ".safetensors":
                return [Match(FORMAT, "model", path, (path,), "a safetensors file")]
            return []
        if (path / INDEX).is_file():
            return [Match(FORMAT, "model", path, (path / INDEX,), f"index {INDEX}")]
        if (path / SINGLE).is_file():
            return [Match(FORMAT, "model", path, (path / SINGLE,), SINGLE)]
        try:
            parts = sorted(entry for entry in path.iterdir() if PART.fullmatch(entry.name))
        except OSError:
            return []
        if parts:
            trouble = f"{INDEX} is missing; {len(parts)} parts without it prove nothing"
            return [Match(FORMAT, "model", path, tuple(parts), "parts of a model without an index", trouble=trouble)]
        return []

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        if match.trouble:
            raise MissingShard(match.trouble, path=match.root / INDEX, hint="copy the index from where the model came from")
        first = match.files[0]
        if first.suffix != ".json":
            header = read_header(source := files.source(first))
            entries = [(entry, source) for entry in header.entries]
            paths: tuple[Path, ...] = (first,)
            metadata = header.metadata
        else:
            weight_map = _weight_map(first)
            names = sorted(set(weight_map.values()))
            absent = [name for name in names if not (first.parent / name).is_file()]
            if absent:
                raise MissingShard(
                    f"{len(absent)} of {len(names)} weight files are missing: {', '.join(absent[:5])}",
                    path=first,
                    expected=str(first.parent / absent[0]),
                    hint="copy the missing files from where the model came from",
                )
            entries, metadata = [], {}
            for name in names:
                header = read_header(source := files.source(first.parent / name))
                metadata = dict(header.metadata)
                with reading(source.path):
                    _check_index(weight_map, name, header.entries)
                entries += [(entry, source) for entry in header.entries]
            order = {name: i for i, name in enumerate(weight_map)}
            entries.sort(key=lambda item: order[item[0].name])
            paths = (first, *(first.parent / name for name in names))
        tensors = {check_name(entry.name): _tensor(entry, source) for entry, source in entries}
        return Component(match.component, FORMAT, match.root, tensors, paths, writer=match.evidence, metadata=metadata)


def _tensor(entry: Entry, source: Any) -> Tensor:
    piece = Piece(source, entry.offset, contiguous_strides(entry.shape), whole(entry.shape))
    return Tensor(entry.name, entry.dtype, entry.shape, (piece,) if entry.nbytes else ())


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name. A file name must be a plain path inside the folder, with the extension of the index.

    The rule is that of huggingface_hub (serialization/_torch.py): parsed as a Windows path on every system, so that no
    drive, root or ".." gets through.
    """
    with reading(index):
        content = parse_json(read_small(index), "the index")
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CorruptFile("the index has no weight_map")
        for name, file in weight_map.items():
            parsed = PureWindowsPath(file) if isinstance(file, str) else None
            if parsed is None or parsed.drive or parsed.root or ".." in parsed.parts or parsed.suffix != ".safetensors" or "\0" in file:
                raise CorruptFile(
                    "the index names a file outside of its folder or of another format", tensor=name, expected="a .safetensors file"
                )
        return weight_map


def _check_index(weight_map: dict[str, str], file: str, entries: tuple[Entry, ...]) -> None:
    inside = {entry.name for entry in entries}
    for name, owner in weight_map.items():
        if owner == file and name not in inside:
            raise Inconsistent("the index says that this tensor is in the file, but it is not", tensor=name)
    for name in inside:
        if weight_map.get(name) != file:
            hint = "files of two models were mixed"
            raise Inconsistent("the file holds a tensor that the index does not assign to it", tensor=name, hint=hint)
