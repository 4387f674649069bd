"""Placing: from stored pieces to a tile of the output, through bounded buffers.

A *tile* is a box of the tensor that is one contiguous range of the output. It is assembled from the slabs of all pieces that
meet it; a slab that is contiguous in both file and tile is read straight into place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from ckpt_cli.boxes import Box, Shape, contiguous_strides, range_boxes
from ckpt_cli.dtypes import Dtype, numpy_dtype
from ckpt_cli.files.source import FileSource, Source
from ckpt_cli.tensors.casting import cast, view_as
from ckpt_cli.tensors.records import Records
from ckpt_cli.tensors.tensor import Piece, Tensor

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, numpy.dtype[Any]]


SLAB = 4 << 20
"""Largest single read of scattered elements, in bytes."""

SMALL = 64 << 10
"""Up to here reading some unwanted bytes is cheaper than another read."""


WASTE = 4
"""A scattered region is read in one go if the bytes from its first to its last element are at most this many times its own."""


def tiles(shape: Shape, itemsize: int, budget: int) -> Iterator[Box]:
    """Boxes of at most ``budget`` bytes (at least one element), each a contiguous range of a C-ordered array, in order."""
    if 0 in shape:
        return
    axis, inner = len(shape), 1
    while axis > 0 and inner * shape[axis - 1] * itemsize <= budget:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield Box((0,) * len(shape), shape)
        return
    axis -= 1
    rows = max(1, budget // (inner * itemsize))
    outer = shape[:axis]
    index = [0] * axis
    while True:
        for start in range(0, shape[axis], rows):
            count = min(rows, shape[axis] - start)
            yield Box((*index, start, *(0,) * (len(shape) - axis - 1)), (*(1,) * axis, count, *shape[axis + 1 :]))
        for dim in reversed(range(axis)):
            index[dim] += 1
            if index[dim] < outer[dim]:
                break
            index[dim] = 0
        else:
            return


def element_bytes(tensor: Tensor, start: int = 0, count: int | None = None, records: Records | None = None) -> bytearray:
    """Elements from position ``start`` on (all of them without ``count``), in C order and in the tensor's own dtype.

    ``records`` compares those that were read whole, by this call or by several with the same ``records``. Raises CorruptFile.
    """
    size = tensor.dtype.itemsize
    count = tensor.numel - start if count is None else count
    buffer, done = bytearray(count * size), 0
    view = memoryview(buffer)
    for box in range_boxes(tensor.shape, start, count):
        read_tile(tensor, box, view[done : done + box.numel * size], records)
        done += box.numel * size
    return buffer


def elements(tensor: Tensor, start: int = 0, count: int | None = None, dtype: Dtype | None = None, records: Records | None = None) -> Array:
    """The same as numbers that numpy has (complex32 is widened), rounded to ``dtype`` if one is given."""
    import numpy

    buffer = element_bytes(tensor, start, count, records)
    if tensor.dtype.code == "C32":
        return numpy.frombuffer(buffer, numpy.float16).astype(numpy.float32).view(numpy.complex64)
    stored = view_as(buffer, tensor.dtype, len(buffer) // tensor.dtype.itemsize)
    if dtype is None or dtype == tensor.dtype:
        return stored
    rounded = numpy.empty(len(stored), numpy_dtype(dtype))
    cast(stored, tensor.dtype, dtype, rounded)
    return rounded


def blocks(tensor: Tensor, most: int) -> Iterator[tuple[int, int]]:
    """Start and length of ranges of at most so many elements that are the whole tensor, in order."""
    return ((start, min(most, tensor.numel - start)) for start in range(0, tensor.numel, most))


Read: TypeAlias = tuple[Source, int, int]
"""A source, and where in it the bytes that are read begin and end."""


def reads_of(tensors: Iterable[Tensor]) -> Iterator[Read]:
    """What is read of tensors that lie elsewhere than on this machine, in their order."""
    seen: set[int] = set()
    for tensor in tensors:
        for piece in tensor.pieces:
            if isinstance(piece.source, FileSource):
                if not piece.source.is_local:
                    yield (piece.source, *piece.span(tensor.dtype.itemsize))
            elif (within := getattr(piece.source, "tensors", None)) is not None and id(piece.source) not in seen:
                seen.add(id(piece.source))
                yield from reads_of(within)


def reads_of_tile(tensor: Tensor, tile: Box) -> Iterator[Read]:
    """The same for a box of a tensor."""
    for piece, common in tensor.meeting(tile):
        if isinstance(piece.source, FileSource) and not piece.source.is_local:
            region = tuple(a - b for a, b in zip(common.offset, piece.box.offset, strict=True))
            last = tuple(i + n - 1 for i, n in zip(region, common.extent, strict=True))
            itemsize = tensor.dtype.itemsize
            yield piece.source, piece.place_of(region, itemsize), piece.place_of(last, itemsize) + itemsize


def expect_reads(reads: Iterable[Read]) -> None:
    """Tell sources what will be read of them next, in this order: those in a store ask for it ahead."""
    wanted: dict[str, tuple[FileSource, list[tuple[int, int]]]] = {}
    for source, start, stop in reads:
        if isinstance(source, FileSource):
            wanted.setdefault(source.path, (source, []))[1].append((start, stop))
    for source, ranges in wanted.values():
        source.expect(ranges, exactly=True)


def read_tile(tensor: Tensor, tile: Box, buffer: bytearray | memoryview, records: Records | None = None) -> None:
    """Fill ``buffer`` with the elements of ``tile`` in C order, in the tensor's own dtype.

    ``records`` compares what is read with the CRC-32 of its records. Raises CorruptFile.
    """
    itemsize = tensor.dtype.itemsize
    view = memoryview(buffer)
    strides = contiguous_strides(tile.extent)
    for piece, common in tensor.meeting(tile):
        inside = tuple(a - b for a, b in zip(common.offset, tile.offset, strict=True))
        region = Box(tuple(a - b for a, b in zip(common.offset, piece.box.offset, strict=True)), common.extent)
        first = sum(i * stride for i, stride in zip(inside, strides, strict=True)) * itemsize
        is_range, stored = is_run(common.extent, piece.strides), memoryview(b"")
        if piece.verbatim and is_range and is_run(common.extent, strides):
            stored = view[first : first + common.numel * itemsize]
            piece.source.read_at(piece.place_of(region.offset, itemsize), stored)
        else:
            # The ellipsis makes it a view where there are no dimensions, too.
            place: tuple[Any, ...] = (*(slice(i, i + n) for i, n in zip(inside, common.extent, strict=True)), ...)
            target = _as_array(view, tile.extent, itemsize)[place]
            if records is not None and is_range:
                stored = memoryview(stored_bytes(piece, region, itemsize))
                target[...] = _as_array(stored, region.extent, itemsize)
            else:
                _gather(piece, region, target)
            _adjust(piece, target, tensor.dtype)
        if records is not None:
            records.add(tensor, piece, piece.place_of(region.offset, itemsize) - piece.offset, stored)


def stored_bytes(piece: Piece, box: Box, itemsize: int) -> bytearray:
    """The stored elements of a box inside a piece (relative to it) in C order, without undoing byte order or flags."""
    buffer = bytearray(box.numel * itemsize)
    if is_run(box.extent, piece.strides):
        piece.source.read_at(piece.place_of(box.offset, itemsize), memoryview(buffer))
    else:
        _gather(piece, box, _as_array(memoryview(buffer), box.extent, itemsize))
    return buffer


def is_run(extent: Shape, strides: Shape) -> bool:
    """Whether a box of an array with these strides is one contiguous range in C order."""
    expected = 1
    for n, stride in zip(reversed(extent), reversed(strides), strict=True):
        if n != 1:
            if stride != expected:
                return False
            expected *= n
    return True


def _as_array(view: memoryview, extent: Shape, itemsize: int) -> Array:
    import numpy

    return numpy.frombuffer(view, dtype=_raw(itemsize), count=math.prod(extent)).reshape(extent)


def _raw(itemsize: int) -> str:
    """The numpy type of elements that are only moved."""
    return f"u{itemsize}" if itemsize <= 8 else f"V{itemsize}"


def _gather(piece: Piece, box: Box, target: Array) -> None:
    """Copy a strided box inside a piece into ``target``, with reads of at most `SLAB` bytes."""
    import numpy

    extent, itemsize = box.extent, target.itemsize
    reach = sum((n - 1) * stride for n, stride in zip(extent, piece.strides, strict=True))
    span, wanted = (reach + 1) * itemsize, box.numel * itemsize
    if span <= SMALL or (span <= SLAB and span <= WASTE * wanted):
        slab = bytearray(span)
        piece.source.read_at(piece.place_of(box.offset, itemsize), memoryview(slab))
        stored = numpy.frombuffer(slab, dtype=_raw(itemsize))
        strides = tuple(stride * itemsize for stride in piece.strides)
        target[...] = numpy.lib.stride_tricks.as_strided(stored, extent, strides, writeable=False)
        return
    widest = max((d for d in range(len(extent)) if extent[d] > 1), key=lambda d: (extent[d] - 1) * piece.strides[d])
    half = extent[widest] // 2
    for start, count in ((0, half), (half, extent[widest] - half)):
        offset = (*box.offset[:widest], box.offset[widest] + start, *box.offset[widest + 1 :])
        part = Box(offset, (*extent[:widest], count, *extent[widest + 1 :]))
        _gather(piece, part, target[(*(slice(None),) * widest, slice(start, start + count))])


def _adjust(piece: Piece, target: Array, dtype: Dtype) -> None:
    """Undo byte order and torch's lazy conjugation and negation, in place."""
    import numpy

    parts = numpy.ascontiguousarray(target)
    if piece.swapped:
        # The two halves of a complex number are swapped each on its own.
        width = dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize
        parts = parts.view(f"u{width}").byteswap().view(target.dtype)
    if piece.neg or piece.conj:
        values = parts.view(numpy_dtype(dtype))
        values = -values if piece.neg else values
        values = numpy.conj(values) if piece.conj else values
        parts = numpy.ascontiguousarray(values).view(target.dtype)
    if piece.swapped or piece.neg or piece.conj:
        target[...] = parts.reshape(target.shape)
