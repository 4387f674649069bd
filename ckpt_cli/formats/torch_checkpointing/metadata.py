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
class SavedMesh:
    """A mesh: its ``ranks`` in C order of ``shape``. Tensors of one mesh share the object."""

    names: tuple[str, ...]
    shape: Shape
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """A tensor of one mesh: its whole shape, and how it is placed."""

    shape: Shape
    placements: tuple[Placement, ...]
    mesh: SavedMesh


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
    """An item of a save: the file of each rank, and how each tensor is sharded among some ranks."""

    files: Mapping[int, ItemFile]
    tensors: Mapping[NestedPath, Sequence[tuple[frozenset[int], Sharding]]]

    def of_rank(self, rank: int) -> dict[NestedPath, Sharding]:
        """The tensors that a rank has. Raises CorruptFile if one is described twice."""
        held: dict[NestedPath, Sharding] = {}
        for path, entries in self.tensors.items():
            own = [sharding for ranks, sharding in entries if rank in ranks]
            if len(own) > 1:
                raise CorruptFile(f"the metadata describe {printable(path_text(path))[:100]} twice for rank {rank}")
            if own:
                held[path] = own[0]
        return held


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
    items = root["metadata"]
    if not items:
        # Nothing else shows that the world size is one that was there.
        raise CorruptFile("the metadata list no item")
    reader = _Reader(world_size)
    return Saved(world_size, {_item_name(key): reader.item(key, value) for key, value in items.items()})


def _item_name(key: object) -> str:
    if not isinstance(key, str) or not key or not stays_inside(f"{key}_0.pt") or "/" in key:
        raise CorruptFile("the name of an item is none of a file")
    return key


class _Reader:
    """Reads items. What the pickle shares (meshes, lists of ranks, shardings) is read once, however often it is referred to."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._ranks: dict[int, frozenset[int]] = {}
        self._meshes: dict[int, SavedMesh] = {}
        self._shardings: dict[int, Sharding] = {}

    def item(self, name: str, described: Mapping[str, Any]) -> Item:
        layouts = described["rank_to_layout_info"]
        if len(layouts) != self._world_size or set(map(int, layouts)) != set(range(self._world_size)):
            raise CorruptFile(f"item {printable(name)} does not have a file of each rank")
        files = {int(rank): _file(name, int(rank), layout) for rank, layout in layouts.items()}
        tensors: dict[NestedPath, Sequence[tuple[frozenset[int], Sharding]]] = {}
        for text, entries in described["nested_path_to_metadata"].items():
            path = tuple(json.loads(text))
            if not all(isinstance(part, str) or type(part) is int for part in path):
                raise CorruptFile("a path of an item is not made of names and numbers")
            tensors[path] = [(self._holders(entry["ranks"]), self._sharding(entry["sharding_metadata"])) for entry in entries]
        return Item(files, tensors)

    def _holders(self, ranks: Sequence[int]) -> frozenset[int]:
        if id(ranks) not in self._ranks:
            distinct = frozenset(ranks)
            if len(distinct) < len(ranks) or not all(type(rank) is int and 0 <= rank < self._world_size for rank in distinct):
                raise CorruptFile("the metadata speak of ranks that are not there, or of one twice")
            self._ranks[id(ranks)] = distinct
        return self._ranks[id(ranks)]

    def _sharding(self, packed: Mapping[str, Any]) -> Sharding:
        if id(packed) not in self._shardings:
            kind, data = packed["type"], packed["data"]
            if kind == "DTensorShardingMetadata":
                self._shardings[id(packed)] = self._spread(data)
            elif kind == "default_tensor_v1":
                self._shardings[id(packed)] = _boxes(data)
            else:
                raise Unsupported(f"sharding of kind {printable(kind)[:60]} is not known", hint="a newer version of ckpt may read it")
        return self._shardings[id(packed)]

    def _spread(self, data: Mapping[str, Any]) -> Spread:
        shape, mesh = dimensions(data["global_shape"]), self._mesh(data["mesh_spec"])
        placements = tuple(_placement(entry, len(shape), max(MAX_FACTOR, len(mesh.ranks))) for entry in data["placements"])
        if len(placements) != len(mesh.shape):
            raise CorruptFile(f"a tensor has {len(placements)} placements on a mesh of {len(mesh.shape)} dimensions")
        return Spread(shape, placements, mesh)

    def _mesh(self, described: Mapping[str, Any]) -> SavedMesh:
        if id(described) not in self._meshes:
            shape, ranks, names = dimensions(described["mesh_shape"]), tuple(described["mesh_data"]), described["mesh_dim_names"]
            distinct = len(set(ranks)) == len(ranks) and all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in ranks)
            if math.prod(shape) != len(ranks) or not distinct:
                raise CorruptFile("the ranks of a mesh do not fill it")
            named = isinstance(names, tuple) and len(names) == len(shape) and all(isinstance(name, str) for name in names)
            self._meshes[id(described)] = SavedMesh(names if named else tuple(f"dim{i}" for i in range(len(shape))), shape, ranks)
        return self._meshes[id(described)]


def _file(item: str, rank: int, layout: Any) -> ItemFile:
    if layout is None:
        return ItemFile(f"{item}_{rank}.pt", "torch")
    path, form = layout["file_path"], FORMATS.get(layout["serialization_format"]["type"])
    if not stays_inside(path):
        raise CorruptFile("a file of an item lies outside of the checkpoint", expected="a path below its folder")
    if form is None:
        raise Unsupported(f"item {printable(item)} is written in a way that is not known")
    return ItemFile(path, form)


def _boxes(data: Mapping[str, Any]) -> Boxes:
    shape = dimensions(data["global_shape"])
    corners = zip(data["global_offsets"], data["local_offsets"], data["local_sizes"], strict=True)
    boxes = tuple((Box(dimensions(start), dimensions(size)), dimensions(inside)) for start, inside, size in corners)
    for box, inside in boxes:
        fits = len(box.offset) == len(box.extent) == len(inside) == len(shape)
        if not fits or any(a + n > size for a, n, size in zip(box.offset, box.extent, shape, strict=True)):
            raise CorruptFile(f"a part {box} lies outside of its tensor of shape {list(shape)}")
    return Boxes(shape, boxes)


def _placement(entry: Mapping[str, Any], rank: int, most: int) -> Placement:
    kind, dim, factor = entry["type"], entry.get("dim", 0), entry.get("split_factor", 1)
    if kind == "Replicate":
        return Placement(kind)
    if kind not in ("Shard", "StridedShard"):
        raise Unsupported(f"placement {printable(kind)[:60]} is not known")
    if type(dim) is not int or type(factor) is not int or not -rank <= dim < rank or not 1 <= factor <= most:
        raise CorruptFile(f"a {kind} placement is invalid")
    return Placement("Shard" if kind == "Shard" else "_StridedShard", dim % rank, factor)


def path_text(path: NestedPath) -> str:
    """A place as the name of a tensor, which is what safetensors files call it."""
    return ".".join(map(str, path))
