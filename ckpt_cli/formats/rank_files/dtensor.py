"""Distributed tensors in rank files: DTensor (torch 2.2 to 2.14) and ShardedTensor, decoded without a process group.

Facts, read in torch's sources and in files written by torch 2.3 to 2.13:

- A DTensor pickles as ``_rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, ..., {"_local_tensor", "_spec"})``.
- Its mesh is the tensor ``mesh`` up to torch 2.9; from 2.10 on it is ``_rank_map`` seen through ``_layout``, whose axes
  are shape and stride pairs (2.10-2.12) or ``_FlatLayout`` objects (2.13). A sub-mesh then carries the ``_rank_map`` of its
  root, and this rank's own row of it has to be found.
- A ShardedTensor pickles a tuple (local shards, metadata, process group state, sharding spec, ...), with explicit
  offsets and sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_cli.boxes import Box, Shape
from ckpt_cli.errors import CorruptFile, Inconsistent, Unsupported
from ckpt_cli.files.pickle_nodes import Call, Global, attributes
from ckpt_cli.files.torch_file import StoredTensor, TorchFile, dimensions, unwrap
from ckpt_cli.formats.base import MAX_RANKS

OLD_MODULE = "torch.distributed._tensor"
"""Class paths of torch <= 2.4."""

MAX_FACTOR = 4096
"""Blocks of a strided split, which are ranks of other mesh dimensions; more than that only where the mesh has as many."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How one mesh dimension distributes a tensor: "Replicate", or "Shard" / "_StridedShard" with ``dim``."""

    kind: str
    dim: int = -1
    factor: int = 1

    def __str__(self) -> str:
        if self.kind == "Replicate":
            return "Replicate"
        return f"Shard({self.dim})" if self.factor == 1 else f"StridedShard({self.dim}, {self.factor})"


@dataclass(frozen=True, slots=True)
class RankMesh:
    """A device mesh as one rank sees it: all ``ranks`` in C order of ``shape``, and this rank's ``coordinate``.

    ``outside`` holds name, size and own coordinate of each dimension of the root mesh that the mesh itself lacks.
    ``claimed`` is the rank at the coordinate that the file records: the rank that wrote it, whatever its name says.
    """

    names: tuple[str, ...]
    shape: Shape
    ranks: tuple[int, ...]
    coordinate: Shape
    outside: tuple[tuple[str, int, int], ...] | None = None
    claimed: int | None = None


@dataclass(frozen=True, slots=True)
class DistributedLocal:
    """One rank's part of a DTensor.

    ``order`` lists, per tensor dimension, the mesh dimensions in the order of cutting. ``old``: written by torch <= 2.4.
    ``padded``: the file gave fewer placements than the mesh has dimensions.
    """

    stored: StoredTensor
    shape: Shape
    placements: tuple[Placement, ...]
    mesh: RankMesh
    order: Mapping[int, tuple[int, ...]] | None
    old: bool
    padded: bool


@dataclass(frozen=True, slots=True)
class ShardedLocal:
    """One rank's shards of a ShardedTensor, and the (rank, box) of every shard of all ranks."""

    shape: Shape
    shards: tuple[tuple[StoredTensor, Box], ...]
    everywhere: tuple[tuple[int, Box], ...]


Local = StoredTensor | DistributedLocal | ShardedLocal


