"""The kernel of `average`: a weighted sum of several tiles, rounded once.

The result of an element is ``sum(weight * value) / divisor``, rounded once to the wanted dtype, to nearest even, whatever the
values are. Sums are kept as unevaluated pairs of float64 (Knuth's TwoSum; Ogita, Rump and Oishi, "Accurate sum and dot
product", 2005). Products are exact because weights are split (Veltkamp) where they have too many bits. The pair is rounded to
odd before the last step, so that nothing is rounded twice (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums",
2008). Where even the pair lost something and that could decide the rounding, the element is computed once more as a fraction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from ckpt_cli.dtypes import BY_CODE, Dtype, numpy_dtype
from ckpt_cli.errors import Inconsistent
from ckpt_cli.tensors.arithmetic import check_arithmetic
from ckpt_cli.tensors.casting import cast

if TYPE_CHECKING:
    from ckpt_cli.tensors.reading import Array

BLOCK = 16 << 10
"""Elements that are worked on at a time: what is needed for them stays in the processor's cache."""

BITS = {"F64": 53, "F32": 24, "F16": 11, "BF16": 8, "C64": 24}
"""Significant bits of the dtypes that are averaged; complex numbers are averaged part by part."""

SAFE = (2.0**-250, 2.0**250)
"""Magnitudes of weights, and of float64 values, whose products neither overflow nor lose bits to underflow."""

TINY = 2.0**-900
"""Products of float64 values below this may lose bits to underflow."""

FRACTION = (1 << 52) - 1
LOWER_27 = (1 << 27) - 1
F64 = BY_CODE["F64"]
SPLITTER = 2.0**27 + 1


def real_parts(dtype: Dtype) -> tuple[Dtype, int]:
    """The dtype of the real numbers that an element consists of, and how many these are."""
    return (BY_CODE["F32"], 2) if dtype.code == "C64" else (dtype, 1)


@dataclass(frozen=True, slots=True)
class Formula:
    """``sum(weight * value) / divisor``: one weight per source, float64."""

    weights: tuple[float, ...]
    divisor: float

    def without_zeros(self) -> Formula:
        """The same sum without the sources that add nothing to it."""
        return Formula(tuple(weight for weight in self.weights if weight), self.divisor)

    def exactly(self, values: Sequence[float]) -> Fraction:
        """The formula without any rounding, for finite values."""
        total = sum((Fraction(w) * Fraction(x) for w, x in zip(self.weights, values, strict=True)), Fraction(0))
        return total / Fraction(self.divisor)


