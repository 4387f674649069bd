"""Whether two sets of tensors of the same names and shapes have anything to do with each other, by samples of a few matrices.

What was trained from a model stays close to it: cosines of matrices are above 0.9 after a fine-tuning. Those of two models that were
initialised apart are zero, within the noise of a sample. Norms and biases say nothing, as they are alike in all models.

A model of which one part stayed close and another has nothing in common was put together from two, if both have matrices of one kind:
what is initialised anew on purpose, such as a head, is so in all layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ckpt_cli.names import few
from ckpt_cli.tensors.casting import RANGE
from ckpt_cli.tensors.reading import element_bytes, elements
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.views import transposed
from ckpt_cli.urls import is_remote

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

RELATED = 0.5
"""A cosine above says that one matrix was trained from the other."""

NUMBER = re.compile(r"[0-9]+", re.ASCII)


def unrelated(mine: Mapping[str, Tensor], other: Mapping[str, Tensor], enough: int | None = None) -> str | None:
    """What was measured, in words, if every sampled matrix says that the weights have nothing in common; None otherwise.

    ``enough`` matrices must be sampled, by default `ENOUGH`. Those that one side took from the other are no evidence, nor are those that
    are all zero, or of numbers that need a scale.
    """
    found = []
    for name in _spread(mine, other):
        cosine, count = _cosine(mine[name], other[name])
        if not math.isfinite(cosine):
            continue
        if not _is_none(cosine, count):
            return None
        found.append(cosine)
    if len(found) < (enough or ENOUGH):
        return None
    largest = max(found, key=abs)
    return f"cosine {abs(largest):.2f} or less in {len(found)} of {len(found)} sampled matrices"


def unrelated_layers(mine: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str | None:
    """What was measured, in words, if the matrices of some layers have nothing in common, and those of others have; None otherwise.

    Sampled is the kind of matrices that most layers have. Nothing is read of a store for it.
    """
    chosen = _of_one_kind(mine, other)
    if any(is_remote(piece.source.path) for name in chosen for piece in (*mine[name].pieces, *other[name].pieces)):
        return None
    found = {name: _cosine(mine[name], other[name]) for name in chosen}
    strange = strangers(found)
    return f"{few(strange, 3)} ({len(strange)} of {len(chosen)} sampled matrices of this kind)" if strange else None


def signs_agree(mine: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether most signs of every sampled matrix are those of the other: then nothing is unrelated, which is told without numpy.

    Of two matrices with a cosine c, a share of acos(c) / pi differs in sign: a quarter at 0.7.
    """
    return all(_signs_agree(mine[name], other[name]) for name in dict.fromkeys([*_spread(mine, other), *_of_one_kind(mine, other)]))


def _signs_agree(mine: Tensor, other: Tensor) -> bool:
    if mine.dtype != other.dtype:
        return False
    size, count = mine.dtype.itemsize, min(SAMPLE, mine.numel)
    first, second = (int.from_bytes(element_bytes(tensor, 0, count)[size - 1 :: size], "little") for tensor in (mine, other))
    differing = (first ^ second) & int.from_bytes(b"\x80" * count, "little")
    return 4 * differing.bit_count() < count


def _spread(mine: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Matrices over the whole depth of a model."""
    common = [name for name, tensor in mine.items() if name in other and comparable(tensor, other[name])]
    step = max(len(common) / MATRICES, 1.0)
    return [common[int(i * step)] for i in range(min(MATRICES, len(common)))]


def _of_one_kind(mine: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Matrices of the kind that most layers have, from the first to the last layer."""
    kinds: dict[str, list[str]] = {}
    for name, tensor in mine.items():
        if NUMBER.search(name) and name in other and comparable(tensor, other[name]):
            kinds.setdefault(_kind(name), []).append(name)
    names = max(kinds.values(), key=len, default=[])
    count = min(len(names), MATRICES)
    return [names[i * (len(names) - 1) // max(count - 1, 1)] for i in range(count)]


def strangers(cosines: Mapping[str, tuple[float, int]]) -> list[str]:
    """The matrices that have nothing in common with their like, of kinds of which another layer's stayed close.

    ``cosines``: of every matrix by name, and how many elements it was measured over.
    """
    related = {_kind(name) for name, (cosine, _) in cosines.items() if cosine > RELATED}
    return [name for name, each in cosines.items() if _is_none(*each) and _kind(name) in related]


def is_turned(mine: Tensor, other: Tensor) -> bool:
    """Whether a square matrix is another one with its dimensions exchanged."""
    return len(mine.shape) == 2 and mine.shape[0] == mine.shape[1] and _cosine(mine, transposed(other, 0, 1))[0] > RELATED


def _kind(name: str) -> str:
    """The name of a matrix without the numbers of layer and expert."""
    return NUMBER.sub("#", name)


def _is_none(cosine: float, count: int) -> bool:
    """Whether a cosine over so many elements is within the noise; of what is no number, and of a few elements, nothing is known."""
    noise = NOISE / math.sqrt(max(count, 1))
    return noise < RELATED and abs(cosine) <= max(LEAST, noise)


def comparable(mine: Tensor, other: Tensor) -> bool:
    """Whether two tensors are matrices that say whether one was trained from the other."""
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
