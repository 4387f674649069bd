"""``metadata.pkl`` of torch_checkpointing: how each item of a save was distributed, and in which files its ranks put it.

Facts, read in the sources of torch_checkpointing 0.1 and in files that it wrote (version "2.0" of its metadata):

- The file is the pickle of a plain dict: ``{"metadata": {item: {"nested_path_to_metadata", "rank_to_layout_info"}}, "world_size",
  "version"}``. It is written by rank 0, and only if an item has a resharder; items without one are not listed in it.
- A nested path is JSON: ``'["layers.0.weight"]'``. It has one entry per mesh that the tensor lies on: the ranks of the mesh, and
  ``DTensorShardingMetadata`` (global shape, ranks of the mesh in C order, placements) or ``default_tensor_v1`` (boxes of one rank).
- A layout is None for ``<item>_<rank>.pt``, else the path of a file below the folder and how it is written.
- Paths come in no order.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.boxes import Box, Shape
from ckpt_cli.errors import CorruptFile, Unsupported, reading
from ckpt_cli.files.folders import stays_inside
from ckpt_cli.files.pickle_reader import load_pickle
from ckpt_cli.files.source import Files, FileSource
from ckpt_cli.files.torch_file import MAX_PICKLE, dimensions
from ckpt_cli.formats.base import MAX_RANKS
from ckpt_cli.formats.rank_files.dtensor import MAX_FACTOR, Placement
from ckpt_cli.names import printable

METADATA = "metadata.pkl"
VERSIONS = ("2.0",)
ITEM_FILE = re.compile(
    r"(?P<item>(?!.*[._-]rank_)[A-Za-z0-9][A-Za-z0-9_.-]{0,99})_(?P<rank>[0-9]{1,7})\.(?P<suffix>pt|safetensors|json)", re.ASCII
)
"""How the library names the files of an item, unless a layout says otherwise. verl's ``..._rank_R.pt`` is no item."""

FORMATS = {"TorchSerialization": "torch", "SafetensorsSerialization": "safetensors", "JsonSerialization": "json", "RawSerialization": "raw"}
FORM_OF = {"pt": "torch", "safetensors": "safetensors", "json": "json"}
"""How a file is written, by the ending of its name."""

NestedPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """A tensor of one mesh: its whole shape, how it is placed, and the ``ranks`` of the mesh in C order of ``mesh_shape``."""

    shape: Shape
    placements: tuple[Placement, ...]
    names: tuple[str, ...]
    mesh_shape: Shape
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Boxes:
    """A tensor of one rank whose parts say where they lie: pairs of a box of the whole, and where it begins in the stored tensor."""

    shape: Shape
    boxes: tuple[tuple[Box, Shape], ...]


Sharding = Spread | Boxes