class WeightedSum:
    """One tile's sum on its way: `add` the values of each source in order, then take the `result`.

    ``capacity`` is the largest number of real numbers in a tile; memory is 17 bytes for each, or 25 where weights had to be
    split. Not for several threads.
    """

    def __init__(self, formula: Formula, source: Dtype, capacity: int) -> None:
        import numpy

        self._formula = formula
        self._wide = source.code == "F64"
        self._parts = [_exact_parts(weight, BITS[source.code]) for weight in formula.weights]
        self._split = self._wide or any(len(parts) > 1 for parts in self._parts)
        self._high = numpy.zeros(capacity)
        self._low = numpy.zeros(capacity)
        self._loose = numpy.zeros(capacity, bool)
        self._size = numpy.zeros(capacity if self._split else 0)
        self._special: dict[int, Array] = {}
        self._scratch = [numpy.empty(min(BLOCK, capacity)) for _ in range(5)]
        self._added = 0

    def start(self) -> None:
        """Begin another tile. Raises Unsupported for arithmetic that is not exact enough."""
        check_arithmetic()
        self._added = 0
        self._special.clear()
        self._loose[...] = False
        self._size[...] = 0.0

    def add(self, values: Array) -> int:
        """Add the next source's values (real numbers of the source dtype). Returns how many of them are NaN or infinite."""
        import numpy

        not_finite = 0
        parts, weight = self._parts[self._added], self._formula.weights[self._added]
        for begin, block in _blocks(values):
            x = self._scratch[0][: len(block)]
            # Signalling NaNs, and float64 values that are too large for what follows (`_is_extreme`).
            with numpy.errstate(all="ignore"):
                numpy.copyto(x, block, casting="unsafe")
                finite = numpy.isfinite(x)
                if not finite.all():
                    not_finite += len(x) - int(numpy.count_nonzero(finite))
                    self._add_special(begin, x, finite, weight)
                    numpy.copyto(x, 0.0, where=~finite)
                self._add_block(slice(begin, begin + len(x)), x, parts, weight)
        self._added += 1
        return not_finite

    def result(self, target: Dtype, out: Array, values_at: Callable[[int], Sequence[float]]) -> int:
        """Write the rounded result to ``out`` (real numbers); returns how many finite sums became infinite.

        ``values_at`` gives the values of all sources at one position again.
        """
        import numpy

        if self._added != len(self._formula.weights):
            raise Inconsistent(f"{self._added} of {len(self._formula.weights)} checkpoints were added to a sum")
        over = 0
        for begin, block in _blocks(out):
            where = slice(begin, begin + len(block))
            with numpy.errstate(all="ignore"):
                high, low, doubtful = self._divided(where)
                if target == F64:
                    doubtful |= self._may_be_a_tie(where, high, low)
                else:
                    _round_to_odd(high, low)
                    doubtful |= self._may_be_lost(where, high, target)
            special = self._special.get(begin, numpy.zeros(len(block)))
            numpy.copyto(high, special / self._formula.divisor, where=special != 0)
            for i in numpy.flatnonzero(doubtful & (special == 0)):
                exact = self._formula.exactly(values_at(begin + int(i)))
                # A zero keeps its sign.
                high[i] = _nearly(exact, target) if exact else 0.0 if high[i] != 0 else high[i]
            cast(high, F64, target, block)
            over += int(numpy.count_nonzero(numpy.isinf(block) & (special == 0)))
        return over

    # -- adding ------------------------------------------------------------------------------------------------------

    def _add_block(self, where: slice, x: Array, parts: Sequence[float], weight: float) -> None:
        import numpy

        high, low, loose = self._high[where], self._low[where], self._loose[where]
        term, error, *scratch = (array[: len(x)] for array in self._scratch[1:])
        if self._split:
            magnitude = numpy.multiply(numpy.abs(x, out=term), abs(weight), out=term)
            self._size[where] += magnitude
            if self._wide:
                loose |= (magnitude < TINY) & (x != 0)
        first = self._added == 0
        for value in self._exact_values(x):
            for part in parts:
                numpy.multiply(value, part, out=term)
                if first:
                    numpy.copyto(high, term)
                    low[...] = 0.0
                    first = False
                    continue
                _two_sum(high, term, error, scratch)
                if error.any():
                    _two_sum(low, error, term, scratch)
                    if term.any():
                        loose |= term != 0

    def _exact_values(self, x: Array) -> list[Array]:
        """Values that add up to ``x`` and whose products with a part of a weight are exact in float64."""
        import numpy

        if not self._wide:
            return [x]
        upper = _upper_half(x)
        # The sign of zero belongs to both parts.
        return [upper, numpy.where(x == 0, x, x - upper)]

    def _add_special(self, begin: int, x: Array, finite: Array, weight: float) -> None:
        import numpy

        amounts = numpy.where(finite, 0.0, x * weight)
        self._special[begin] = self._special[begin] + amounts if begin in self._special else amounts

    # -- dividing and rounding ---------------------------------------------------------------------------------------

    def _divided(self, where: slice) -> tuple[Array, Array, Array]:
        """The quotient as a pair of float64 (the first is the nearest to both), and where the second may have the wrong sign."""
        import numpy

        high, low, divisor = self._high[where], self._low[where], self._formula.divisor
        if low.any():
            exact, zero = high.copy(), low == 0
            rest = numpy.empty_like(low)
            _two_sum(exact, low, rest, [array[: len(low)] for array in self._scratch[:2]])
            # A sum with zero would make a negative zero positive.
            numpy.copyto(exact, high, where=zero)
            high, low = exact, rest
        doubtful = numpy.zeros(len(high), bool)
        if _significant_bits(divisor) == 1:
            return high / divisor, low / divisor, doubtful
        quotient = high / divisor
        rest = (_remainder(high, quotient, divisor) + low) / divisor
        total = numpy.where(rest == 0, quotient, quotient + rest)
        tail = rest - (total - quotient)
        doubtful |= (tail != rest) & (numpy.abs(tail) <= numpy.abs(rest) * 2.0**-45)
        if doubtful.any():
            at = numpy.flatnonzero(doubtful)
            exact = _is_product(high[at], low[at], total[at], divisor)
            tail[at[exact]] = 0.0
            doubtful[at[exact]] = False
        return total, tail, doubtful

    def _lost(self, where: slice) -> Array:
        """A bound of what the pairs lost, before the division: every addition to ``low`` loses 2^-53 of it at most."""
        import numpy

        if not self._split:
            return numpy.where(self._loose[where], numpy.inf, 0.0)
        terms = 4 * len(self._formula.weights)
        lost: Array = self._size[where] * (terms * terms * 2.0**-106)
        return lost

    def _may_be_lost(self, where: slice, high: Array, target: Dtype) -> Array:
        """Where the pair is not exact and what it lost could decide how ``high`` (rounded to odd) is rounded."""
        import numpy

        loose = self._loose[where].copy()
        if loose.any():
            at = numpy.flatnonzero(loose)
            near = _near_boundary(high[at], target)
            cancelled = numpy.abs(high[at] * self._formula.divisor) * 2.0**-54 <= self._lost(where)[at] + TINY
            loose[at] = near | cancelled
        if self._wide:
            loose |= _is_extreme(self._size[where])
        return loose

    def _may_be_a_tie(self, where: slice, high: Array, low: Array) -> Array:
        """Where the pair (rounded to float64 by its first part) is too close to halfway between two float64 to tell."""
        import numpy

        ulp = numpy.spacing(numpy.abs(high))
        close = numpy.abs(numpy.abs(low) - ulp / 2) <= ulp * 2.0**-20
        # Below a power of two the next number is half as far away.
        below = (high.view(numpy.int64) & FRACTION) == 0
        close |= below & (numpy.abs(numpy.abs(low) - ulp / 4) <= ulp * 2.0**-20)
        close |= self._lost(where) + TINY >= ulp * abs(self._formula.divisor) * 2.0**-22
        exact = ~self._loose[where] if _significant_bits(self._formula.divisor) == 1 else numpy.zeros(len(high), bool)
        if self._split:
            exact |= self._size[where] == 0
        doubtful: Array = close & ~exact
        return doubtful | _is_extreme(self._size[where]) if self._wide else doubtful


