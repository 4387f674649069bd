"""Masks that are added to scores of attention: 0 where a position is seen, minus infinity where it is not. They are no damage."""

from __future__ import annotations

import re

from ckpt_cli.tensors.reading import elements
from ckpt_cli.tensors.tensor import Tensor

CALLED = re.compile(r"(.*_)?mask(_.*)?|masked_bias", re.ASCII)
"""Last parts of names of masks, which may have any pattern. Others are known by theirs: rows that see a range which moves on."""

BLOCK = 1 << 20


def is_mask(name: str, tensor: Tensor) -> bool:
    """Whether a tensor of floats is a mask with infinities: nothing else in it but zeros, or but ones, and no weight of a module."""
    leaf = name.rpartition(".")[2]
    called = CALLED.fullmatch(leaf) is not None
    if leaf.endswith("weight") or tensor.dtype.kind != "float" or tensor.dtype.numpy is None or not tensor.numel:
        return False
    if not (called or sum(size > 1 for size in tensor.shape) > 1) or any(piece.source.forward_only for piece in tensor.pieces):
        return False
    columns = tensor.shape[-1] if tensor.shape else 1
    rows = tensor.shape[-2] if len(tensor.shape) > 1 else 1
    seen: set[float] = set()
    moving, before = True, (0, 0)
    # The first row alone tells that nearly all matrices are none.
    at, count = 0, 1
    while at * columns < tensor.numel:
        count = min(count, tensor.numel // columns - at)
        values = elements(tensor, at * columns, count * columns).reshape(count, columns)
        found = _values(values)
        seen |= found
        if not found or len(seen - {NEGATIVE}) > 1:
            return False
        for number, row in enumerate(values, at):
            moving, before = (moving, before) if called or not moving else _moved(row, number % rows == 0, before)
        if not called and not moving:
            return False
        at, count = at + count, max(1, BLOCK // columns)
    return NEGATIVE in seen and (called or len(seen) > 1)


NEGATIVE = float("-inf")


def _values(values: object) -> set[float]:
    """The values of a block; none if there are others than those of a mask."""
    import numpy

    wide = numpy.asarray(values).astype(numpy.float32)
    right = (wide == 0) | (wide == 1) | numpy.isneginf(wide)
    return {float(value) for value in numpy.unique(wide)} if bool(right.all()) else set()


def _moved(row: object, first: bool, before: tuple[int, int]) -> tuple[bool, tuple[int, int]]:
    """Whether the columns that a row sees are one range, which begins and ends no earlier than that of the row before; and this range."""
    import numpy

    open_ = numpy.flatnonzero(numpy.isfinite(numpy.asarray(row).astype(numpy.float32)))
    if not len(open_):
        return False, before
    begin, end = int(open_[0]), int(open_[-1])
    whole = end - begin + 1 == len(open_)
    return whole and (first or (begin >= before[0] and end >= before[1])), (begin, end)
