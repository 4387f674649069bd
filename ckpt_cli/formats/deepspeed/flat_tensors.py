"""Tensors of what one file holds, or of ranges of flat vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckpt_cli.boxes import Shape, whole
from ckpt_cli.errors import MissingShard, Undecidable
from ckpt_cli.files.torch_file import StoredTensor
from ckpt_cli.formats.assembly import PlacedTensor, RankPart, tile, tiled
from ckpt_cli.formats.deepspeed.partitions import Parameter
from ckpt_cli.formats.flat import FlatRange, range_pieces
from ckpt_cli.tensors.tensor import Tensor


def tensor_of(name: str, stored: StoredTensor) -> Tensor:
    """A tensor that one file holds."""
    part = RankPart(0, stored, whole(stored.shape), (0,) * len(stored.shape))
    return tile(name, stored.dtype, PlacedTensor(stored.shape, [part], "whole", ""), 1, ())


def bytes_of(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same bytes of the same files."""
    return (tensor.dtype, tensor.shape, *(piece.same_bytes_as for piece in tensor.pieces))


def flat_tensor(parameter: Parameter, slot: str, shape: Shape | None) -> Tensor:
    if shape is None or math.prod(shape) != parameter.numel:
        raise Undecidable(
            f"no file says the shape of these {parameter.numel} elements",
            tensor=parameter.name,
            expected="a layer with a tensor of this name",
        )
    return flat_of(parameter.name, shape, parameter.ranges[slot], parameter.ranks)


def flat_of(name: str, shape: Shape, ranges: Sequence[FlatRange], ranks: int) -> Tensor:
    """A tensor that lies in the flat vectors of some of the ranks. Raises Gap if these do not hold all of it."""
    if not ranges:
        raise MissingShard("no rank holds any of it", tensor=name)
    pieces = [piece for part in ranges for piece in range_pieces(part, shape)]
    dtype = ranges[0].stored.dtype
    if len(ranges) == 1:
        return tiled(name, dtype, shape, pieces, "whole", "")
    return tiled(name, dtype, shape, pieces, "sharded", f"flat x{ranks}")