def _blocks(values: Array) -> Iterator[tuple[int, Array]]:
    for begin in range(0, len(values), BLOCK):
        yield begin, values[begin : begin + BLOCK]


def _two_sum(total: Array, term: Array, error: Array, scratch: Sequence[Array]) -> None:
    """total, error = the rounded sum of total and term, and exactly what it lacks."""
    import numpy

    added, virtual = scratch
    numpy.add(total, term, out=added)
    numpy.subtract(added, total, out=virtual)
    numpy.subtract(term, virtual, out=error)
    numpy.subtract(added, virtual, out=virtual)
    numpy.subtract(total, virtual, out=virtual)
    numpy.add(error, virtual, out=error)
    numpy.copyto(total, added)


def _upper_half(values: Array) -> Array:
    """The upper 26 bits of float64 values; what is left has at most 26 bits, too (Veltkamp)."""
    import numpy

    with numpy.errstate(over="ignore", invalid="ignore"):
        wide = values * SPLITTER
        upper: Array = wide - (wide - values)
    return upper


def _product(values: Array, factor: float) -> tuple[Array, Array]:
    """Rounded products, and what they lack of the exact ones (Dekker's product)."""
    import numpy

    upper = _upper_half(values)
    lower = values - upper
    factor_upper = float(_upper_half(numpy.array([factor]))[0])
    factor_lower = factor - factor_upper
    product = values * factor
    error = ((upper * factor_upper - product) + upper * factor_lower + lower * factor_upper) + lower * factor_lower
    return product, error


