"""Statistics of values: extremes, mean, deviation, what is not finite. They stream through small blocks, a thread per tensor.

Sums of a block are numpy's pairwise float64 sums around the block's own mean; blocks are added as fractions, without rounding, so neither
the order nor the number of blocks or tensors matters, and nothing overflows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from ckpt_cli.errors import reading
from ckpt_cli.hub.classes.dtypes import packed_weights
from ckpt_cli.name_patterns import pattern_of, ranged
from ckpt_cli.progress import Progress
from ckpt_cli.results.statistics import TensorStats
from ckpt_cli.tensors.arithmetic import check_arithmetic
from ckpt_cli.tensors.parallel import Advance, with_progress
from ckpt_cli.tensors.reading import blocks, elements
from ckpt_cli.tensors.records import Records
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.verifying.drift.compare import BLOCK, PACKED
from ckpt_cli.verifying.drift.distances import widened

if TYPE_CHECKING:
    from ckpt_cli.tensors.reading import Array

LABEL = "reading values"


@dataclass(frozen=True, slots=True)
class Moments:
    """What adds up over blocks: counts, extremes, and the sums of the finite values and of their squares.

    ``real``: no complex numbers; ``packed``: no numbers at all.
    """

    elements: int = 0
    nan: int = 0
    infinite: int = 0
    zeros: int = 0
    absmax: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf
    total: Fraction = field(default_factory=Fraction)
    squares: Fraction = field(default_factory=Fraction)
    exponents: Counter[int] = field(default_factory=Counter)
    real: bool = True
    packed: bool = False

    @property
    def finite(self) -> int:
        return self.elements - self.nan - self.infinite

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.elements + other.elements,
            self.nan + other.nan,
            self.infinite + other.infinite,
            self.zeros + other.zeros,
            max(self.absmax, other.absmax),
            min(self.smallest, other.smallest),
            max(self.largest, other.largest),
            self.total + other.total,
            self.squares + other.squares,
            self.exponents + other.exponents,
            self.real and other.real,
            self.packed or other.packed,
        )

    def stats(self, name: str, dtype: str, tensors: int = 1) -> TensorStats:
        """The result, with numbers of the finite values where there are any."""
        count, known = self.finite, self.finite > 0 and not self.packed
        mean = self.total / count if known else Fraction()
        return TensorStats(
            name=name,
            dtype=dtype,
            tensors=tensors,
            elements=self.elements,
            nan=self.nan,
            infinite=self.infinite,
            zeros=self.zeros,
            absmax=self.absmax if known else None,
            smallest=self.smallest if known and self.real else None,
            largest=self.largest if known and self.real else None,
            mean=float(mean) if known and self.real else None,
            std=_root(self.squares / count - mean * mean) if known and self.real else None,
            exponents=dict(sorted(self.exponents.items())),
        )


def tensor_stats(
    tensors: Mapping[str, Tensor], *, histogram: bool = False, jobs: int | None = None, progress: Progress | None = None
) -> tuple[tuple[TensorStats, ...], tuple[TensorStats, ...]]:
    """Statistics of every tensor (those that share a storage with another are left out), and of groups of like names and dtypes."""
    distinct = {name: tensor for name, tensor in tensors.items() if tensor.alias_of is None}
    packed = packed_weights(tensors)
    found = with_progress(
        lambda item, advance: _moments(item[1], item[0] in packed, histogram, advance),
        distinct.items(),
        distinct.values(),
        jobs=jobs,
        progress=progress,
        total=sum(tensor.nbytes for tensor in distinct.values()),
        label=LABEL,
    )
    known = [(name, tensor.dtype.code, moments) for (name, tensor), moments in zip(distinct.items(), found, strict=True)]
    return tuple(moments.stats(name, code) for name, code, moments in known), _groups(known)


def _groups(known: Iterable[tuple[str, str, Moments]]) -> tuple[TensorStats, ...]:
    alike: dict[tuple[str, str], list[tuple[Sequence[int], Moments]]] = {}
    for name, code, moments in known:
        pattern, numbers = pattern_of(name)
        alike.setdefault((pattern, code), []).append((numbers, moments))
    return tuple(
        sum((moments for _, moments in members), Moments()).stats(
            ranged(pattern, [tuple(numbers) for numbers, _ in members]), code, len(members)
        )
        for (pattern, code), members in alike.items()
    )


def _moments(tensor: Tensor, packed: bool, histogram: bool, advance: Advance) -> Moments:
    if packed or tensor.dtype.code in PACKED:
        # Not numbers on their own.
        advance(tensor.nbytes, LABEL)
        return Moments(tensor.numel, real=False, packed=True)
    found, records = Moments(), Records()
    with reading(tensor=tensor.name):
        for start, count in blocks(tensor, BLOCK):
            found += _block(elements(tensor, start, count, records=records), histogram)
            advance(count * tensor.dtype.itemsize, LABEL)
        records.check_rest()
    return found


def _block(stored: Array, histogram: bool) -> Moments:
    import numpy

    check_arithmetic()
    values = widened(stored)
    real = values.dtype.kind != "c"
    nan = numpy.isnan(values)
    finite = values[numpy.isfinite(values)]
    counts = {"elements": len(values), "nan": int(nan.sum()), "zeros": int((finite == 0).sum()), "real": real}
    infinite = len(values) - len(finite) - counts["nan"]
    if not len(finite):
        return Moments(infinite=infinite, **counts)  # type: ignore[arg-type]
    size = numpy.abs(finite)
    exponents = _exponents(size) if histogram else Counter()
    if not real:
        return Moments(infinite=infinite, absmax=float(size.max()), exponents=exponents, **counts)  # type: ignore[arg-type]
    # Divided by a power of two, which rounds nothing of what matters, squares neither overflow nor vanish.
    shift = math.frexp(float(size.max()))[1]
    scaled = numpy.ldexp(finite, -shift)
    mean = float(scaled.mean())
    apart = scaled - mean
    around, rest = float((apart * apart).sum()), float(apart.sum())
    unit, middle = Fraction(2) ** shift, Fraction(mean)
    total = len(finite) * middle + Fraction(rest)
    squares = Fraction(around) + 2 * middle * Fraction(rest) + len(finite) * middle * middle
    return Moments(
        infinite=infinite,
        absmax=float(size.max()),
        smallest=float(finite.min()),
        largest=float(finite.max()),
        total=total * unit,
        squares=squares * unit * unit,
        exponents=exponents,
        **counts,  # type: ignore[arg-type]
    )


def _exponents(size: Array) -> Counter[int]:
    """How many values lie in each power of two; zeros in none."""
    import numpy

    powers = numpy.frexp(size[size > 0])[1] - 1
    if not len(powers):
        return Counter()
    low = int(powers.min())
    return Counter({low + i: int(count) for i, count in enumerate(numpy.bincount(powers - low)) if count})


def _root(variance: Fraction) -> float:
    """A square root without overflow on the way."""
    if variance <= 0:
        return 0.0
    exponent = (variance.numerator.bit_length() - variance.denominator.bit_length()) // 2
    return math.ldexp(math.sqrt(variance / Fraction(4) ** exponent), exponent)
