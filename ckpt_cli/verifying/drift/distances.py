"""How far two arrays are apart: sums in float64 that neither lose small differences nor overflow.

Blocks are added one by one. Each gives numpy's pairwise sums, and these are added without rounding (``math.fsum``) at the end,
so that the error does not grow with the number of blocks. Squares of float64 values can leave its range: there each block is
scaled by a power of two, which rounds nothing. Every other dtype is far from the limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from ckpt_cli.tensors.arithmetic import check_arithmetic

if TYPE_CHECKING:
    from ckpt_cli.tensors.reading import Array

Scaled: TypeAlias = tuple[float, int]
"""(m, e) is m * 2**e."""

NEAR = 0.25
"""Up to this ||a-b||^2 / ||b||^2 the cosine follows from the difference, which keeps its digits; above it from the product."""


@dataclass(frozen=True, slots=True)
class Distances:
    """Array ``a`` (new) against ``b`` (base), over all elements.

    ``changed`` elements have other bits (between two dtypes: another value, NaN being equal to NaN). ``max_abs`` and ``mean_abs``
    are of the absolute difference; ``l2`` is the norm of a - b; ``relative_l2`` is l2 / ``base_norm``: 0 if the values are equal, inf
    if only the base is all zero. ``cosine_distance`` is 1 - cos(a, b), None if one of them is all zero. Complex numbers have
    the angle of their real and imaginary parts.

    Infinities and NaNs that both have in the same place enter nothing. Any other gives what IEEE arithmetic gives: an infinite or NaN
    difference, and no angle (NaN).
    """

    elements: int
    changed: int
    max_abs: float
    mean_abs: float
    l2: float
    base_norm: float
    relative_l2: float
    cosine_distance: float | None


@dataclass(slots=True)
class Accumulator:
    """Takes pairs of blocks, gives `Distances` of all of them together. Raises Unsupported where arithmetic loses values."""

    elements: int = 0
    changed: int = 0
    largest: float = 0.0
    odd_delta: float = 0.0
    odd_base: float = 0.0
    sums: dict[str, list[Scaled]] = field(default_factory=lambda: {name: [] for name in ("|d|", "dd", "aa", "bb", "ab", "db")})

    def add(self, ours: Array, base: Array) -> None:
        """Two arrays of one dimension and one length, of floating or complex dtypes: integers are only counted where they differ."""
        import numpy

        check_arithmetic()
        self.elements += len(base)
        differs = changed_elements(ours, base)
        changed = int(numpy.count_nonzero(differs))
        wide = _is_wide(ours) or _is_wide(base)
        b = widened(base)
        if not changed:
            b[~numpy.isfinite(b)] = 0
            pairs, exponent = _normalised(_pairs(b), wide)
            self._add(dict.fromkeys(("aa", "bb", "ab"), (_dot(pairs, pairs), 2 * exponent)))
            return
        self.changed += changed
        a = widened(ours)
        if a.dtype != b.dtype:
            a, b = a.astype(numpy.complex128), b.astype(numpy.complex128)
        with numpy.errstate(invalid="ignore", over="ignore"):
            d = a - b
            odd = ~(numpy.isfinite(a) & numpy.isfinite(b))
            if odd.any():
                self._set_aside(a, b, d, odd)
            absolute = numpy.abs(d)
        self.largest = max(self.largest, float(absolute.max()))
        absolute, shift = _normalised(absolute, wide)
        (a, ea), (b, eb), (d, ed) = (_normalised(_pairs(values), wide) for values in (a, b, d))
        self._add(
            {
                "|d|": (float(absolute.sum()), shift),
                "dd": (_dot(d, d), 2 * ed),
                "aa": (_dot(a, a), 2 * ea),
                "bb": (_dot(b, b), 2 * eb),
                "ab": (_dot(a, b), ea + eb),
                "db": (_dot(d, b), ed + eb),
            }
        )

    def result(self) -> Distances:
        """The distances of everything that was added; all zero of nothing."""
        total = {name: _total(parts) for name, parts in self.sums.items()}
        l2, base_norm, mean = _root(total["dd"]), _root(total["bb"]), _scale(total["|d|"][0] / max(self.elements, 1), total["|d|"][1])
        largest, relative, cosine = self.largest, _relative(total), _cosine_distance(total)
        if math.isinf(largest):
            # The difference of two finite numbers is beyond the range of float64.
            l2 = mean = relative = math.inf
            cosine = math.nan
        if self.odd_delta:
            largest = mean = l2 = self.odd_delta
            base_norm = self.odd_base or base_norm
            relative = l2 / base_norm if base_norm else l2
            cosine = math.nan
        return Distances(self.elements, self.changed, largest, mean, l2, base_norm, relative, cosine)

    def _add(self, sums: dict[str, Scaled]) -> None:
        for name, part in sums.items():
            if part[0]:
                self.sums[name].append(part)

    def _set_aside(self, a: Array, b: Array, d: Array, odd: Array) -> None:
        """Take what is not finite out of the sums, and remember it where it differs."""
        import numpy

        unequal = odd & (a != b) & ~(numpy.isnan(a) & numpy.isnan(b))
        if unequal.any():
            self.odd_delta = float(numpy.maximum(self.odd_delta, numpy.abs(d[unequal]).max()))
            not_finite = unequal & ~numpy.isfinite(b)
            self.odd_base = float(numpy.maximum(self.odd_base, numpy.abs(b[not_finite]).max(initial=0.0)))
        d[odd] = 0
        for values in (a, b):
            values[~numpy.isfinite(values)] = 0


def changed_elements(ours: Array, base: Array) -> Array:
    """Which elements have changed. Bits tell within one dtype, so that neither NaN nor a large integer is mistaken."""
    import numpy

    if ours.dtype == base.dtype:
        size = ours.dtype.itemsize
        if size <= 8:
            bits: Array = ours.view(f"u{size}") != base.view(f"u{size}")
            return bits
        halves: Array = (ours.view("u8") != base.view("u8")).reshape(-1, size // 8).any(axis=1)
        return halves
    with numpy.errstate(invalid="ignore"):
        differs: Array = (ours != base) & ~((ours != ours) & (base != base))
    return differs


def widened(values: Array) -> Array:
    """A copy as float64, or complex128. The casts of ml_dtypes hold Python's lock; these let other threads work."""
    import numpy

    name = values.dtype.name
    with numpy.errstate(invalid="ignore"):  # signalling NaNs
        if name == "bfloat16":
            return (values.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32).astype(numpy.float64)
        if name.startswith("float8"):
            table: Array = numpy.arange(256, dtype=numpy.uint8).view(values.dtype).astype(numpy.float64)
            return table[values.view(numpy.uint8)]
        return values.astype(numpy.complex128 if values.dtype.kind == "c" else numpy.float64)


