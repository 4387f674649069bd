"""Placing against numpy, casting against torch and against exact arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_cli.boxes import Box, Shape, contiguous_strides, whole
from ckpt_cli.dtypes import BY_CODE, Dtype, numpy_dtype
from ckpt_cli.files.descriptors import Identity
from ckpt_cli.tensors import reading as kernels
from ckpt_cli.tensors.casting import cast
from ckpt_cli.tensors.reading import is_run, read_tile, stored_bytes, tiles
from ckpt_cli.tensors.tensor import Piece, Tensor

check = settings(deadline=None, derandomize=True, max_examples=150)
Array = np.ndarray[Any, np.dtype[Any]]
FLOATS = ("F64", "F32", "F16", "BF16")
LAZY = [
    *((code, conj, neg) for code in ("C64", "C128") for conj, neg in itertools.product([False, True], repeat=2)),
    ("F32", False, True),
    ("BF16", False, True),
]


class Memory:
    """A source that lies in memory and remembers the largest read."""

    forward_only = False

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.largest = 0
        self.identity = Identity("memory", len(data), 0, 0, 0)

    @property
    def size(self) -> int:
        return len(self.data)

    def read_at(self, offset: int, buffer: memoryview) -> None:
        assert 0 <= offset <= offset + len(buffer) <= self.size
        self.largest = max(self.largest, len(buffer))
        buffer[:] = self.data[offset : offset + len(buffer)]


def slices(box: Box) -> tuple[Any, ...]:
    """An index that gives a view also where there are no dimensions."""
    return (*(slice(a, a + n) for a, n in zip(box.offset, box.extent, strict=True)), ...)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape) -> Box:
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(offset, tuple(draw(st.integers(1, n - a)) for a, n in zip(offset, shape, strict=True)))


@st.composite
def tilings(draw: st.DrawFn, shape: Shape) -> list[Box]:
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axes = [d for d, n in enumerate(box.extent) if n > 1]
        if not axes:
            boxes.append(box)
            continue
        axis = draw(st.sampled_from(axes))
        at = draw(st.integers(1, box.extent[axis] - 1))
        offset = tuple(a + at if d == axis else a for d, a in enumerate(box.offset))
        boxes.append(Box(box.offset, tuple(at if d == axis else n for d, n in enumerate(box.extent))))
        boxes.append(Box(offset, tuple(n - at if d == axis else n for d, n in enumerate(box.extent))))
    return draw(st.permutations(boxes))


@st.composite
def stored(draw: st.DrawFn, values: Array, box: Box, **flags: bool) -> Piece:
    """A file that holds ``values`` as a view of a larger array: axes permuted, every second element, padding around."""
    axes = draw(st.permutations(range(values.ndim)))
    steps = [draw(st.sampled_from([1, 1, 2, 3])) for _ in axes]
    front = [draw(st.integers(0, 2)) for _ in axes]
    back = [draw(st.integers(0, 2)) for _ in axes]
    moved = values.transpose(axes)
    sizes = [f + n * step + b for n, step, f, b in zip(moved.shape, steps, front, back, strict=True)]
    larger = np.frombuffer(b"\xa5" * (math.prod(sizes) * values.itemsize), dtype=values.dtype).reshape(sizes).copy()
    view = larger[(*(slice(f, f + n * step, step) for n, step, f in zip(moved.shape, steps, front, strict=True)), ...)]
    view[...] = moved
    view = view.transpose(np.argsort(axes)) if axes else view
    before = draw(st.integers(0, 9))
    first = view.__array_interface__["data"][0] - larger.__array_interface__["data"][0]
    memory = Memory(b"\x5a" * before + larger.tobytes())
    # numpy invents strides for axes of one element; torch keeps those of the storage.
    strides = tuple(
        stride // values.itemsize if n > 1 else draw(st.integers(0, 50)) for n, stride in zip(view.shape, view.strides, strict=True)
    )
    return Piece(memory, before + first, strides, box, **flags)


def read(tensor: Tensor, tile: Box) -> Array:
    buffer = bytearray(b"\xee" * (tile.numel * tensor.dtype.itemsize))
    read_tile(tensor, tile, buffer)
    return np.frombuffer(buffer, dtype=numpy_dtype(tensor.dtype)).reshape(tile.extent)


class TestTiles:
    @given(shape=st.lists(st.integers(1, 9), max_size=4).map(tuple), itemsize=st.sampled_from([1, 2, 4, 8]), budget=st.integers(1, 400))
    @check
    def test_are_ranges_in_order_that_cover_everything_within_the_budget(self, shape: Shape, itemsize: int, budget: int) -> None:
        position = np.arange(math.prod(shape)).reshape(shape)
        seen = []
        for tile in tiles(shape, itemsize, budget):
            assert tile.numel * itemsize <= budget or tile.numel == 1
            seen += position[slices(tile)].reshape(-1).tolist()
        assert seen == list(range(math.prod(shape)))

    @pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)])
    def test_an_empty_tensor_has_none(self, shape: Shape) -> None:
        assert list(tiles(shape, 4, 100)) == []

    def test_do_not_degenerate_when_the_budget_is_ample(self) -> None:
        assert list(tiles((5, 6), 4, 120)) == [whole((5, 6))]
        assert len(list(tiles((5, 6), 4, 119))) == 2


class TestIsRun:
    @given(extent=st.lists(st.integers(1, 4), max_size=4).map(tuple), data=st.data())
    @check
    def test_means_that_the_elements_lie_one_after_the_other(self, extent: Shape, data: st.DataObject) -> None:
        near = contiguous_strides(extent)
        strides = tuple(data.draw(st.sampled_from([stride, stride, 0, 1, 2, stride * 2])) for stride in near)
        places = sum((np.arange(n).reshape(-1, *[1] * (len(extent) - d - 1)) * strides[d] for d, n in enumerate(extent)), np.zeros(1, int))
        assert is_run(extent, strides) == (places.reshape(-1).tolist() == list(range(math.prod(extent))))

    @given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), data=st.data())
    @check
    def test_agrees_with_numpy_about_parts_of_an_array(self, shape: Shape, data: st.DataObject) -> None:
        box = data.draw(boxes_in(shape))
        assert is_run(box.extent, contiguous_strides(shape)) == np.zeros(shape)[slices(box)].flags.c_contiguous


class TestMeeting:
    @given(shape=st.lists(st.integers(1, 8), max_size=3).map(tuple), data=st.data())
    @check
    def test_finds_every_piece_that_meets_a_box_and_no_other(self, shape: Shape, data: st.DataObject) -> None:
        memory = Memory(b"")
        pieces = [Piece(memory, 0, contiguous_strides(box.extent), box) for box in data.draw(tilings(shape))]
        box = data.draw(boxes_in(shape))
        expected = {piece.box: common for piece in pieces if (common := piece.box.intersect(box)) is not None}
        found = [(piece.box, common) for piece, common in Tensor("w", BY_CODE["I16"], shape, tuple(pieces)).meeting(box)]
        assert len(found) == len(expected)
        assert dict(found) == expected


class TestReadTile:
    @given(
        shape=st.lists(st.integers(1, 7), max_size=4).map(tuple),
        code=st.sampled_from(["BOOL", "F8_E4M3", "I16", "BF16", "F32", "F64", "C64"]),
        slab=st.integers(16, 300),
        small=st.integers(0, 64),
        data=st.data(),
    )
    @settings(deadline=None, derandomize=True, max_examples=300)
    def test_assembles_what_scattered_storages_hold(self, shape: Shape, code: str, slab: int, small: int, data: st.DataObject) -> None:
        dtype = BY_CODE[code]
        raw = np.random.default_rng(7).integers(0, 2 if code == "BOOL" else 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        values = raw.view(f"V{dtype.itemsize}").reshape(shape)
        pieces = [data.draw(stored(values[slices(box)], box)) for box in data.draw(tilings(shape))]
        tensor = Tensor("w", dtype, shape, tuple(pieces))
        tile = data.draw(boxes_in(shape))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "SLAB", slab)
            patch.setattr(kernels, "SMALL", min(small, slab))
            assert read(tensor, tile).tobytes() == values[slices(tile)].tobytes()

    @given(shape=st.tuples(st.integers(2, 9), st.integers(2, 9)), slab=st.integers(16, 64), data=st.data())
    @check
    def test_scattered_reads_stay_below_the_slab(self, shape: Shape, slab: int, data: st.DataObject) -> None:
        values = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
        memory = Memory(np.ascontiguousarray(values.T).tobytes())
        piece = Piece(memory, 0, (1, shape[0]), whole(shape))
        tile = data.draw(boxes_in(shape).filter(lambda box: min(box.extent) > 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "SLAB", slab)
            patch.setattr(kernels, "SMALL", min(8, slab))
            assert read(Tensor("w", BY_CODE["I64"], shape, (piece,)), tile).tolist() == values[slices(tile)].tolist()
        assert memory.largest <= slab

    @pytest.mark.parametrize("code", ["I16", "BF16", "F32", "I64", "F64", "C64", "C128"])
    @given(data=st.data())
    @settings(deadline=None, derandomize=True, max_examples=25)
    def test_turns_the_other_byte_order_around(self, code: str, data: st.DataObject) -> None:
        dtype, shape = BY_CODE[code], data.draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
        width = dtype.itemsize // (2 if dtype.kind == "complex" else 1)
        raw = np.random.default_rng(8).integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        other = opaque(raw.reshape(-1, width)[:, ::-1], dtype.itemsize, shape)
        piece = data.draw(stored(other, whole(shape), swapped=True))
        tile = data.draw(boxes_in(shape))
        expected = raw.view(f"V{dtype.itemsize}").reshape(shape)[slices(tile)]
        assert read(Tensor("w", dtype, shape, (piece,)), tile).tobytes() == expected.tobytes()

    @pytest.mark.parametrize(("code", "conj", "neg"), LAZY)
    @pytest.mark.parametrize("swapped", [False, True])
    @given(data=st.data())
    @settings(deadline=None, derandomize=True, max_examples=15)
    def test_applies_lazy_conjugation_and_negation_as_torch_does(
        self, code: str, conj: bool, neg: bool, swapped: bool, data: st.DataObject
    ) -> None:
        dtype, shape = BY_CODE[code], data.draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
        held = torch.from_numpy(np.random.default_rng(9).normal(size=(*shape, 2)).astype(np.float64))
        held.view(-1)[:1] = -0.0
        base = (
            torch.view_as_complex(held).to(getattr(torch, dtype.torch))
            if dtype.kind == "complex"
            else held[..., 0].to(getattr(torch, dtype.torch))
        )
        # The definition of the flags: the tensor is what resolving them gives.
        lazy = torch._neg_view(base) if neg else base
        lazy = lazy.conj() if conj else lazy
        expected = bits(lazy.resolve_conj().resolve_neg())
        plain = bits(base)
        if swapped:
            width = dtype.itemsize // (2 if dtype.kind == "complex" else 1)
            plain = opaque(plain.reshape(-1).view(np.uint8).reshape(-1, width)[:, ::-1], dtype.itemsize, shape)
        piece = data.draw(stored(plain, whole(shape), conj=conj, neg=neg, swapped=swapped))
        tile = data.draw(boxes_in(shape))
        assert read(Tensor("w", dtype, shape, (piece,)), tile).tobytes() == expected[slices(tile)].tobytes()

    def test_a_region_is_read_as_it_is_stored(self) -> None:
        values = np.arange(12, dtype=">i4").reshape(3, 4)
        piece = Piece(Memory(values.tobytes()), 0, (1, 4), whole((4, 3)), swapped=True)
        buffer = stored_bytes(piece, Box((1, 0), (2, 3)), 4)
        assert np.frombuffer(buffer, ">i4").reshape(2, 3).tolist() == values.T[1:3].tolist()


def opaque(raw: Array, itemsize: int, shape: Shape) -> Array:
    """Bytes as elements that are only moved."""
    return np.frombuffer(raw.tobytes(), dtype=f"V{itemsize}").reshape(shape)


def bits(tensor: torch.Tensor) -> Array:
    """The elements of a torch tensor as opaque bytes, in its shape."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    raw = flat.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return opaque(raw.numpy(), tensor.element_size(), tuple(tensor.shape))


