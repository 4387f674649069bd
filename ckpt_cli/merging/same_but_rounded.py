"""Whether a tensor of a training has the values of the base's, apart from what loading rounds: a base in float32, trained in 16 bits.

Rounding is undone exactly instead of being tolerated, since norms and embeddings that were trained may move by less than a 16-bit step.
Reads are bounded. Matrices change everywhere when they are trained, so places of them are enough; of embeddings and heads only the rows of
tokens that were seen may change, so they are read whole, as are small tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_cli.dtypes import BY_CODE, Dtype
from ckpt_cli.hub.tied_names import EMBEDDINGS, HEADS, RARE_EMBEDDINGS, SHARED, last_two
from ckpt_cli.tensors.reading import blocks, element_bytes, elements
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.urls import is_remote

WHOLE = 1 << 16
"""Tensors of up to so many elements are compared as a whole."""

BLOCK = 1 << 18
"""Elements that are compared at a time."""

SAMPLE = 4096
"""Elements that are read at each of three places of others."""

IN_TRAINING = (BY_CODE["BF16"], BY_CODE["F16"])
"""Dtypes that a base is loaded in, whatever its own and that of what is saved."""


def is_comparable(mine: Tensor, base: Tensor) -> bool:
    """Whether two tensors of one shape have values that can be compared: numbers that can be read anywhere, or the same dtype."""
    if any(piece.source.forward_only for tensor in (mine, base) for piece in tensor.pieces):
        return False
    return mine.dtype == base.dtype or all(tensor.dtype.kind == "float" and tensor.dtype.numpy is not None for tensor in (mine, base))


def is_in_store(tensor: Tensor) -> bool:
    """Whether any of a tensor is read from another machine."""
    return any(is_remote(piece.source.path) for piece in tensor.pieces)


def same_but_rounded(name: str, mine: Tensor, base: Tensor) -> bool:
    """Whether a tensor called ``name`` has the values of the base's, in whichever dtype these were loaded and are saved."""
    known = list(dict.fromkeys((base.dtype, mine.dtype, *IN_TRAINING)))
    for start, count in _places(name, mine, base):
        if mine.dtype == base.dtype and element_bytes(mine, start, count) == element_bytes(base, start, count):
            continue
        known = [dtype for dtype in known if mine.dtype.kind == base.dtype.kind == "float" and _is_rounded(mine, base, dtype, start, count)]
        if not known:
            return False
    return True


def _places(name: str, mine: Tensor, base: Tensor) -> Iterator[tuple[int, int]]:
    by_rows = last_two(name) in (*EMBEDDINGS, *RARE_EMBEDDINGS, *HEADS, SHARED) and not (is_in_store(mine) or is_in_store(base))
    if by_rows or mine.numel <= WHOLE:
        return blocks(mine, BLOCK)
    end = mine.numel - SAMPLE
    return ((start, SAMPLE) for start in (0, end // 2, end))


def _is_rounded(mine: Tensor, base: Tensor, dtype: Dtype, start: int, count: int) -> bool:
    """Whether these elements are those of the base, rounded to a dtype and then to that in which they are saved."""
    import numpy

    if mine.dtype.numpy is None or base.dtype.numpy is None:
        return False
    with numpy.errstate(all="ignore"):
        loaded = elements(base, start, count, dtype)
        own = elements(mine, start, count)
        return bool(numpy.array_equal(loaded.astype(own.dtype).astype(numpy.float64), own.astype(numpy.float64), equal_nan=True))