def _is_wide(values: Array) -> bool:
    return values.dtype.name in ("float64", "complex128")


def _pairs(values: Array) -> Array:
    """Complex numbers as twice as many real ones."""
    import numpy

    return values.view(numpy.float64)


def _normalised(values: Array, wide: bool) -> tuple[Array, int]:
    """The values divided by a power of two so that none is above 1, and its exponent; as they are if their squares are safe."""
    import numpy

    if not wide or not len(values):
        return values, 0
    largest = float(numpy.abs(values).max())
    exponent = math.frexp(largest)[1] if math.isfinite(largest) else 0
    return numpy.ldexp(values, -exponent), exponent


def _dot(x: Array, y: Array) -> float:
    """Not ``numpy.dot``: its last digits depend on the number of threads."""
    import numpy

    with numpy.errstate(over="ignore", invalid="ignore", under="ignore"):
        return float((x * y).sum())


def _total(parts: Sequence[Scaled]) -> Scaled:
    top = max((exponent for _, exponent in parts), default=0)
    return math.fsum(math.ldexp(value, exponent - top) for value, exponent in parts if math.isfinite(value)), top


def _scale(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.inf


def _root(square: Scaled) -> float:
    """The exponents of squares are even."""
    return _scale(math.sqrt(square[0]), square[1] // 2)


def _ratio(x: Scaled, y: Scaled) -> float:
    return _scale(x[0] / y[0], x[1] - y[1])


def _relative(total: dict[str, Scaled]) -> float:
    dd, bb = total["dd"], total["bb"]
    if not dd[0]:
        return 0.0
    return _scale(math.sqrt(dd[0] / bb[0]), (dd[1] - bb[1]) // 2) if bb[0] else math.inf


def _cosine_distance(total: dict[str, Scaled]) -> float | None:
    """1 - cos. Near 1 the quotient ab / (|a| |b|) has lost it; the difference d = a - b has kept it:

    1 - cos = (|d|^2 - (|a| - |b|)^2) / (2 |a| |b|),   with |a|^2 - |b|^2 = 2 d.b + |d|^2.
    """
    aa, bb, dd = total["aa"], total["bb"], total["dd"]
    if not dd[0]:
        return 0.0
    if not aa[0] or not bb[0]:
        return None
    near, length = _ratio(dd, bb), math.sqrt(_ratio(aa, bb))
    if near > NEAR or not length:
        product, scale = total["ab"]
        cosine = _scale(product / math.sqrt(aa[0] * bb[0]), scale - (aa[1] + bb[1]) // 2)
        distance = 1.0 - cosine
    else:
        stretch = (2 * _ratio(total["db"], bb) + near) / (length + 1)
        distance = (near - stretch * stretch) / (2 * length)
    return min(max(distance, 0.0), 2.0)
