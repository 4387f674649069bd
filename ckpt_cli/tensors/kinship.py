"""Whether two sets of tensors of the same names and shapes have anything to do with each other, by samples of a few matrices.

What was trained from a model stays close to it: cosines of matrices are above 0.9 after a fine-tuning. Those of two models that were
initialised apart are zero, within the noise of a sample. Norms and biases say nothing, as they are alike in all models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ckpt_cli.tensors.casting import RANGE
from ckpt_cli.tensors.reading import elements
from ckpt_cli.tensors.tensor import Tensor

MATRICES = 8
"""So many are sampled, over the whole depth of a model."""

ENOUGH = 3
"""Matrices that must be sampled for a verdict."""

SMALLEST = 1024
"""Elements of a matrix whose cosine is above the noise."""

SAMPLE = 4096
"""Elements that are read at each of three places."""

NOISE = 5.0
"""Standard deviations of the cosine of two independent samples, which is one over the root of their length."""

LEAST = 0.1
"""A cosine below is none, however long the sample is: unrelated models have a little in common too."""


def unrelated(mine: Mapping[str, Tensor], other: Mapping[str, Tensor], enough: int | None = None) -> str | None:
    """What was measured, in words, if every sampled matrix says that the weights have nothing in common; None otherwise.

    ``enough`` matrices must be sampled, by default `ENOUGH`. Those that one side took from the other are no evidence, nor are those that
    are all zero, or of numbers that need a scale.
    """
    common = [name for name, tensor in mine.items() if name in other and _comparable(tensor, other[name])]
    step = max(len(common) / MATRICES, 1.0)
    chosen = [common[int(i * step)] for i in range(min(MATRICES, len(common)))]
    found = []
    for name in chosen:
        cosine, count = _cosine(mine[name], other[name])
        if not math.isfinite(cosine):
            continue
        if abs(cosine) > max(LEAST, NOISE / math.sqrt(count)):
            return None
        found.append(cosine)
    if len(found) < (enough or ENOUGH):
        return None
    largest = max(found, key=abs)
    return f"cosine {abs(largest):.2f} or less in {len(found)} of {len(found)} sampled matrices"


def _comparable(mine: Tensor, other: Tensor) -> bool:
    if mine.shape != other.shape or sum(size > 1 for size in mine.shape) < 2 or mine.numel < SMALLEST:
        return False
    pieces = (*mine.pieces, *other.pieces)
    return all(tensor.dtype.code in RANGE for tensor in (mine, other)) and not any(piece.source.forward_only for piece in pieces)


def _cosine(mine: Tensor, other: Tensor) -> tuple[float, int]:
    """The cosine of a sample of both around their means, NaN where there is none, and the number of elements."""
    import numpy

    count = min(SAMPLE, mine.numel)
    end = mine.numel - count
    places = [(0, mine.numel)] if mine.numel <= 3 * SAMPLE else [(start, count) for start in (0, end // 2, end)]
    sides = [numpy.concatenate([elements(tensor, *place) for place in places]).astype(numpy.float64) for tensor in (mine, other)]
    with numpy.errstate(invalid="ignore", divide="ignore", over="ignore"):
        first, second = (side - side.mean() for side in sides)
        cosine = float((first * second).sum() / math.sqrt(float((first * first).sum()) * float((second * second).sum()) or math.nan))
    return cosine, len(first)
