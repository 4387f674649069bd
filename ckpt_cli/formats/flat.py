"""Tensors in flat vectors: which elements of a stored vector are which of a tensor, as pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt_cli.boxes import Shape, contiguous_strides, range_boxes
from ckpt_cli.files.torch_file import StoredTensor
from ckpt_cli.tensors.tensor import Piece


@dataclass(frozen=True, slots=True)
class FlatRange:
    """``count`` elements of a stored vector, from its element ``start`` on: those of a tensor from ``position`` on, in C order."""

    stored: StoredTensor
    start: int
    position: int
    count: int
    rank: int


def ranges_of_line(start: int, count: int, part: int, vectors: Sequence[StoredTensor]) -> tuple[FlatRange, ...]:
    """Elements ``start`` to ``start + count`` of a line that is cut into vectors of ``part`` elements, one per rank.

    A vector may lack elements at its end, which the caller has checked to be padding. A tensor without elements has one range of none,
    which tells its dtype.
    """
    if not count:
        return (FlatRange(vectors[0], 0, 0, 0, 0),)
    ranges = []
    for rank in range(start // part, len(vectors)):
        low, high = max(start, rank * part), min(start + count, (rank + 1) * part)
        if low >= high:
            break
        ranges.append(FlatRange(vectors[rank], low - rank * part, low - start, high - low, rank))
    return tuple(ranges)


def range_pieces(part: FlatRange, shape: Shape) -> Iterator[Piece]:
    """The boxes of a range in a tensor of this shape, each a contiguous range of the vector."""
    stored = part.stored
    step = stored.strides[0] if stored.strides else 1
    position = stored.offset + part.start * step * stored.dtype.itemsize
    for box in range_boxes(shape, part.position, part.count):
        strides = tuple(step * stride for stride in contiguous_strides(box.extent))
        yield Piece(stored.storage.source, position, strides, box, part.rank, stored.swapped, stored.conj, stored.neg)
        position += box.numel * step * stored.dtype.itemsize