# -- casting ---------------------------------------------------------------------------------------------------------

PRECISION = {"F64": (53, -1074), "F32": (24, -149), "F16": (11, -24), "BF16": (8, -133)}
"""Significant bits, and the exponent of the smallest subnormal."""

LARGEST = {"F64": Fraction(2**1024 - 2**971), "F32": Fraction(2**128 - 2**104), "F16": Fraction(65504), "BF16": Fraction(2**128 - 2**120)}


def as_float64(values: Array) -> Array:
    return values.astype(np.float64)


def finite_values(code: str) -> Array:
    """Finite values of a dtype, as float64: all of a 16-bit one; of a wider one every power of two with its neighbours, and random ones."""
    kind = numpy_dtype(BY_CODE[code])
    if kind.itemsize == 2:
        values = np.arange(1 << 16, dtype=np.uint16).view(kind)
    else:
        random = np.random.default_rng(3).integers(0, 256, 3000 * kind.itemsize, dtype=np.uint8).view(kind)
        _, lowest = PRECISION[code]
        powers = np.ldexp(1.0, np.arange(lowest, 1024 if code == "F64" else 128)).astype(kind)
        unsigned = powers.view(f"u{kind.itemsize}")
        near = np.concatenate([unsigned - 1, unsigned, unsigned + 1]).view(kind)
        values = np.concatenate([random, near, -near, [kind.type(0.0), kind.type(-0.0)]])
    with np.errstate(all="ignore"):
        wide = as_float64(values)
    return wide[np.isfinite(wide)]


