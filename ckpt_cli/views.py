"""Tensors that are other tensors re-cut. A view of pieces is again pieces: nothing is read or moved here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ckpt_cli.errors import Undecidable
from ckpt_cli.geometry import Box, Shape, contiguous_strides
from ckpt_cli.model import Piece, Tensor


def permuted(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Dimensions in another order, as ``torch.permute``: dimension ``i`` of the result is dimension ``order[i]``."""
    assert tensor.own_grid is None

    def turned(values: Shape) -> Shape:
        return tuple(values[i] for i in order)

    def piece(old: Piece) -> Piece:
        return replace(old, strides=turned(old.strides), box=Box(turned(old.box.offset), turned(old.box.extent)), crc=None)

    return replace(
        tensor, shape=turned(tensor.shape), pieces=tuple(map(piece, tensor.pieces)), copies=tuple(map(piece, tensor.copies)), alias_of=None
    )


def reshaped(tensor: Tensor, shape: Shape) -> Tensor:
    """Another shape for the same elements in the same order, as ``torch.reshape``."""
    assert math.prod(shape) == tensor.numel
    return replace(tensor, shape=shape, own_grid=tensor.grid, alias_of=None)


def unfolded(tensor: Tensor, axis: int, sizes: Shape) -> Tensor:
    """One dimension as several (``torch.unflatten``). Raises Undecidable if shards cut that dimension."""
    assert tensor.own_grid is None
    assert math.prod(sizes) == tensor.shape[axis]
    inner = contiguous_strides(sizes)

    def spread(values: Shape, new: Shape) -> Shape:
        return (*values[:axis], *new, *values[axis + 1 :])

    def piece(old: Piece) -> Piece:
        if old.box.extent[axis] != tensor.shape[axis]:
            raise Undecidable(f"dimension {axis} is sharded, so it cannot be split", tensor=tensor.name, hint="merge without --match-base")
        box = Box(spread(old.box.offset, (0,) * len(sizes)), spread(old.box.extent, sizes))
        return replace(old, strides=spread(old.strides, tuple(n * old.strides[axis] for n in inner)), box=box, crc=None)

    return replace(
        tensor,
        shape=spread(tensor.shape, sizes),
        pieces=tuple(map(piece, tensor.pieces)),
        copies=tuple(map(piece, tensor.copies)),
        alias_of=None,
    )
