"""Boxes: where one rank's part lies in the whole tensor. Pure integers, no I/O.

A *box* is an ``offset`` and an ``extent`` inside a C-ordered *grid* (usually the tensor's shape). Along one dimension a
rank may hold several *intervals* (``_StridedShard``); a rank's part of a tensor is then the product of its interval
lists, which is a list of boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

Shape = tuple[int, ...]
Interval = tuple[int, int]
"""(start, length)"""

SHAPES_KEPT = 1024
"""Many tensors of a model have few shapes: what is made of one is made once."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """``extent`` elements from ``offset`` on, per dimension. A 0-dimensional box holds one element."""

    offset: Shape
    extent: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.extent)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None if there is none."""
        offset = tuple(map(max, self.offset, other.offset))
        stop = tuple(min(a + n, b + m) for a, n, b, m in zip(self.offset, self.extent, other.offset, other.extent, strict=True))
        extent = tuple(b - a for a, b in zip(offset, stop, strict=True))
        return Box(offset, extent) if all(n > 0 for n in extent) else None

    def at(self, position: int) -> Box:
        """The one element at a position of the box in C order."""
        index = (position // stride % n for stride, n in zip(contiguous_strides(self.extent), self.extent, strict=True))
        return Box(tuple(a + i for a, i in zip(self.offset, index, strict=True)), (1,) * len(self.extent))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offset, self.extent, strict=True)) + "]"


@lru_cache(SHAPES_KEPT)
def whole(shape: Shape) -> Box:
    """The box that is the whole grid."""
    return Box((0,) * len(shape), shape)


@lru_cache(SHAPES_KEPT)
def contiguous_strides(shape: Shape) -> Shape:
    """Element strides of a C-ordered array of this shape."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def chunk(length: int, parts: int, index: int) -> Interval:
    """Part ``index`` of ``torch.chunk``: parts of ceil(length / parts), the last ones shorter or empty."""
    size = -(-length // parts)
    start = min(index * size, length)
    return start, min(size, length - start)


def cut(intervals: Sequence[Interval], start: int, length: int) -> list[Interval]:
    """Elements ``start`` to ``start + length`` of the concatenation of ``intervals``."""
    taken: list[Interval] = []
    position = 0
    for first, size in intervals:
        a, b = max(start, position), min(start + length, position + size)
        if a < b:
            taken.append((first + a - position, b - a))
        position += size
    return taken


@dataclass(frozen=True, slots=True)
class Split:
    """One mesh dimension that cuts a tensor dimension: into ``parts``, of which this rank has ``index``.

    ``factor`` > 1 means the strided split of DTensor's ``_StridedShard``: first into ``factor`` blocks, each block into
    ``parts``, and this rank has part ``index`` of every block.
    """

    parts: int
    index: int
    factor: int = 1


def split_dimension(length: int, splits: Iterable[Split]) -> list[Interval]:
    """The intervals of a dimension that remain after ``splits``, applied from first to last."""
    intervals: list[Interval] = [(0, length)] if length else []
    for split in splits:
        total = sum(size for _, size in intervals)
        # Blocks behind the last element are empty, however many there are.
        filled = -(-total // -(-total // split.factor)) if total else 0
        blocks = [chunk(total, split.factor, block) for block in range(filled)]
        kept: list[Interval] = []
        for start, size in blocks:
            first, count = chunk(size, split.parts, split.index)
            kept += cut(intervals, start + first, count)
        intervals = _joined(kept)
    return intervals


def nested_order(splits: Sequence[Split]) -> list[Split] | None:
    """The order in which FSDP2 and tensor parallelism really cut one dimension, outermost first.

    A ``_StridedShard`` with factor f says "the mesh dimensions to my right that have f parts in all were cut before me"
    (torch.distributed.tensor, ``_StridedShard``). Returns None if some factor matches no such group; then the strided
    definition itself has to be applied, see `split_dimension`.
    """
    order: list[Split] = []
    for split in reversed(splits):
        position, product = 0, 1
        while product < split.factor and position < len(order):
            product *= order[position].parts
            position += 1
        if product != split.factor:
            return None
        order.insert(position, Split(split.parts, split.index))
    return order


def boxes_of(intervals: Sequence[Sequence[Interval]]) -> list[tuple[Box, Shape]]:
    """The boxes of a product of interval lists, each with the place it has in the local block."""
    per_dimension = []
    for axis in intervals:
        places = itertools.accumulate((size for _, size in axis), initial=0)
        per_dimension.append([(start, size, place) for (start, size), place in zip(axis, places, strict=False)])
    return [
        (Box(tuple(c[0] for c in combination), tuple(c[1] for c in combination)), tuple(c[2] for c in combination))
        for combination in itertools.product(*per_dimension)
    ]


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A part of the grid that no box holds."""

    box: Box
    elements: int