def _remainder(dividend: Array, quotient: Array, divisor: float) -> Array:
    """Dividend - quotient * divisor, which is exact in float64 for the rounded quotient."""
    product, error = _product(quotient, divisor)
    remainder: Array = (dividend - product) - error
    return remainder


def _is_product(high: Array, low: Array, quotient: Array, divisor: float) -> Array:
    """Where a pair is exactly the product of a quotient (near to it) and the divisor."""
    import numpy

    product, error = _product(quotient, divisor)
    total, lacking = error.copy(), numpy.empty_like(error)
    _two_sum(total, -low, lacking, [numpy.empty_like(error), numpy.empty_like(error)])
    exact: Array = (total == high - product) & (lacking == 0)
    return exact


def _round_to_odd(high: Array, low: Array) -> None:
    """The pair as one float64, in ``high``: toward zero, with the last bit set wherever ``low`` is not zero."""
    import numpy

    if not low.any():
        return
    inexact = low != 0
    bits = high.view(numpy.int64)
    bits -= inexact & (numpy.signbit(low) != numpy.signbit(high))
    bits |= inexact


def _near_boundary(high: Array, target: Dtype) -> Array:
    """Whether float64 values near one that was rounded to odd (two further on, on each side) become different values of the target.

    Only the second one on each side is certainly beyond a tie that the value was rounded away from.
    """
    import numpy

    below, above = (numpy.empty(len(high), numpy_dtype(target)) for _ in range(2))
    cast(numpy.nextafter(numpy.nextafter(high, -numpy.inf), -numpy.inf), F64, target, below)
    cast(numpy.nextafter(numpy.nextafter(high, numpy.inf), numpy.inf), F64, target, above)
    near: Array = below != above
    return near


def _nearly(value: Fraction, target: Dtype) -> float:
    """A fraction as a float64 that will be rounded to ``target`` like the fraction itself."""
    import numpy

    try:
        nearest = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    rest = value - Fraction(nearest)
    if target == F64 or rest == 0:
        return nearest
    high = numpy.array([nearest])
    _round_to_odd(high, numpy.array([1.0 if rest > 0 else -1.0]))
    return float(high[0])


def _is_extreme(sizes: Array) -> Array:
    """Float64 sums that may have overflowed on the way, or lost bits to underflow."""
    extreme: Array = (sizes > SAFE[1]) | ((sizes < SAFE[0]) & (sizes != 0))
    return extreme


def _significant_bits(value: float) -> int:
    """Bits from the first to the last one that is set: 1 for powers of two."""
    numerator = abs(Fraction(value).numerator)
    return (numerator // (numerator & -numerator)).bit_length() if numerator else 0


def _exact_parts(weight: float, bits: int) -> list[float]:
    """The weight, or two parts of it of at most 27 bits and of its sign, so that products are exact in float64.

    ``bits`` are the significant bits of the values; float64 values are split as well, into halves of 26 bits.
    """
    import numpy

    if _significant_bits(weight) + min(bits, 26) <= 53:
        return [weight]
    upper = float((numpy.array([weight]).view(numpy.int64) & ~LOWER_27).view(numpy.float64)[0])
    return [upper, weight - upper]