class LocalReader:
    """Decodes the entries of one rank's file; meshes and placements that entries share are decoded once."""

    def __init__(self, file: TorchFile, rank: int) -> None:
        self.file = file
        self.rank = rank
        self._meshes: dict[int, RankMesh] = {}

    def read(self, node: object) -> Local | None:
        """What the file holds of a tensor; None if the node is not a tensor. Raises CorruptFile for anything malformed."""
        try:
            return self._read(node)
        except (TypeError, ValueError, AttributeError, LookupError, RecursionError, OverflowError):
            raise CorruptFile("the description of the tensor is invalid") from None

    def _read(self, node: object) -> Local | None:
        if not isinstance(node, Call):
            return None
        node = unwrap(node)
        if node.is_("torch._tensor", "_rebuild_from_type_v2") and len(node.args) == 4 and isinstance(node.args[1], Global):
            kind, state = node.args[1], node.args[3]
            if kind.name == "DTensor" and kind.module.startswith("torch.distributed."):
                return self._dtensor(kind, state)
            if kind.name == "ShardedTensor" and kind.module.startswith("torch.distributed."):
                return self._sharded_tensor(state)
            if node.args[0] == Global("torch._utils", "_rebuild_wrapper_subclass"):
                raise Unsupported(f"tensors of class {kind} are not known")
        return self.file.tensor(node)

    # -- DTensor -----------------------------------------------------------------------------------------------------

    def _dtensor(self, kind: Global, state: object) -> DistributedLocal:
        fields = attributes(state)
        local = self.file.tensor(fields.get("_local_tensor"))
        spec = fields.get("_spec")
        if local is None or not isinstance(spec, Call):
            raise CorruptFile("a DTensor has no local tensor or no spec")
        described = attributes(spec.state)
        meta = described.get("tensor_meta")
        if not isinstance(meta, Call) or not meta.args:
            raise CorruptFile("a DTensor does not say its global shape")
        if not isinstance(meta.known, tuple):
            meta.known = dimensions(meta.args[0])
        shape: Shape = meta.known
        mesh = self._mesh(described.get("mesh"))
        most = max(MAX_FACTOR, math.prod(mesh.shape))
        placements = described.get("placements")
        if not isinstance(placements, (tuple, list)):
            raise CorruptFile("a DTensor has no placements")
        old = kind.module.startswith(OLD_MODULE)
        parsed = tuple(_placement(placement, len(shape), most) for placement in placements)
        padded = old and len(parsed) < len(mesh.shape)
        if padded:
            # torch 2.3 wrote HSDP parameters of FSDP2 with the whole mesh and only the placement of its last dimension.
            parsed = (Placement("Replicate"),) * (len(mesh.shape) - len(parsed)) + parsed
        if len(parsed) != len(mesh.shape):
            raise CorruptFile(f"a DTensor has {len(parsed)} placements on a mesh of {len(mesh.shape)} dimensions")
        return DistributedLocal(local, shape, parsed, mesh, _shard_order(described.get("shard_order")), old, padded)

    def _mesh(self, node: object) -> RankMesh:
        if not isinstance(node, Call):
            raise CorruptFile("a DTensor has no mesh")
        if id(node) not in self._meshes:
            self._meshes[id(node)] = self._read_mesh(attributes(node.state))
        return self._meshes[id(node)]

    def _read_mesh(self, fields: Mapping[str, Any]) -> RankMesh:
        if "mesh" in fields:
            tensor = self.file.tensor(fields["mesh"])
            if tensor is None:
                raise CorruptFile("a mesh has no ranks")
            shape, ranks, outside = tensor.shape or (1,), tuple(tensor.read_ints()), None
            names = _names(fields.get("mesh_dim_names"), len(shape))
        else:
            axes, rank_map = self._layout(fields)
            names = _names(fields.get("_mesh_dim_names"), len(axes))
            shape = tuple(math.prod(n for n, _ in axis) for axis in axes)
            ranks = self._own_row(axes, rank_map)
            outside = self._outside(fields.get("_root_mesh"), axes, rank_map)
        if not all(0 <= rank < MAX_RANKS for rank in ranks):
            raise CorruptFile("a mesh has impossible ranks", expected=f"ranks from 0 to {MAX_RANKS - 1}")
        if len(set(ranks)) != len(ranks) or self.rank not in ranks:
            raise Inconsistent(
                f"the file says that rank {self.rank} is not part of the mesh of its tensors, which has ranks {_brief(ranks)}",
                hint="it may have been renamed, or belong to another checkpoint",
            )
        return RankMesh(names, shape, ranks, _digits(ranks.index(self.rank), shape), outside, self._claimed(fields, shape, ranks))

    def _claimed(self, fields: Mapping[str, Any], shape: Shape, ranks: Sequence[int]) -> int | None:
        """The rank that wrote the file: recorded since torch 2.11, before that the one at the recorded coordinate."""
        if type(fields.get("_rank")) is int:
            return int(fields["_rank"])
        root = fields.get("_root_mesh")
        return self._mesh(root).claimed if isinstance(root, Call) else _rank_at(fields, shape, ranks)

    def _layout(self, fields: Mapping[str, Any]) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Per mesh dimension its (size, stride) pairs, and the ranks that strides count in."""
        layout, rank_tensor = fields.get("_layout"), self.file.tensor(fields.get("_rank_map"))
        if not isinstance(layout, Call) or rank_tensor is None:
            raise CorruptFile("a mesh has neither ranks nor a layout")
        inner = attributes(layout.state) if layout.state is not None else {}
        if "axes" in inner:
            pairs = [
                (attributes(axis.state).get("shape"), attributes(axis.state).get("stride"))
                for axis in inner["axes"]
                if isinstance(axis, Call)
            ]
        else:
            shape = inner.get("shape", layout.args[0] if layout.args else None)
            stride = inner.get("stride", layout.args[1] if len(layout.args) > 1 else None)
            pairs = list(zip(_tuple(shape), _tuple(stride), strict=True))
        axes = []
        for size, stride in pairs:
            sizes, strides = _flat_ints(size), _flat_ints(stride)
            if len(sizes) != len(strides) or any(n < 1 for n in sizes) or any(n < 0 for n in strides):
                raise CorruptFile("a mesh layout is invalid")
            axes.append(list(zip(sizes, strides, strict=True)))
        return axes, rank_tensor.read_ints()

    def _own_row(self, axes: Sequence[Sequence[tuple[int, int]]], rank_map: list[int]) -> tuple[int, ...]:
        """The ranks of the sub-mesh that contains this rank."""
        if self.rank not in rank_map:
            return tuple(rank_map)
        position = rank_map.index(self.rank)
        flat = [pair for axis in axes for pair in axis]
        if math.prod(size for size, _ in flat) > len(rank_map) or any(size > 1 and not stride for size, stride in flat):
            raise CorruptFile("a mesh layout has more places than ranks", expected=f"at most {len(rank_map)} places")
        base = position - sum(position // stride % size * stride for size, stride in flat if stride)
        places = [base]
        for size, stride in flat:
            places = [place + i * stride for place in places for i in range(size)]
        if min(places) < 0 or max(places) >= len(rank_map):
            raise CorruptFile("a mesh layout reaches beyond its ranks")
        return tuple(rank_map[place] for place in places)

    def _outside(
        self, root: object, axes: Sequence[Sequence[tuple[int, int]]], rank_map: list[int]
    ) -> tuple[tuple[str, int, int], ...] | None:
        if not isinstance(root, Call):
            return ()
        fields = attributes(root.state)
        root_axes, root_map = self._layout(fields)
        if root_map != rank_map or self.rank not in rank_map:
            return None
        names = _names(fields.get("_mesh_dim_names"), len(root_axes))
        inside = {stride for axis in axes for _, stride in axis}
        position = rank_map.index(self.rank)
        return tuple(
            (name, math.prod(n for n, _ in axis), position // axis[0][1] % axis[0][0])
            for name, axis in zip(names, root_axes, strict=True)
            if len(axis) == 1 and axis[0][1] and axis[0][1] not in inside and axis[0][0] > 1
        )

    # -- ShardedTensor -----------------------------------------------------------------------------------------------

    def _sharded_tensor(self, state: object) -> ShardedLocal:
        if not isinstance(state, tuple) or len(state) < 3 or not isinstance(state[0], list):
            raise CorruptFile("a ShardedTensor has no state")
        metadata = attributes(state[1].state) if isinstance(state[1], Call) else {}
        group = attributes(state[2].state) if isinstance(state[2], Call) else {}
        shape = dimensions(metadata.get("size"))
        if group.get("global_rank", self.rank) != self.rank:
            raise Inconsistent(
                f"the file says it is from rank {group['global_rank']}, its name says rank {self.rank}",
                hint="it may have been renamed or copied over another one",
            )
        everywhere = tuple(_shard_metadata(entry, shape) for entry in metadata.get("shards_metadata", ()))
        shards = []
        for shard in state[0]:
            fields = attributes(shard.state) if isinstance(shard, Call) else {}
            tensor = self.file.tensor(fields.get("tensor"))
            _, box = _shard_metadata(fields.get("metadata"), shape)
            if tensor is None or tensor.shape != box.extent:
                raise Inconsistent("a shard's tensor does not have the size that its metadata says")
            shards.append((tensor, box))
        return ShardedLocal(shape, tuple(shards), everywhere)


def _shard_metadata(node: object, shape: Shape) -> tuple[int, Box]:
    fields = attributes(node.state) if isinstance(node, Call) else {}
    box = Box(dimensions(fields.get("shard_offsets")), dimensions(fields.get("shard_sizes")))
    fits = len(box.offset) == len(box.extent) == len(shape)
    if not fits or any(a + n > size for a, n, size in zip(box.offset, box.extent, shape, strict=True)):
        raise CorruptFile(f"a shard {box} lies outside of its tensor of shape {list(shape)}")
    placement = fields.get("placement")
    rank = attributes(placement.state).get("_rank") if isinstance(placement, Call) else None
    if type(rank) is int and not -1 <= rank < MAX_RANKS:
        raise CorruptFile("a shard has an impossible rank", expected=f"ranks from 0 to {MAX_RANKS - 1}")
    return rank if type(rank) is int else -1, box


def _placement(node: object, rank: int, most: int) -> Placement:
    """A placement of a tensor of ``rank`` dimensions; ``most`` blocks are as many as a dimension can be cut into."""
    if not isinstance(node, Call) or not isinstance(node.target, Global):
        raise CorruptFile("a placement is not an object")
    name, fields = node.target.name, attributes(node.state) if node.state is not None else {}
    if name == "Replicate":
        return Placement(name)
    if name not in ("Shard", "_StridedShard"):
        if "Partial" in name:
            raise Unsupported(
                f"the tensor has a {name} placement: each rank holds a partial sum, not a shard",
                hint="it was saved in the middle of a reduction; save after redistributing to Shard or Replicate",
            )
        raise Unsupported(f"placement {node.target} is not known")
    dim, factor = fields.get("dim", node.args[0] if node.args else None), fields.get("split_factor", 1)
    if type(dim) is not int or type(factor) is not int or not -rank <= dim < rank or not 1 <= factor <= most:
        raise CorruptFile(f"a {name} placement is invalid")
    return Placement(name, dim % rank, factor)


def _shard_order(node: object) -> dict[int, tuple[int, ...]] | None:
    if not isinstance(node, (tuple, list)):
        return None
    order: dict[int, tuple[int, ...]] = {}
    for entry in node:
        args = entry.args if isinstance(entry, Call) else entry
        if not isinstance(args, tuple) or len(args) != 2 or type(args[0]) is not int:
            raise CorruptFile("a shard order is invalid")
        order[args[0]] = tuple(_flat_ints(args[1]))
    return order


def _digits(position: int, shape: Shape) -> Shape:
    """The coordinate of the element at a C-order position."""
    digits = []
    for size in reversed(shape):
        position, index = divmod(position, size)
        digits.append(index)
    return tuple(reversed(digits))


def _rank_at(fields: Mapping[str, Any], shape: Shape, ranks: Sequence[int]) -> int | None:
    """The rank whose coordinate the file records (``_coordinate_on_dim``, a list or a tuple)."""
    coordinate = fields.get("_coordinate_on_dim")
    if not isinstance(coordinate, (list, tuple)) or len(coordinate) != len(shape):
        return None
    position = 0
    for index, size in zip(coordinate, shape, strict=True):
        if type(index) is not int or not 0 <= index < size:
            raise CorruptFile("a mesh coordinate lies outside of its mesh")
        position = position * size + index
    return ranks[position]


def _names(value: object, count: int) -> tuple[str, ...]:
    if isinstance(value, (tuple, list)) and len(value) == count and all(isinstance(name, str) for name in value):
        return tuple(value)
    return tuple(f"dim{i}" for i in range(count))


def _tuple(value: object) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _flat_ints(value: object) -> list[int]:
    if type(value) is int:
        return [value]
    if not isinstance(value, (tuple, list)) or any(type(n) is not int for n in value):
        raise CorruptFile("a mesh layout is not made of integers")
    return list(value)


def _brief(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
