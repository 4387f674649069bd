"""Tensors in flat vectors: which elements of a stored vector are which of a tensor, as pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt_cli.boxes import Shape, contiguous_strides, range_boxes
from ckpt_cli.files.torch_file import StoredTensor
from ckpt_cli.tensors.tensor import Piece


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` elements of a stored vector, from its element ``start`` on: those of a tensor from ``position`` on, in C order."""

    stored: StoredTensor
    start: int
    position: int
    count: int
    rank: int


def runs_of_line(start: int, count: int, part: int, vectors: Sequence[StoredTensor]) -> tuple[Run, ...]:
    """Elements ``start`` to ``start + count`` of a line that is cut into vectors of ``part`` elements, one per rank.

    A vector may lack elements at its end, which the caller has checked to be padding.
    """
    runs = []
    for rank in range(start // part if part else 0, len(vectors)):
        low, high = max(start, rank * part), min(start + count, (rank + 1) * part)
        if low >= high:
            break
        runs.append(Run(vectors[rank], low - rank * part, low - start, high - low, rank))
    return tuple(runs)


def run_pieces(run: Run, shape: Shape) -> Iterator[Piece]:
    """The boxes of a run in a tensor of this shape, each a contiguous range of the vector."""
    stored = run.stored
    step = stored.strides[0] if stored.strides else 1
    position = stored.offset + run.start * step * stored.dtype.itemsize
    for box in range_boxes(shape, run.position, run.count):
        strides = tuple(step * stride for stride in contiguous_strides(box.extent))
        yield Piece(stored.storage.source, position, strides, box, run.rank, stored.swapped, stored.conj, stored.neg)
        position += box.numel * step * stored.dtype.itemsize
