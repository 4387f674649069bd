"""Shards of DeepSpeed's tensor parallelism (AutoTP) as whole tensors, by the map that its files hold.

``universal_checkpoint_info["affine_map"]`` (DeepSpeed 0.19): ``{"version": 1, "params": {"^escaped name$": {"logical_shape": [...],
"ranks": {t: {"shard_shape": [...], "pieces": [{"shape", "source": [offset, strides], "dest": [offset, strides], "locations"}]}}}}}``, where
``source`` addresses the whole tensor and ``dest`` the shard, both in elements.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_cli.boxes import Box, Shape, contiguous_strides
from ckpt_cli.errors import CorruptFile, Inconsistent, Unsupported, reading
from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.files.torch_file import dimensions
from ckpt_cli.formats.assembly import tiled
from ckpt_cli.formats.deepspeed.flat_tensors import bytes_of
from ckpt_cli.formats.deepspeed.model_states import ModelStates
from ckpt_cli.tensors.tensor import Piece, Tensor


@dataclass(frozen=True, slots=True)
class Move:
    """A box of a shard, and where it begins in the whole tensor."""

    box: Box
    place: Shape


@dataclass(frozen=True, slots=True)
class Cut:
    """How one tensor is cut: its shape, and the moves of every rank."""

    shape: Shape
    moves: Mapping[int, tuple[Move, ...]]
    shards: Mapping[int, Shape]


def whole_tensors(shards: Mapping[int, Mapping[str, Tensor]], model: ModelStates) -> dict[str, Tensor]:
    """The whole tensors of shards by rank. Raises Unsupported if the files do not say how tensors were cut."""
    cuts = _cuts(model)
    ranks = sorted(shards)
    names = list(dict.fromkeys(name for rank in ranks for name in shards[rank]))
    tensors = {}
    # The map has one name of a parameter that has several, and these have the same bytes on every rank.
    nodes = {name: cuts.get(f"^{re.escape(name)}$") for name in names}
    by_bytes = {_bytes(shards, name): node for name, node in nodes.items() if node is not None}
    for name in names:
        with reading(model.path, tensor=name):
            held = {rank: shards[rank][name] for rank in ranks if name in shards[rank]}
            if len(held) < len(ranks):
                lacking = next(rank for rank in ranks if rank not in held)
                raise Inconsistent(f"rank {min(held)} of tensor parallelism has it, rank {lacking} lacks it")
            node = nodes[name] or by_bytes.get(_bytes(shards, name))
            # Buffers are not in the map: every rank has the whole of them.
            cut = _cut(node, len(ranks)) if node is not None else _replicated(held, name in model.buffers)
            tensors[name] = _joined(name, held, cut)
    return tensors


def _bytes(shards: Mapping[int, Mapping[str, Tensor]], name: str) -> tuple[object, ...]:
    return tuple(bytes_of(held[name]) for held in shards.values() if name in held)


def whole_shapes(shards: Mapping[str, Shape], model: ModelStates) -> dict[str, Shape]:
    """The shapes of the whole parameters, by those of one rank's shards. What the map does not list is not cut."""
    cuts = _cuts(model)
    shapes = {}
    for name, own in shards.items():
        with reading(model.path, tensor=name):
            node = cuts.get(f"^{re.escape(name)}$")
            shapes[name] = own if node is None else dimensions((as_dict(node) or {}).get("logical_shape"))
    return shapes


def _cuts(model: ModelStates) -> Mapping[Any, Any]:
    info = as_dict(model.entries.get("universal_checkpoint_info")) or {}
    affine = as_dict(info.get("affine_map")) or {}
    params = as_dict(affine.get("params"))
    if params is None or affine.get("version") != 1:
        raise Unsupported(
            "the files of this tensor parallel save do not say how tensors were cut",
            path=model.path,
            expected="universal_checkpoint_info with an affine_map, as DeepSpeed 0.19 writes it",
            hint="load the save with DeepSpeed, and save one state dict",
        )
    return params


def _replicated(held: Mapping[int, Tensor], is_buffer: bool) -> Cut:
    shapes = {tensor.shape for tensor in held.values()}
    if not is_buffer or len(shapes) > 1:
        raise Inconsistent("the affine_map does not say how it was cut")
    shape = shapes.pop()
    box = Box((0,) * len(shape), shape)
    return Cut(shape, {rank: (Move(box, box.offset),) for rank in held}, dict.fromkeys(held, shape))


