"""Whether two tensors hold the same weights in two dtypes, by samples: of every stored range its first and last elements."""

from __future__ import annotations

from ckpt_cli.boxes import contiguous_strides
from ckpt_cli.tensors.casting import RANGE
from ckpt_cli.tensors.reading import elements
from ckpt_cli.tensors.tensor import Tensor

SAMPLE = 32


def agrees(master: Tensor, weights: Tensor) -> bool:
    """Whether samples of the weights are those of the master, rounded to their dtype. Dtypes that are no floats are not compared."""
    if master.dtype.code not in RANGE or weights.dtype.code not in RANGE or master.shape != weights.shape:
        return master.shape == weights.shape
    import numpy

    for start in _starts(master):
        count = min(SAMPLE, master.numel - start)
        made, theirs = elements(master, start, count, weights.dtype), elements(weights, start, count)
        if not numpy.all((made == theirs) | (numpy.isnan(made) & numpy.isnan(theirs))):
            return False
    return True


def _starts(tensor: Tensor) -> list[int]:
    """Where samples begin: at the beginning and before the end of every piece."""
    strides = contiguous_strides(tensor.shape)
    starts: dict[int, None] = {}
    for piece in tensor.pieces:
        first = sum(a * stride for a, stride in zip(piece.box.offset, strides, strict=True))
        last = sum((a + n - 1) * stride for a, n, stride in zip(piece.box.offset, piece.box.extent, strides, strict=True))
        starts |= dict.fromkeys((first, max(last - SAMPLE + 1, first)))
    return list(starts)