@dataclass(frozen=True, slots=True)
class ItemFile:
    """Where a rank put an item, below the checkpoint's folder, and how it is written (a value of `FORMATS`)."""

    path: str
    form: str


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a save: the file of each rank, and the sharding of each tensor by rank."""

    files: Mapping[int, ItemFile]
    tensors: Mapping[NestedPath, Mapping[int, Sharding]]


@dataclass(frozen=True, slots=True)
class Saved:
    """What ``metadata.pkl`` says. ``items`` are those that can be resharded: others have files and are not in it."""

    world_size: int
    items: Mapping[str, Item]


def read_metadata(path: Path, files: Files) -> Saved:
    """The metadata of a save. Raises CorruptFile, or Unsupported for another version than is known."""
    return files.parsed(path, _parsed)


def _parsed(source: FileSource) -> Saved:
    with reading(source.path):
        if source.size > MAX_PICKLE:
            raise CorruptFile(f"{source.size} bytes is too large for metadata", expected=f"at most {MAX_PICKLE} bytes")
        root, end = load_pickle(source.read(0, source.size))
        if end != source.size:
            raise CorruptFile("bytes follow the pickle")
        try:
            return _saved(root)
        except (TypeError, ValueError, AttributeError, LookupError, RecursionError, OverflowError):
            raise CorruptFile("this is not metadata of torch_checkpointing", expected="a dict of items and a world size") from None


def _saved(root: Mapping[str, Any]) -> Saved:
    version = root.get("version")
    if version not in VERSIONS:
        told = printable(version) if isinstance(version, str) else "none"
        raise Unsupported(f"version {told} of torch_checkpointing's metadata is not known", expected=f"version {VERSIONS[0]}")
    world_size = root["world_size"]
    if type(world_size) is not int or not 1 <= world_size <= MAX_RANKS:
        raise CorruptFile("the world size is impossible", expected=f"a number from 1 to {MAX_RANKS}")
    return Saved(world_size, {_item_name(key): _item(key, value, world_size) for key, value in root["metadata"].items()})


def _item_name(key: object) -> str:
    if not isinstance(key, str) or not key or not stays_inside(f"{key}_0.pt") or "/" in key:
        raise CorruptFile("the name of an item is none of a file")
    return key


def _item(name: str, described: Mapping[str, Any], world_size: int) -> Item:
    layouts = described["rank_to_layout_info"]
    if set(map(int, layouts)) != set(range(world_size)):
        raise CorruptFile(f"item {printable(name)} does not have a file of each rank")
    files = {int(rank): _file(name, int(rank), layout) for rank, layout in layouts.items()}
    tensors: dict[NestedPath, Mapping[int, Sharding]] = {}
    known: dict[int, Sharding] = {}
    for text, entries in described["nested_path_to_metadata"].items():
        path = tuple(json.loads(text))
        if not all(isinstance(part, str) or type(part) is int for part in path):
            raise CorruptFile("a path of an item is not made of names and numbers")
        by_rank: dict[int, Sharding] = {}
        for entry in entries:
            packed, ranks = entry["sharding_metadata"], entry["ranks"]
            sharding = known.get(id(packed)) or known.setdefault(id(packed), _sharding(packed))
            for rank in ranks:
                if type(rank) is not int or not 0 <= rank < world_size or rank in by_rank:
                    raise CorruptFile(f"the metadata gives {_text(path)} twice to a rank, or to one that is not there")
                by_rank[rank] = sharding
        tensors[path] = by_rank
    return Item(files, tensors)


def _file(item: str, rank: int, layout: Any) -> ItemFile:
    if layout is None:
        return ItemFile(f"{item}_{rank}.pt", "torch")
    path, form = layout["file_path"], FORMATS.get(layout["serialization_format"]["type"])
    if not stays_inside(path):
        raise CorruptFile("a file of an item lies outside of the checkpoint", expected="a path below its folder")
    if form is None:
        raise Unsupported(f"item {printable(item)} is written in a way that is not known")
    return ItemFile(path, form)


def _sharding(packed: Mapping[str, Any]) -> Sharding:
    kind, data = packed["type"], packed["data"]
    shape = dimensions(data["global_shape"])
    if kind == "DTensorShardingMetadata":
        mesh = data["mesh_spec"]
        mesh_shape, ranks = dimensions(mesh["mesh_shape"]), tuple(mesh["mesh_data"])
        placements = tuple(_placement(entry, len(shape), max(MAX_FACTOR, len(ranks))) for entry in data["placements"])
        distinct = len(set(ranks)) == len(ranks) and all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in ranks)
        if math.prod(mesh_shape) != len(ranks) or len(placements) != len(mesh_shape) or not distinct:
            raise CorruptFile("a mesh does not fit its ranks or placements")
        names = mesh["mesh_dim_names"]
        named = isinstance(names, tuple) and len(names) == len(mesh_shape) and all(isinstance(name, str) for name in names)
        return Spread(shape, placements, names if named else tuple(f"dim{i}" for i in range(len(mesh_shape))), mesh_shape, ranks)
    if kind == "default_tensor_v1":
        corners = zip(data["global_offsets"], data["local_offsets"], data["local_sizes"], strict=True)
        boxes = tuple((Box(dimensions(start), dimensions(size)), dimensions(inside)) for start, inside, size in corners)
        for box, inside in boxes:
            fits = len(box.offset) == len(box.extent) == len(inside) == len(shape)
            if not fits or any(a + n > size for a, n, size in zip(box.offset, box.extent, shape, strict=True)):
                raise CorruptFile(f"a part {box} lies outside of its tensor of shape {list(shape)}")
        return Boxes(shape, boxes)
    raise Unsupported(f"sharding of kind {printable(kind)[:60]} is not known", hint="a newer version of ckpt may read it")


def _placement(entry: Mapping[str, Any], rank: int, most: int) -> Placement:
    kind, dim, factor = entry["type"], entry.get("dim", 0), entry.get("split_factor", 1)
    if kind == "Replicate":
        return Placement(kind)
    if kind not in ("Shard", "StridedShard"):
        raise Unsupported(f"placement {printable(kind)[:60]} is not known")
    if type(dim) is not int or type(factor) is not int or not -rank <= dim < rank or not 1 <= factor <= most:
        raise CorruptFile(f"a {kind} placement is invalid")
    return Placement("Shard" if kind == "Shard" else "_StridedShard", dim % rank, factor)


def _text(path: Sequence[str | int]) -> str:
    return printable(".".join(map(str, path)))[:100]
