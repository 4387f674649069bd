"""Tensors that are other tensors re-cut. A view of pieces is again pieces: nothing is read or moved here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ckpt_cli.boxes import Box, Shape, contiguous_strides, range_boxes
from ckpt_cli.errors import Inconsistent
from ckpt_cli.tensors.tensor import Piece, Tensor


def _check_axis(tensor: Tensor, axis: int, more: int = 0) -> None:
    """Raise Inconsistent unless the tensor has this dimension (and ``more`` behind it)."""
    if not 0 <= axis < len(tensor.shape) - more:
        raise Inconsistent(
            f"shape {list(tensor.shape)} has no dimension {axis + more}",
            tensor=tensor.name,
            expected=f"at least {axis + more + 1} dimensions",
            hint="tensors and config belong to different models",
        )


def _check_alike(tensors: Sequence[Tensor], axis: int | None) -> None:
    """Raise Inconsistent unless all have one dtype, and one shape but for dimension ``axis``."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype != first.dtype:
            raise Inconsistent(
                f"it has dtype {tensor.dtype}, {first.name or 'the first'} has {first.dtype}, and both are parts of one tensor",
                tensor=tensor.name,
                expected="parts of one dtype",
                hint="save all parts in the same dtype",
            )
        other, wanted = (shape if axis is None else _with(shape, axis, 0) for shape in (tensor.shape, first.shape))
        if other != wanted:
            raise Inconsistent(
                f"it has shape {list(tensor.shape)}, {first.name or 'the first'} has {list(first.shape)}, and both are parts of one tensor",
                tensor=tensor.name,
                expected="parts of one shape" if axis is None else f"parts of one shape but for dimension {axis}",
                hint="tensors and config belong to different models",
            )


