"""A weighted sum is the exact formula, rounded once: against fractions, over all dtypes, and where rounding twice goes wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_cli.averaging.coefficients import formula
from ckpt_cli.dtypes import BY_CODE, numpy_dtype
from ckpt_cli.tensors.weighted_sum import BITS, BLOCK, Formula, WeightedSum, real_parts

Array = np.ndarray[Any, np.dtype[Any]]
Generator = np.random.Generator

FORMATS = {"F64": (53, -1022, 1023), "F32": (24, -126, 127), "F16": (11, -14, 15), "BF16": (8, -126, 127)}
"""Significant bits, smallest and largest exponent of the normal numbers: IEEE 754, and bfloat16."""

NAN = math.nan
INF = math.inf
COUNT = 24
SEEDS = 2


# -- the oracle ------------------------------------------------------------------------------------------------------


def rounded(exact: Fraction, code: str) -> float:
    """The nearest number of the format, to even where two are: in integers, with subnormals and infinity."""
    bits, smallest, largest = FORMATS[code]
    size = abs(exact)
    if not size:
        return 0.0
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, smallest) - bits + 1)
    nearest = round(size / unit) * unit
    value = float(nearest) if nearest < Fraction(2) ** (largest + 1) else INF
    return -value if exact < 0 else value


def exactly(formula: Formula, values: Sequence[float]) -> Fraction:
    total = Fraction(0)
    for weight, value in zip(formula.weights, values, strict=True):
        total += Fraction(weight) * Fraction(value)
    return total / Fraction(formula.divisor)


@pytest.mark.parametrize("code", FORMATS)
def test_the_oracle_rounds_like_torch_where_torch_rounds_once(code: str) -> None:
    rng = np.random.default_rng(0)
    _, smallest, largest = FORMATS[code]
    wide = np.ldexp(rng.standard_normal(500), rng.integers(max(smallest - 30, -1070), min(largest + 3, 1023), 500))
    if code == "BF16":
        with np.errstate(over="ignore"):
            wide = wide.astype(np.float32).astype(np.float64)
        wide = wide[np.isfinite(wide)]
    cast = torch.from_numpy(wide).to(getattr(torch, BY_CODE[code].torch)).double().tolist()
    assert [rounded(Fraction(value), code) for value in wide.tolist()] == cast


# -- running the kernel ----------------------------------------------------------------------------------------------


def array(code: str, values: Sequence[float] | Array) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float64).astype(numpy_dtype(BY_CODE[code]))


class Summed:
    """What became of one tile: the ``result``, counts of strange values per source and of overflows, positions asked for again."""

    def __init__(self, formula: Formula, target: str, source: str, values: Sequence[Array], kernel: WeightedSum | None = None) -> None:
        kernel = kernel or WeightedSum(formula, BY_CODE[source], len(values[0]))
        self.asked: list[int] = []
        kernel.start()
        self.strange = [kernel.add(each) for each in values]
        self.result = np.full(len(values[0]), NAN).astype(numpy_dtype(BY_CODE[target]))

        def values_at(position: int) -> list[float]:
            self.asked.append(position)
            return [float(each[position]) for each in values]

        self.overflows = kernel.result(BY_CODE[target], self.result, values_at)

    @property
    def floats(self) -> list[float]:
        return [float(value) for value in self.result]


def summed(weights: Sequence[float], divisor: float, target: str, source: str, columns: Sequence[Sequence[float]]) -> Summed:
    """The sum for a list of values per source."""
    return Summed(Formula(tuple(weights), divisor), target, source, [array(source, values) for values in columns])


def bits(values: Array) -> bytes:
    return values.tobytes()


# -- values and weights ----------------------------------------------------------------------------------------------


def near_weights(rng: Generator, source: str, target: str, formula: Formula) -> list[Array]:
    return [array(source, rng.standard_normal(COUNT) * 0.02) for _ in formula.weights]


def bit_patterns(rng: Generator, source: str, target: str, formula: Formula) -> list[Array]:
    dtype = numpy_dtype(BY_CODE[source])
    values = []
    for _ in formula.weights:
        drawn = np.frombuffer(rng.bytes(COUNT * dtype.itemsize), dtype).copy()
        with np.errstate(invalid="ignore"):
            drawn[~np.isfinite(drawn)] = 0
        values.append(drawn)
    return values


def grid(rng: Generator, source: str, target: str, formula: Formula) -> list[Array]:
    """Multiples of 1/64, whose means lie halfway between two numbers of a narrow format again and again."""
    return [array(source, rng.integers(-64, 64, COUNT) / 64) for _ in formula.weights]


def identical(rng: Generator, source: str, target: str, formula: Formula) -> list[Array]:
    return near_weights(rng, source, target, Formula(formula.weights[:1], 1.0)) * len(formula.weights)


def cancelling(rng: Generator, source: str, target: str, formula: Formula) -> list[Array]:
    """Every other source is the one before with the sign changed, in some places only up to its last bits."""
    values: list[Array] = []
    for place in range(len(formula.weights)):
        if place % 2:
            ratio = np.where(rng.random(COUNT) < 0.5, 1.0, 1 + 2.0**-6)
            values.append(array(source, -values[-1].astype(np.float64) * ratio))
        else:
            values.append(array(source, rng.standard_normal(COUNT)))
    return values


def huge_and_tiny(rng: Generator, source: str, target: str, formula: Formula) -> list[Array]:
    """Magnitudes that are further apart than float64 has bits, and a huge value that another one takes away again."""
    reach = {"F64": 200, "F32": 100, "BF16": 100, "F16": 14}[source]
    values = [array(source, np.ldexp(rng.standard_normal(COUNT), rng.integers(-reach, reach // 2, COUNT))) for _ in formula.weights]
    if len(values) > 2:
        values[0] = array(source, -values[-1].astype(np.float64))
    return values


def near_ties(rng: Generator, source: str, target: str, formula: Formula) -> list[Array]:
    """Sums that come as close to halfway between two numbers of the target as the sources allow, from either side."""
    width, _, largest = FORMATS[target]
    elements = []
    for _ in range(COUNT):
        half = Fraction(2) ** (int(rng.integers(-12, min(largest, 12))) - width)
        halves = (1 << width + 1) - 1 if rng.random() < 0.25 else 2 * int(rng.integers(1 << width - 1, 1 << width)) + 1
        wanted = halves * half * int(rng.choice([-1, 1]))
        lacking = wanted * Fraction(formula.divisor)
        element = [0.0] * len(formula.weights)
        places = rng.permutation(len(element))
        fitted = int(rng.integers(1, len(element) + 1))
        for place in places[:fitted]:
            value = rounded(lacking / Fraction(formula.weights[place]), source)
            element[place] = value if math.isfinite(value) else 0.0
            lacking -= Fraction(formula.weights[place]) * Fraction(element[place])
        for place in places[fitted:]:
            element[place] = rounded(Fraction(rng.standard_normal()) * Fraction(2) ** int(rng.integers(-130, -20)), source)
        elements.append(element)
    return [array(source, column) for column in zip(*elements, strict=True)]


Family = Callable[[Generator, str, str, Formula], list[Array]]
FAMILIES: tuple[Family, ...] = (near_weights, bit_patterns, grid, identical, cancelling, huge_and_tiny, near_ties)


def formulas(rng: Generator) -> list[Formula]:
    """Uniform, any signs, powers of two, an EMA, decimals, and weights that are not normalised."""
    count = int(rng.integers(2, 7))
    signed = tuple(float(value) for value in rng.random(count) - 0.3)
    decimals = tuple(round(float(value), 1) or 0.1 for value in rng.random(count))
    decay = float(rng.choice([0.2, 0.9, 1e-6]))
    average = (decay ** (count - 1), *((1 - decay) * decay ** (count - k) for k in range(2, count + 1)))
    return [
        Formula((1.0,) * count, float(count)),
        Formula(signed, math.fsum(signed)),
        Formula(tuple(2.0**-k for k in range(count)), 1.0),
        Formula(average, 1.0),
        Formula((0.1, 0.2, 0.7), math.fsum((0.1, 0.2, 0.7))),
        Formula(decimals, math.fsum(decimals)),
        Formula(decimals, 1.0),
    ]


# -- what it must be -------------------------------------------------------------------------------------------------


class TestEveryElement:
    @pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
    @pytest.mark.parametrize("target", FORMATS)
    @pytest.mark.parametrize("source", FORMATS)
    def test_is_the_formula_rounded_once(self, source: str, target: str, family: Family) -> None:
        wrong = []
        for seed in range(SEEDS):
            rng = np.random.default_rng([seed, *family.__name__.encode()])
            for mixed in formulas(rng):
                values = family(rng, source, target, mixed)
                found = Summed(mixed, target, source, values)
                for i, result in enumerate(found.floats):
                    element = [float(each[i]) for each in values]
                    expected = rounded(exactly(mixed, element), target)
                    if result.hex() != expected.hex() and (result, expected) != (0.0, 0.0):
                        wrong.append(f"{mixed} of {[value.hex() for value in element]}: {result.hex()}, not {expected.hex()}")
        assert wrong[:3] == [], f"{len(wrong)} elements are wrong"

    @pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, 0.5, 2.0), (0.1, 0.2, 0.7)])
    @pytest.mark.parametrize("code", ["F32", "F16", "BF16"])
    def test_is_asked_for_again_only_where_the_sum_leaves_it_open(self, code: str, weights: tuple[float, ...]) -> None:
        rng = np.random.default_rng(1)
        values = [array(code, rng.standard_normal(20_000) * 0.02) for _ in weights]
        assert len(Summed(Formula(weights, math.fsum(weights)), code, code, values).asked) < 20


class TestCopies:
    """Averaging N times the same values gives these values, to the bit: no formula may wear a model down."""

    @pytest.mark.parametrize(
        "formula",
        [
            Formula((1.0, 1.0, 1.0), 3.0),
            Formula((1.0, 2.0, 3.0, 4.0, 5.0), 15.0),
            Formula((0.5, 0.25, 0.25), 1.0),
            Formula((3.0, -2.0), 1.0),
            Formula((1e60, 3e60, 1e60), 5e60),
            Formula((1.0,) * 49, 49.0),
        ],
        ids=lambda formula: f"{formula.weights[:3]}",
    )
    @pytest.mark.parametrize("code", FORMATS)
    def test_are_themselves_for_weights_that_add_up(self, code: str, formula: Formula) -> None:
        assert Fraction(formula.divisor) == sum(map(Fraction, formula.weights))
        (values,) = bit_patterns(np.random.default_rng(2), code, code, Formula((1.0,), 1.0))
        assert bits(Summed(formula, code, code, [values] * len(formula.weights)).result) == bits(values)

    @pytest.mark.parametrize("weights", [(0.1, 0.2, 0.7), (0.3, 0.3, 0.3), (1 / 3, 2 / 3), (0.999**3, 0.001, 0.000999)])
    @pytest.mark.parametrize("code", ["F32", "F16", "BF16"])
    def test_are_themselves_for_decimals_that_add_up_in_float64_only(self, code: str, weights: tuple[float, ...]) -> None:
        (values,) = bit_patterns(np.random.default_rng(3), code, code, Formula((1.0,), 1.0))
        assert bits(Summed(Formula(weights, math.fsum(weights)), code, code, [values] * len(weights)).result) == bits(values)

    @pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 1.0, 1.0), (0.1, 0.2, 0.7)])
    @pytest.mark.parametrize("source", FORMATS)
    def test_of_minus_zero_are_minus_zero(self, source: str, weights: tuple[float, ...]) -> None:
        zeros = [[-0.0, 0.0]] * len(weights)
        for target in FORMATS:
            assert list(map(str, summed(weights, math.fsum(weights), target, source, zeros).floats)) == ["-0.0", "0.0"], target


class TestRoundingOnce:
    """One element each that simpler ways of averaging get wrong."""

    def test_is_not_what_sums_in_float32_give(self) -> None:
        sources = [1.0, 2.0**-24, 2.0**-24]
        naive = np.float32(0)
        for value in sources:
            naive += np.float32(value)
        assert naive == 1.0
        assert summed([1, 1, 1], 1.0, "F32", "F32", [[value] for value in sources]).floats == [1 + 2.0**-23]

    def test_is_not_what_rounded_coefficients_give(self) -> None:
        value, coefficient = np.float32(1.5), np.float32(0.1)
        naive = np.float32(0)
        for _ in range(10):
            naive += coefficient * value
        assert naive != value
        assert summed([1] * 10, 10.0, "F32", "F32", [[float(value)]] * 10).floats == [float(value)]

    def test_is_not_what_float32_on_the_way_to_bfloat16_gives(self) -> None:
        sources = [2 + 2.0**-7, 2.0**-31]
        mean = (Fraction(sources[0]) + Fraction(sources[1])) / 2
        twice = torch.tensor([float(mean)], dtype=torch.float64).float().bfloat16()
        assert twice.item() == 1.0
        assert summed([1, 1], 2.0, "BF16", "F32", [[value] for value in sources]).floats == [1 + 2.0**-7]

    def test_is_not_what_sums_in_float64_give(self) -> None:
        sources = [1.0, 2.0**-8, 2.0**-60]
        assert math.fsum(sources) == sum(sources) == 1 + 2.0**-8
        for source in ("F32", "F64"):
            assert summed([1, 1, 1], 1.0, "BF16", source, [[value] for value in sources]).floats == [1 + 2.0**-7]

    def test_keeps_what_is_left_when_large_values_cancel(self) -> None:
        sources = [2.0**100, 1.0, -(2.0**100), 2.0**-100]
        assert sum(sources) != 1.0
        assert summed([1] * 4, 1.0, "F32", "F32", [[value] for value in sources]).floats == [1.0]
        assert summed([1] * 4, 1.0, "F32", "F32", [[sources[0]], [sources[3]], [sources[2]], [0.0]]).floats == [2.0**-100]

    @pytest.mark.parametrize("divisor", [1.0, 3.0])
    def test_knows_that_numbers_lie_closer_below_a_power_of_two(self, divisor: float) -> None:
        """The middle between 1 and the number below it is a quarter, not half, of the step above 1 away."""
        sources = [[divisor], [-divisor * 2.0**-54], [-(2.0**-108)]]
        assert summed([1, 1, 1], divisor, "F64", "F64", sources).floats == [1 - 2.0**-53]

    def test_sees_what_cancellation_leaves_of_the_lower_parts(self) -> None:
        """Just below a tie, by less than the second float64 of a pair can hold beside what was in it before."""
        weights = (0.33, 0.61, 0.99, 0.55, 0.74, 0.83)
        sources = [
            "-0x1.16f3a20000000p-83",
            "0x1.572a500000000p-10",
            "0x1.0172600000000p-109",
            "0x1.b9c0000000000p-133",
            "0x1.2a60de0000000p-35",
            "-0x1.15acac0000000p-60",
        ]
        column = [float.fromhex(value) for value in sources]
        expected = rounded(exactly(Formula(weights, 4.05), column), "F32")
        assert summed(weights, 4.05, "F32", "F32", [[value] for value in column]).floats == [expected]

    @pytest.mark.parametrize(("weight", "value"), [(0.25, 5e-324), (1e-60, 1e-300)])
    def test_sees_products_that_are_too_small_for_float64(self, weight: float, value: float) -> None:
        for target, (width, _, _) in FORMATS.items():
            half = 2.0**-width
            assert summed([1, 1, weight], 1.0, target, "F64", [[1.0], [half], [value]]).floats == [1 + 2 * half], target

    def test_sees_what_is_left_of_the_oldest_after_many_half_lives(self) -> None:
        """The newest is halfway between two numbers, so that the sign of almost nothing decides."""
        average = formula("ema", 3, (0, 1000, 2000), half_life=2)
        used = [(weight, value) for weight, value in zip(average.weights, (1e-30, 0.0, 1 + 2.0**-8), strict=True) if weight]
        weights, column = zip(*used, strict=True)
        expected = rounded(exactly(Formula(weights, average.divisor), [float(np.float32(value)) for value in column]), "BF16")
        assert summed(weights, average.divisor, "BF16", "F32", [[value] for value in column]).floats == [expected]


class TestLargestValues:
    @pytest.mark.parametrize("code", FORMATS)
    def test_are_averaged_without_overflow_on_the_way(self, code: str) -> None:
        width, _, exponent = FORMATS[code]
        largest = float((2 - Fraction(2) ** (1 - width)) * Fraction(2) ** exponent)
        found = summed([1, 1, 1], 3.0, code, code, [[largest, -largest]] * 3)
        assert (found.floats, found.overflows) == ([largest, -largest], 0)
        found = summed([4, -3], 1.0, code, code, [[largest, -largest]] * 2)
        assert (found.floats, found.overflows) == ([largest, -largest], 0)

    @pytest.mark.parametrize("weight", [1.0, 3.0, 0.1, 1e60])
    @pytest.mark.parametrize("code", FORMATS)
    def test_cancel_to_zero(self, code: str, weight: float) -> None:
        width, _, exponent = FORMATS[code]
        largest = float((2 - Fraction(2) ** (1 - width)) * Fraction(2) ** exponent)
        found = summed([weight, -weight], 1.0, code, code, [[largest, -largest, 1.0]] * 2)
        assert (list(map(str, found.floats)), found.overflows) == (["0.0"] * 3, 0)

    @pytest.mark.parametrize(
        ("source", "target"), [(source, target) for source in ("F64", "F32") for target in FORMATS if (source, target) != ("F32", "F64")]
    )
    def test_become_infinite_from_the_middle_to_the_next_power_of_two_and_are_counted(self, source: str, target: str) -> None:
        width, _, exponent = FORMATS[target]
        step = Fraction(2) ** (exponent + 1 - width)
        largest = float(2 * Fraction(2) ** exponent - step)
        half = float(step / 2)
        below = math.nextafter(half, 0) if source == "F64" else float(np.nextafter(np.float32(half), np.float32(0)))
        found = summed([1, 1], 1.0, target, source, [[largest, largest, -largest, largest], [below, half, -half, -half]])
        assert found.floats[:3] == [largest, INF, -INF]
        assert math.isfinite(found.floats[3])
        assert found.overflows == 2

    def test_are_no_overflow_where_the_source_was_infinite(self) -> None:
        found = summed([1, 1], 2.0, "F16", "F32", [[INF, 1e30, 1.0], [1.0, 1e30, INF]])
        assert (found.floats, found.overflows, found.strange) == ([INF, INF, INF], 1, [1, 1])

    @pytest.mark.parametrize("code", FORMATS)
    def test_smallest_values_are_halved_to_even(self, code: str) -> None:
        width, smallest, _ = FORMATS[code]
        least = float(Fraction(2) ** (smallest - width + 1))
        found = summed([1, 1], 2.0, code, code, [[least, -least, 3 * least, least], [0.0, 0.0, 0.0, least]])
        assert list(map(str, found.floats)) == list(map(str, [0.0, -0.0, 2 * least, least]))


class TestNaNAndInfinity:
    VALUES = (0.0, 1.5, -2.0, INF, -INF, NAN)

    @pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, 0.3), (2.0, -1.0), (-1.0, -2.0)])
    @pytest.mark.parametrize("target", FORMATS)
    @pytest.mark.parametrize("source", FORMATS)
    def test_spread_as_in_ieee_arithmetic(self, source: str, target: str, weights: tuple[float, float]) -> None:
        pairs = [(a, b) for a in self.VALUES for b in self.VALUES if not (math.isfinite(a) and math.isfinite(b))]
        divisor = math.fsum(weights)
        found = summed(weights, divisor, target, source, list(zip(*pairs, strict=True)))
        with np.errstate(invalid="ignore"):
            expected = [float((np.float64(weights[0]) * a + np.float64(weights[1]) * b) / divisor) for a, b in pairs]
        assert list(map(str, found.floats)) == list(map(str, expected))
        assert found.overflows == 0

    @pytest.mark.parametrize("source", FORMATS)
    def test_may_be_signalling(self, source: str) -> None:
        """Such NaNs raise a flag of the processor where they are converted, about which numpy would warn."""
        width = numpy_dtype(BY_CODE[source]).itemsize * 8
        pattern = np.array([((1 << width - FORMATS[source][0]) - 1 << FORMATS[source][0] - 1) + 1], f"u{width // 8}")
        found = Summed(Formula((1.0, 1.0), 2.0), source, source, [pattern.view(numpy_dtype(BY_CODE[source])), array(source, [1.0])])
        assert found.strange == [1, 0]
        assert math.isnan(found.floats[0])

    @pytest.mark.parametrize("source", FORMATS)
    def test_are_counted_per_source_and_leave_their_neighbours_alone(self, source: str) -> None:
        size = 2 * BLOCK + 5
        rng = np.random.default_rng(4)
        values = [array(source, rng.standard_normal(size)) for _ in range(3)]
        clean = Summed(Formula((1.0, 1.0, 1.0), 3.0), source, source, values).result
        strange = [0, BLOCK - 1, BLOCK, size - 1]
        values[0][strange] = NAN
        values[2][strange[:2]] = INF
        found = Summed(Formula((1.0, 1.0, 1.0), 3.0), source, source, values)
        assert found.strange == [4, 0, 2]
        finite = np.isfinite(found.result.astype(np.float64))
        assert np.flatnonzero(~finite).tolist() == strange
        assert bits(found.result[finite]) == bits(clean[finite])


class TestTiles:
    @pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
    @pytest.mark.parametrize(("source", "target"), [("F32", "BF16"), ("BF16", "BF16"), ("F64", "F32")])
    def test_of_any_size_give_the_same_elements(self, source: str, target: str, size: int) -> None:
        rng = np.random.default_rng(5)
        formula = Formula((0.1, 0.2, 0.7), math.fsum((0.1, 0.2, 0.7)))
        values = [array(source, np.ldexp(rng.standard_normal(size), rng.integers(-30, 30, size))) for _ in formula.weights]
        whole = Summed(formula, target, source, values)
        edges = [*range(0, size, 5000), size]
        parts = [Summed(formula, target, source, [v[a:b] for v in values]) for a, b in itertools.pairwise(edges)]
        assert bits(whole.result) == b"".join(bits(part.result) for part in parts)
        for i in {0, size // 2, min(BLOCK, size - 1), size - 1}:
            assert whole.floats[i] == rounded(exactly(formula, [float(v[i]) for v in values]), target)

    def test_ask_for_values_at_positions_of_the_tile_not_of_a_block(self) -> None:
        size = BLOCK + 10
        sources = [np.full(size, value) for value in (2.0**100, 1.0, -(2.0**100), 2.0**-8, 0.0)]
        sources[-1][[3, BLOCK + 7]] = 2.0**-120
        found = Summed(Formula((1.0,) * 5, 1.0), "BF16", "F32", [array("F32", each) for each in sources])
        assert sorted(found.asked) == [3, BLOCK + 7]
        assert np.flatnonzero(found.result.astype(np.float64) != 1.0).tolist() == [3, BLOCK + 7]

    def test_of_one_accumulator_know_nothing_of_each_other(self) -> None:
        rng = np.random.default_rng(6)
        formula = Formula((0.3, -1.7, 2.4), 1.0)
        kernel = WeightedSum(formula, BY_CODE["F32"], 100)
        for size in (100, 7, 60):
            values = [array("F32", np.ldexp(rng.standard_normal(size), rng.integers(-90, 90, size))) for _ in formula.weights]
            values[1][0] = INF if size == 100 else 1.0
            assert bits(Summed(formula, "F32", "F32", values, kernel).result) == bits(Summed(formula, "F32", "F32", values).result)

    def test_of_complex_numbers_are_tiles_of_their_parts(self) -> None:
        assert real_parts(BY_CODE["C64"]) == (BY_CODE["F32"], 2)
        assert all(real_parts(BY_CODE[code]) == (BY_CODE[code], 1) for code in FORMATS)
        assert {code: width for code, (width, _, _) in FORMATS.items()} | {"C64": 24} == BITS


def test_what_is_exactly_representable_is_not_computed_as_a_fraction() -> None:
    """Frozen weights and zeros are the same in all checkpoints; a quotient that is exact leaves no doubt."""
    from ckpt_cli.dtypes import BY_CODE

    for code, weights in (("F32", (0.1,) * 4), ("F32", (0.1, 0.2, 0.7)), ("F64", (1.0,) * 3)):
        formula = Formula(weights, math.fsum(weights))
        values = np.concatenate([np.zeros(500), np.random.default_rng(1).standard_normal(500)]).astype(f"f{BY_CODE[code].itemsize}")
        if code == "F64":
            values[500:] = 0.0
        total = WeightedSum(formula, BY_CODE[code], len(values))
        total.start()
        for _ in weights:
            total.add(values)
        out = np.empty_like(values)
        total.result(BY_CODE[code], out, lambda _: pytest.fail("a fraction was needed"))
        assert out.tobytes() == values.tobytes()