def _cut(node: object, ranks: int) -> Cut:
    fields = as_dict(node) or {}
    shape, by_rank = dimensions(fields.get("logical_shape")), as_dict(fields.get("ranks"))
    if by_rank is None or set(by_rank) != set(range(ranks)):
        raise CorruptFile("the affine_map does not list every rank", expected=f"ranks 0 to {ranks - 1}")
    moves, shards = {}, {}
    for rank, entry in by_rank.items():
        held = as_dict(entry) or {}
        shard, pieces = dimensions(held.get("shard_shape")), held.get("pieces")
        if not isinstance(pieces, list):
            raise CorruptFile("the affine_map lists no pieces of a shard")
        moves[rank] = tuple(_move(as_dict(piece) or {}, shape, shard) for piece in pieces)
        shards[rank] = shard
    return Cut(shape, moves, shards)


def _move(piece: Mapping[Any, Any], shape: Shape, shard: Shape) -> Move:
    extent = dimensions(piece.get("shape"))
    return Move(Box(_place(piece.get("dest"), extent, shard), extent), _place(piece.get("source"), extent, shape))


def _place(address: object, extent: Shape, shape: Shape) -> Shape:
    """Where a box of this extent begins in an array of this shape, given its first element and strides."""
    if not isinstance(address, (list, tuple)) or len(address) != 2 or type(address[0]) is not int:
        raise CorruptFile("an address in the affine_map is no offset and strides")
    first, strides = address[0], dimensions(address[1])
    own = contiguous_strides(shape)
    alike = len(extent) == len(shape) == len(strides) and all(
        n == 1 or mine == its for n, mine, its in zip(extent, own, strides, strict=True)
    )
    if not alike or first < 0:
        raise Unsupported("the affine_map moves something that is no box")
    place = tuple(first // stride % n if stride and n else 0 for stride, n in zip(own, shape, strict=True))
    if any(a + n > size for a, n, size in zip(place, extent, shape, strict=True)):
        raise CorruptFile("the affine_map reaches beyond the tensor")
    return place


def _joined(name: str, held: Mapping[int, Tensor], cut: Cut) -> Tensor:
    by_rank: list[list[Piece]] = []
    for rank, tensor in held.items():
        if tensor.shape != cut.shards[rank]:
            raise Inconsistent(f"rank {rank} of tensor parallelism holds {list(tensor.shape)}", expected=f"{list(cut.shards[rank])}")
        moved = (_moved(piece, move, tensor.dtype.itemsize) for piece in tensor.pieces for move in cut.moves[rank])
        by_rank.append([replace(piece, rank=rank) for piece in moved if piece is not None])
    first = next(iter(held.values()))
    if any(tensor.dtype != first.dtype for tensor in held.values()):
        raise Inconsistent("the ranks of tensor parallelism disagree about the dtype")
    replicated = all(shard == cut.shape for shard in cut.shards.values())
    layout = f"replicated x{len(held)}" if replicated else f"tensor parallel x{len(held)}"
    if first.layout:
        layout = f"{layout}, {first.layout}"
    parts = _alike(by_rank, first.dtype.itemsize) if replicated else [piece for pieces in by_rank for piece in pieces]
    return tiled(name, first.dtype, cut.shape, parts, "replicated" if replicated else "sharded", layout)


def _moved(piece: Piece, move: Move, itemsize: int) -> Piece | None:
    common = piece.box.intersect(move.box)
    if common is None:
        return None
    offset = tuple(a - b + c for a, b, c in zip(common.offset, move.box.offset, move.place, strict=True))
    return replace(_part(piece, common, itemsize), box=Box(offset, common.extent))


def _part(piece: Piece, box: Box, itemsize: int) -> Piece:
    """A box inside of a piece."""
    skipped = sum((a - b) * stride for a, b, stride in zip(box.offset, piece.box.offset, piece.strides, strict=True))
    return replace(piece, offset=piece.offset + skipped * itemsize, box=box, crc=piece.crc if box == piece.box else None)


def _alike(by_rank: Sequence[Sequence[Piece]], itemsize: int) -> list[Piece]:
    """Replicas in flat vectors may be cut at other places on every rank: all are cut where any is, so that equal parts are equal boxes."""
    cells = [piece.box for piece in by_rank[0]]
    for pieces in by_rank[1:]:
        cells = [common for cell in cells for piece in pieces if (common := cell.intersect(piece.box)) is not None]
    return [
        _part(piece, cell, itemsize) for pieces in by_rank for cell in cells for piece in pieces if cell.intersect(piece.box) is not None
    ]