def permuted(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Dimensions in another order, as ``torch.permute``: dimension ``i`` of the result is dimension ``order[i]``.

    This and the other views raise Inconsistent for shapes and dtypes that do not fit.
    """
    if sorted(order) != [*range(len(tensor.shape))]:
        raise Inconsistent(f"shape {list(tensor.shape)} lacks the {len(order)} dimensions that are exchanged", tensor=tensor.name)

    def turned(values: Shape) -> Shape:
        return tuple(values[i] for i in order)

    def pieces(old: Piece) -> Iterator[Piece]:
        yield replace(old, strides=turned(old.strides), box=Box(turned(old.box.offset), turned(old.box.extent)), crc=None)

    return _cut(tensor, turned(tensor.shape), pieces)


def transposed(tensor: Tensor, first: int, second: int) -> Tensor:
    """Two dimensions exchanged, as ``torch.transpose``."""
    _check_axis(tensor, max(first, second))
    order = list(range(len(tensor.shape)))
    order[first], order[second] = second, first
    return permuted(tensor, order)


def sliced(tensor: Tensor, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
    """Elements ``start``, ``start + step``, ... below ``stop`` of one dimension, as ``tensor[..., start:stop:step, ...]``."""
    _check_axis(tensor, axis)
    if not 0 <= start <= stop <= tensor.shape[axis] or step < 1:
        text = f"elements {start} to {stop} lie outside of dimension {axis} of shape {list(tensor.shape)}"
        raise Inconsistent(text, tensor=tensor.name)

    def pieces(old: Piece) -> Iterator[Piece]:
        low, count = old.box.offset[axis], old.box.extent[axis]
        # The first element of the slice that this piece holds, and how many more.
        first = start + -(-max(low - start, 0) // step) * step
        last = min(low + count, stop)
        if first >= last:
            return
        offset = old.offset + (first - low) * old.strides[axis] * tensor.dtype.itemsize
        place, length = (first - start) // step, -(-(last - first) // step)
        box = Box(_with(old.box.offset, axis, place), _with(old.box.extent, axis, length))
        strides = _with(old.strides, axis, old.strides[axis] * step)
        whole = (length, step) == (count, 1)
        yield replace(old, offset=offset, strides=strides, box=box, crc=old.crc if whole else None)

    return _cut(tensor, _with(tensor.shape, axis, max(0, -(-(stop - start) // step))), pieces)


def stacked(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors of one shape as one with a new dimension, as ``torch.stack``."""
    _check_alike(tensors, None)
    if not 0 <= axis <= len(tensors[0].shape):
        raise Inconsistent(f"tensors of shape {list(tensors[0].shape)} cannot be stacked on dimension {axis}", tensor=tensors[0].name)
    expanded = [_inserted(tensor, axis) for tensor in tensors]
    return concatenated(expanded, axis)


def concatenated(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors one after the other along a dimension, as ``torch.cat``."""
    first = tensors[0]
    _check_axis(first, axis)
    _check_alike(tensors, axis)
    moved: list[tuple[Tensor, int]] = []
    length = 0
    for tensor in tensors:
        moved.append((tensor, length))
        length += tensor.shape[axis]

    def piece(old: Piece, start: int) -> Piece:
        return replace(old, box=Box(_with(old.box.offset, axis, old.box.offset[axis] + start), old.box.extent))

    return replace(
        first,
        shape=_with(first.shape, axis, length),
        pieces=tuple(piece(old, start) for tensor, start in moved for old in tensor.pieces),
        copies=tuple(piece(old, start) for tensor, start in moved for old in tensor.copies),
        check_copies=any(tensor.check_copies for tensor in tensors),
        alias_of=None,
    )


def selected(tensor: Tensor, axis: int, index: int) -> Tensor:
    """One element of a dimension, without the dimension, as ``torch.select``."""
    row = sliced(tensor, axis, index, index + 1)

    def without(values: Shape) -> Shape:
        return (*values[:axis], *values[axis + 1 :])

    def pieces(old: Piece) -> Iterator[Piece]:
        yield replace(old, strides=without(old.strides), box=Box(without(old.box.offset), without(old.box.extent)))

    return _cut(row, without(row.shape), pieces)


def unstacked(tensor: Tensor, axis: int) -> list[Tensor]:
    """The elements of a dimension as tensors of their own, as ``torch.unbind``: each piece is looked at once, however many there are."""
    _check_axis(tensor, axis)

    def without(values: Shape) -> Shape:
        return (*values[:axis], *values[axis + 1 :])

    def spread(pieces: Sequence[Piece]) -> list[list[Piece]]:
        rows: list[list[Piece]] = [[] for _ in range(tensor.shape[axis])]
        for old in pieces:
            box = Box(without(old.box.offset), without(old.box.extent))
            step = old.strides[axis] * tensor.dtype.itemsize
            for row in range(old.box.extent[axis]):
                crc = old.crc if old.box.extent[axis] == 1 else None
                new = replace(old, offset=old.offset + row * step, strides=without(old.strides), box=box, crc=crc)
                rows[old.box.offset[axis] + row].append(new)
        return rows

    parts = zip(spread(tensor.pieces), spread(tensor.copies), strict=True)
    shape = without(tensor.shape)
    return [replace(tensor, shape=shape, pieces=tuple(own), copies=tuple(more), alias_of=None) for own, more in parts]


def interleaved(tensor: Tensor, axis: int, *, inverse: bool = False) -> Tensor:
    """Every other element of a dimension first, then the others; ``inverse``: elements of the two halves in turn."""
    _check_axis(tensor, axis)
    length = tensor.shape[axis]
    if length % 2 and inverse:
        text = f"dimension {axis} of shape {list(tensor.shape)} has no two equal halves"
        raise Inconsistent(text, tensor=tensor.name, expected="an even number", hint="tensors and config belong to different models")
    if not inverse:
        return concatenated([sliced(tensor, axis, start, length, 2) for start in (0, 1)], axis)
    halves = [sliced(tensor, axis, 0, length // 2), sliced(tensor, axis, length // 2, length)]
    return merged(stacked(halves, axis + 1), axis)


def merged(tensor: Tensor, axis: int) -> Tensor:
    """A dimension and the next one as one, as ``torch.flatten(axis, axis + 1)``. A piece that does not span whole rows becomes several."""
    _check_axis(tensor, axis, more=1)
    inner = tensor.shape[axis + 1]

    def pieces(old: Piece) -> Iterator[Piece]:
        rows, columns = old.box.extent[axis], old.box.extent[axis + 1]
        begin = old.box.offset[axis] * inner + old.box.offset[axis + 1]
        outer_stride, inner_stride = old.strides[axis], old.strides[axis + 1]
        if rows == 1 or (columns == inner and outer_stride == inner * inner_stride):
            yield _joined(old, axis, begin, rows * columns, inner_stride, 0, tensor.dtype.itemsize)
        elif columns == 1 and inner == 1:
            yield _joined(old, axis, begin, rows, outer_stride, 0, tensor.dtype.itemsize)
        else:
            for row in range(rows):
                yield _joined(old, axis, begin + row * inner, columns, inner_stride, row * outer_stride, tensor.dtype.itemsize)

    return _cut(tensor, (*tensor.shape[:axis], tensor.shape[axis] * inner, *tensor.shape[axis + 2 :]), pieces)


def _joined(old: Piece, axis: int, start: int, length: int, stride: int, skipped: int, itemsize: int) -> Piece:
    """A piece with one dimension in place of two; ``skipped`` elements of its storage come before it."""

    def joined(values: Shape, value: int) -> Shape:
        return (*values[:axis], value, *values[axis + 2 :])

    box = Box(joined(old.box.offset, start), joined(old.box.extent, length))
    crc = old.crc if box.numel == old.box.numel else None
    return replace(old, offset=old.offset + skipped * itemsize, strides=joined(old.strides, stride), box=box, crc=crc)


def _inserted(tensor: Tensor, axis: int) -> Tensor:
    """With a dimension of one element, as ``torch.unsqueeze``."""

    def spread(values: Shape, value: int) -> Shape:
        return (*values[:axis], value, *values[axis:])

    def pieces(old: Piece) -> Iterator[Piece]:
        yield replace(old, strides=spread(old.strides, 1), box=Box(spread(old.box.offset, 0), spread(old.box.extent, 1)))

    return _cut(tensor, spread(tensor.shape, 1), pieces)


def _cut(tensor: Tensor, shape: Shape, pieces: Callable[[Piece], Iterable[Piece]]) -> Tensor:
    """The tensor with another shape, and pieces and copies as ``pieces`` makes them of each (of none that holds nothing of the result)."""
    return replace(
        tensor,
        shape=shape,
        pieces=tuple(new for old in tensor.pieces for new in pieces(old)),
        copies=tuple(new for old in tensor.copies for new in pieces(old)),
        alias_of=None,
    )


def _with(values: Shape, axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis + 1 :])


def unfolded(tensor: Tensor, axis: int, sizes: Shape) -> Tensor:
    """One dimension as several (``torch.unflatten``). What a piece holds of it is a range, which becomes one box or a few."""
    _check_axis(tensor, axis)
    if math.prod(sizes) != tensor.shape[axis]:
        raise Inconsistent(f"dimension {axis} of shape {list(tensor.shape)} is not {' x '.join(map(str, sizes))}", tensor=tensor.name)

    def spread(values: Shape, new: Shape) -> Shape:
        return (*values[:axis], *new, *values[axis + 1 :])

    def pieces(old: Piece) -> Iterator[Piece]:
        stride, offset = old.strides[axis], old.offset
        strides = spread(old.strides, tuple(n * stride for n in contiguous_strides(sizes)))
        for part in range_boxes(sizes, old.box.offset[axis], old.box.extent[axis]):
            box = Box(spread(old.box.offset, part.offset), spread(old.box.extent, part.extent))
            crc = old.crc if box.numel == old.box.numel else None
            yield replace(old, offset=offset, strides=strides, box=box, crc=crc)
            offset += part.numel * stride * tensor.dtype.itemsize

    return _cut(tensor, spread(tensor.shape, sizes), pieces)