def adversarial(source: str, target: str) -> Array:
    """Values of ``source`` at, and right beside, every border where rounding to ``target`` decides; and all that is special."""
    kind = numpy_dtype(BY_CODE[source])
    grid = np.unique(np.concatenate([finite_values(target), [0.0]]))
    largest = float(LARGEST[target])
    with np.errstate(all="ignore"):
        # Where infinity begins, and the middles of neighbours: both are exact in float64 for narrower targets.
        middles = np.concatenate([grid[:-1] / 2 + grid[1:] / 2, [largest * (1 + 2.0 ** -PRECISION[target][0])]])
        borders = np.concatenate([grid, middles, -middles])
        traps = np.concatenate(
            [np.nextafter(borders, np.inf), np.nextafter(borders, -np.inf), borders * (1 + 2.0**-30), borders * (1 - 2.0**-30)]
        )
        special = [0.0, -0.0, np.inf, -np.inf, np.nan, float(LARGEST[source]), -float(LARGEST[source])]
        wide = np.concatenate([borders, traps, finite_values(source), special])
        narrow = wide.astype(kind)
    return np.concatenate([narrow, (narrow.view(f"u{kind.itemsize}") + 1).view(kind)])


def rounded(value: float, target: str) -> float:
    """``value`` to nearest even in ``target``, by exact rational arithmetic."""
    if not math.isfinite(value) or value == 0:
        return value
    digits, lowest = PRECISION[target]
    exponent = max(math.frexp(value)[1] - digits, lowest)
    quantum = Fraction(2) ** exponent
    exact = round(Fraction(value) / quantum) * quantum
    if abs(exact) > LARGEST[target]:
        return math.copysign(math.inf, value)
    return math.copysign(float(exact), value)