@dataclass(frozen=True, slots=True)
class Overlapping:
    """Two boxes (by position in the list) that hold the same elements."""

    first: int
    second: int
    box: Box


def check_tiling(shape: Shape, boxes: Sequence[Box]) -> Uncovered | Overlapping | None:
    """None if the boxes hold every element of the grid exactly once; otherwise the first problem.

    Boxes must lie inside the grid and be non-empty. Disjoint boxes tile exactly if their volumes add up, so only the
    pairs that could touch are compared: a sweep along the dimension with the most cuts.
    """
    clash = _first_overlap(shape, boxes)
    if clash is not None:
        return clash
    missing = math.prod(shape) - sum(box.numel for box in boxes)
    return Uncovered(_first_hole(whole(shape), boxes), missing) if missing else None


def _first_overlap(shape: Shape, boxes: Sequence[Box]) -> Overlapping | None:
    if not shape:
        return Overlapping(0, 1, boxes[0]) if len(boxes) > 1 else None
    axis = max(range(len(shape)), key=lambda d: len({box.offset[d] for box in boxes}))
    order = sorted(range(len(boxes)), key=lambda i: (boxes[i].offset[axis], boxes[i].offset))
    active: list[int] = []
    for i in order:
        start = boxes[i].offset[axis]
        active = [j for j in active if boxes[j].offset[axis] + boxes[j].extent[axis] > start]
        for j in active:
            common = boxes[i].intersect(boxes[j])
            if common is not None:
                return Overlapping(min(i, j), max(i, j), common)
        active.append(i)
    return None


def _first_hole(region: Box, boxes: Sequence[Box], axis: int = 0) -> Box:
    """The first part of ``region`` that no box holds, cut along the borders of the boxes."""
    if not boxes or axis == len(region.extent):
        return region
    begin, end = region.offset[axis], region.offset[axis] + region.extent[axis]
    borders = sorted({begin, end, *(b.offset[axis] for b in boxes), *(b.offset[axis] + b.extent[axis] for b in boxes)})
    for start, stop in itertools.pairwise(borders):
        slab = Box(
            (*region.offset[:axis], start, *region.offset[axis + 1 :]),
            (*region.extent[:axis], stop - start, *region.extent[axis + 1 :]),
        )
        inside = [part for box in boxes if (part := box.intersect(slab)) is not None]
        if sum(part.numel for part in inside) < slab.numel:
            return _first_hole(slab, inside, axis + 1)
    return region


def _joined(intervals: list[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, size in intervals:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined


def shape_text(shape: Shape) -> str:
    """A shape as shown in messages: 37 x 10."""
    return " x ".join(map(str, shape)) or "scalar"


def range_boxes(shape: Shape, start: int, count: int) -> Iterator[Box]:
    """Boxes that are, in order, ``count`` elements from position ``start`` on of a C-ordered array."""
    strides = contiguous_strides(shape)
    while count > 0:
        index = tuple(start // stride % n for stride, n in zip(strides, shape, strict=True))
        axis = len(shape)
        # The widest block that begins here: whole rows of an axis whose inner indices are all zero.
        while axis > 0 and strides[axis - 1] <= count and not any(index[axis:]):
            axis -= 1
        if axis == len(shape):
            yield Box((), ())
            return
        rows = min(shape[axis] - index[axis], count // strides[axis])
        yield Box(index, (*(1,) * axis, rows, *shape[axis + 1 :]))
        start += rows * strides[axis]
        count -= rows * strides[axis]
