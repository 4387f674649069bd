"""Casting: elements of one dtype as those of another, rounded once, to nearest, ties to even."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_cli.dtypes import Dtype, numpy_dtype
from ckpt_cli.tensors.arithmetic import check_arithmetic

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, numpy.dtype[Any]]


RANGE = {"F16": 0, "BF16": 1, "F32": 2, "F64": 3}
"""Float dtypes by the largest value that they hold."""


def can_cast(source: Dtype, target: Dtype) -> bool:
    """Whether elements can be made those of another dtype: floats of 16 bits and more can, anything else only stays as it is."""
    return source == target or (source.kind == target.kind == "float")


def cast(values: Array, source: Dtype, target: Dtype, out: Array) -> int:
    """`cast_here`, where arithmetic is known to lose nothing. Raises Unsupported."""
    check_arithmetic()
    return cast_here(values, source, target, out)


def cast_here(values: Array, source: Dtype, target: Dtype, out: Array) -> int:
    """Cast to ``target`` with one rounding to nearest even; returns how many finite values became infinite.

    ml_dtypes rounds float64 to bfloat16 by way of float32, twice. That is wrong only where the first rounding ends in the middle
    of two bfloat16; these are moved to the side on which the value lies.
    """
    import numpy

    with numpy.errstate(over="ignore", invalid="ignore"):
        narrowed = _without_ties(values) if (source.code, target.code) == ("F64", "BF16") else values
        numpy.copyto(out, narrowed, casting="unsafe")
        if RANGE[target.code] >= RANGE[source.code]:
            return 0
        infinite = int(numpy.count_nonzero(numpy.isinf(out)))
        return infinite - int(numpy.count_nonzero(numpy.isinf(values))) if infinite else 0


def view_as(buffer: bytearray | memoryview, dtype: Dtype, numel: int) -> Array:
    """The first ``numel`` elements of a buffer as an array of ``dtype``."""
    import numpy

    return numpy.frombuffer(buffer, dtype=numpy_dtype(dtype), count=numel)


def _without_ties(values: Array) -> Array:
    """float64 -> float32 to nearest; where that would look like the middle of two bfloat16 and is not, one step off it."""
    import numpy

    nearest = values.astype(numpy.float32)
    bits = nearest.view(numpy.uint32)
    middle = numpy.flatnonzero((bits & 0xFFFF) == 0x8000)
    if len(middle):
        exact, rounded = numpy.abs(values[middle]), numpy.abs(nearest[middle].astype(numpy.float64))
        bits[middle] += (exact > rounded).astype(numpy.uint32)
        bits[middle] -= (exact < rounded).astype(numpy.uint32)
    return nearest