def is_nan(values: Array) -> Array:
    # Asking about a signalling NaN is an invalid operation to ml_dtypes.
    with np.errstate(invalid="ignore"):
        return np.isnan(values)


def same_floats(ours: Array, theirs: Array) -> bool:
    """Equal bit for bit, but one NaN is as good as another."""
    nan = is_nan(ours)
    raw = f"u{ours.itemsize}"
    return bool((nan == is_nan(theirs)).all() and (ours.view(raw)[~nan] == theirs.view(raw)[~nan]).all())


def cast_array(values: Array, source: str, target: str) -> tuple[Array, int]:
    out = np.empty(values.shape, dtype=numpy_dtype(BY_CODE[target]))
    return out, cast(values, BY_CODE[source], BY_CODE[target], out)


def torch_cast(values: Array, source: str, target: str) -> Array:
    dtypes: Sequence[Dtype] = (BY_CODE[source], BY_CODE[target])
    before, after = (getattr(torch, dtype.torch) for dtype in dtypes)
    raw = torch.from_numpy(values.view(f"i{values.itemsize}").copy())
    result = raw.view(before).to(after)
    return result.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[result.element_size()]).numpy().view(numpy_dtype(dtypes[1]))


class TestCast:
    # torch rounds float64 to the 16-bit types by way of float32, twice: there it is no oracle, see the tests below.
    @pytest.mark.parametrize(
        ("source", "target"),
        [pair for pair in itertools.product(FLOATS, FLOATS) if pair not in (("F64", "F16"), ("F64", "BF16"))],
    )
    def test_gives_the_bits_that_torch_gives(self, source: str, target: str) -> None:
        values = adversarial(source, target)
        ours, _ = cast_array(values, source, target)
        assert same_floats(ours, torch_cast(values, source, target))

    @pytest.mark.parametrize(("source", "target"), [("F64", "F32"), ("F64", "F16"), ("F64", "BF16"), ("F32", "F16"), ("F32", "BF16")])
    def test_rounds_once_to_nearest_even(self, source: str, target: str) -> None:
        values = adversarial(source, target)
        picked = np.random.default_rng(5).choice(len(values), 12_000, replace=False)
        values = np.concatenate([values[picked], values[-8:]])
        ours, _ = cast_array(values, source, target)
        with np.errstate(invalid="ignore"):
            wide = as_float64(values)
        exact = np.array([rounded(value, target) for value in wide.tolist()])
        assert same_floats(as_float64(ours), exact)

    @pytest.mark.parametrize(("target", "digits"), [("F16", 11), ("BF16", 8)])
    def test_is_not_trapped_by_rounding_twice(self, target: str, digits: int) -> None:
        # Just above a middle between two neighbours, by less than float32 can tell: rounding twice would go to even, down.
        step = 2.0 ** (1 - digits)
        even = 1 + 2 * step * np.arange(2 ** (digits - 2))
        above = np.nextafter(even + step / 2, np.inf)
        below = np.nextafter(even + step + step / 2, -np.inf)
        for sign, scale in itertools.product((1.0, -1.0), (1.0, 2.0**-8, 2.0**9)):
            up, _ = cast_array(sign * scale * above, "F64", target)
            down, _ = cast_array(sign * scale * below, "F64", target)
            assert (as_float64(up) == sign * scale * (even + step)).all()
            assert (as_float64(down) == sign * scale * (even + step)).all()

    @pytest.mark.parametrize("target", FLOATS)
    @pytest.mark.parametrize("source", FLOATS)
    def test_keeps_nan_infinity_and_the_sign_of_zero(self, source: str, target: str) -> None:
        values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0]).astype(numpy_dtype(BY_CODE[source]))
        result, overflows = cast_array(values, source, target)
        wide = as_float64(result)
        assert np.isnan(wide[0])
        assert wide[1:].tolist() == [math.inf, -math.inf, 0.0, 0.0]
        assert np.signbit(wide[1:]).tolist() == [False, True, False, True]
        assert overflows == 0

    @pytest.mark.parametrize("source", FLOATS)
    @pytest.mark.parametrize("target", FLOATS)
    def test_no_nan_becomes_a_number_whatever_its_payload(self, source: str, target: str) -> None:
        kind = numpy_dtype(BY_CODE[source])
        fraction = PRECISION[source][0] - 1
        payloads = np.array([1, 2, (1 << fraction) - 1, 1 << (fraction - 1)], dtype=f"u{kind.itemsize}")
        exponent = np.array((1 << (8 * kind.itemsize - 1 - fraction)) - 1, dtype=payloads.dtype) << np.array(fraction, dtype=payloads.dtype)
        values = np.concatenate([payloads | exponent, payloads | exponent | np.array(1 << (8 * kind.itemsize - 1), payloads.dtype)]).view(
            kind
        )
        assert is_nan(values).all()
        result, overflows = cast_array(values, source, target)
        assert is_nan(result).all()
        assert overflows == 0

    @pytest.mark.parametrize(("source", "target"), list(itertools.product(FLOATS, FLOATS)))
    def test_counts_finite_values_that_become_infinite(self, source: str, target: str) -> None:
        values = adversarial(source, target)
        with np.errstate(all="ignore"):
            expected = sum(math.isfinite(value) and math.isinf(rounded(value, target)) for value in as_float64(values[:20_000]).tolist())
        extra = np.array([float(LARGEST[source]), -float(LARGEST[source]), np.inf, np.nan]).astype(values.dtype)
        expected += 2 * (LARGEST[source] > LARGEST[target])
        _, overflows = cast_array(np.concatenate([values[:20_000], extra]), source, target)
        assert overflows == expected

    def test_the_source_is_left_as_it_is(self) -> None:
        values = np.array([1.0 + 2.0**-9 + 2.0**-40, -3.3, 1e300])
        before = values.copy()
        cast_array(values, "F64", "BF16")
        assert values.tolist() == before.tolist()

    def test_the_largest_values_and_the_first_that_overflow(self) -> None:
        half, overflows = cast_array(np.array([65504.0, 65519.99, 65520.0, -65520.0], np.float32), "F32", "F16")
        assert as_float64(half).tolist() == [65504.0, 65504.0, math.inf, -math.inf]
        assert overflows == 2
        brain, overflows = cast_array(np.array([float(LARGEST["BF16"]), 3.3961775e38, float(LARGEST["F32"])], np.float32), "F32", "BF16")
        assert np.isinf(brain.astype(np.float32)).tolist() == [False, True, True]
        assert brain.dtype == ml_dtypes.bfloat16
        assert overflows == 2
