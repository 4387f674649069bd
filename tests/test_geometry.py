"""Boxes against an independent oracle: numpy arrays of the indices that a part holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckpt_cli.boxes import (
    Box,
    Interval,
    Overlapping,
    Shape,
    Split,
    Uncovered,
    boxes_of,
    check_tiling,
    chunk,
    contiguous_strides,
    cut,
    nested_order,
    split_dimension,
    whole,
)

check = settings(deadline=None, derandomize=True, max_examples=150)
Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


def indices(intervals: Sequence[Interval]) -> Indices:
    return np.concatenate([np.arange(0), *(np.arange(start, start + size) for start, size in intervals)])


def torch_chunk(held: Indices, parts: int, index: int) -> Indices:
    """What rank ``index`` gets of ``torch.chunk``; torch returns fewer chunks where there is nothing left."""
    chunks = torch.from_numpy(held).chunk(parts)
    return chunks[index].numpy() if index < len(chunks) else held[:0]


def strided(held: Indices, split: Split) -> Indices:
    blocks = [torch_chunk(held, split.factor, block) for block in range(split.factor)]
    return np.concatenate([torch_chunk(block, split.parts, split.index) for block in blocks])


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offset, box.extent, strict=True))


def painted(shape: Shape, boxes: Sequence[Box]) -> np.ndarray[Shape, np.dtype[np.int64]]:
    """How often each element of the grid is held."""
    count = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        count[slices(box)] += 1
    return count


shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)
axis_splits = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), max_size=3)


@st.composite
def exact_tilings(draw: st.DrawFn, min_size: int = 0) -> tuple[Shape, list[Box]]:
    """A grid and boxes that tile it: the whole box, cut again and again at random places."""
    shape = draw(st.lists(st.integers(1, 9), min_size=min_size, max_size=3).map(tuple))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 12))):
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
    return shape, draw(st.permutations(boxes))


class TestChunk:
    @given(length=st.integers(0, 60), parts=st.integers(1, 17), data=st.data())
    @check
    def test_is_what_torch_chunk_gives_each_rank(self, length: int, parts: int, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, parts - 1))
        assert indices([chunk(length, parts, index)]).tolist() == torch_chunk(np.arange(length), parts, index).tolist()

    def test_leaves_the_last_parts_short_or_empty(self) -> None:
        assert [chunk(5, 4, i)[1] for i in range(4)] == [2, 2, 1, 0]

    @given(length=st.integers(0, 10**12), parts=st.integers(1, 1000))
    @check
    def test_parts_follow_each_other_without_gap(self, length: int, parts: int) -> None:
        position = 0
        for index in range(parts):
            start, size = chunk(length, parts, index)
            assert start == position
            assert size >= 0
            position += size
        assert position == length


class TestCut:
    @given(
        intervals=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=5),
        start=st.integers(0, 30),
        length=st.integers(0, 30),
    )
    @check
    def test_takes_a_slice_of_the_concatenation(self, intervals: list[Interval], start: int, length: int) -> None:
        assert indices(cut(intervals, start, length)).tolist() == indices(intervals)[start : start + length].tolist()


class TestSplitDimension:
    @given(length=st.integers(0, 40), sizes=axis_splits, data=st.data())
    @check
    def test_applies_splits_from_first_to_last(self, length: int, sizes: list[tuple[int, int]], data: st.DataObject) -> None:
        splits = [Split(parts, data.draw(st.integers(0, parts - 1)), factor) for parts, factor in sizes]
        held = np.arange(length)
        for split in splits:
            held = strided(held, split)
        assert indices(split_dimension(length, splits)).tolist() == held.tolist()

    @given(length=st.integers(0, 40), sizes=axis_splits)
    @check
    def test_gives_every_index_to_exactly_one_rank(self, length: int, sizes: list[tuple[int, int]]) -> None:
        mesh = [range(parts) for parts, _ in sizes]
        held = [
            split_dimension(length, [Split(parts, i, factor) for (parts, factor), i in zip(sizes, coordinate, strict=True)])
            for coordinate in itertools.product(*mesh)
        ]
        assert sorted(np.concatenate([indices(intervals) for intervals in held]).tolist()) == list(range(length))

    def test_joins_neighbours_and_leaves_out_empty_parts(self) -> None:
        assert split_dimension(8, [Split(1, 0, factor=4)]) == [(0, 8)]
        assert split_dimension(3, [Split(4, 3)]) == []
        assert split_dimension(0, []) == []


class TestNestedOrder:
    def test_fsdp_on_top_of_tensor_parallelism_is_tensor_parallelism_first(self) -> None:
        assert nested_order([Split(4, 3, factor=2), Split(2, 1)]) == [Split(2, 1), Split(4, 3)]

    def test_plain_shards_are_cut_from_left_to_right(self) -> None:
        assert nested_order([Split(2, 0), Split(3, 1), Split(4, 2)]) == [Split(2, 0), Split(3, 1), Split(4, 2)]

    @pytest.mark.parametrize(
        "splits",
        [[Split(2, 0, factor=3), Split(2, 0)], [Split(2, 0, factor=2)], [Split(2, 0, factor=4), Split(2, 0), Split(3, 0)]],
        ids=["other factor", "nothing to the right", "product of neither"],
    )
    def test_a_factor_that_fits_no_group_has_no_nested_order(self, splits: list[Split]) -> None:
        assert nested_order(splits) is None

    @given(parts=st.lists(st.integers(2, 4), min_size=2, max_size=3), data=st.data())
    @check
    def test_finds_the_order_that_the_factors_were_made_from(self, parts: list[int], data: st.DataObject) -> None:
        splits, order = self.recorded(parts, data)
        assert nested_order(splits) == order

    @given(parts=st.lists(st.integers(2, 3), min_size=2, max_size=3), multiple=st.integers(1, 3), data=st.data())
    @check
    def test_agrees_with_the_strided_definition_where_everything_divides(
        self, parts: list[int], multiple: int, data: st.DataObject
    ) -> None:
        splits, order = self.recorded(parts, data)
        length = math.prod(parts) * multiple
        assert split_dimension(length, splits) == split_dimension(length, order)

    @given(length=st.integers(0, 40), parts=st.lists(st.integers(2, 4), min_size=2, max_size=3), data=st.data())
    @check
    def test_cuts_a_part_of_a_part_of_whatever_length(self, length: int, parts: list[int], data: st.DataObject) -> None:
        splits, order = self.recorded(parts, data)
        held = np.arange(length)
        for split in order:
            held = torch_chunk(held, split.parts, split.index)
        nested = nested_order(splits)
        assert nested is not None
        assert indices(split_dimension(length, nested)).tolist() == held.tolist()

    @staticmethod
    def recorded(parts: list[int], data: st.DataObject) -> tuple[list[Split], list[Split]]:
        """Splits in mesh order as DTensor records them, and in the order in which they were really made.

        The factor of a mesh dimension counts the parts of the dimensions to its right that were cut before it.
        """
        cuts = data.draw(st.permutations(range(len(parts))))
        index = [data.draw(st.integers(0, n - 1)) for n in parts]
        splits = [
            Split(n, index[i], math.prod(parts[j] for j in range(i + 1, len(parts)) if cuts.index(j) < cuts.index(i)))
            for i, n in enumerate(parts)
        ]
        return splits, [Split(parts[i], index[i]) for i in cuts]


class TestBoxesOf:
    @given(shape=st.lists(st.integers(1, 8), max_size=3).map(tuple), data=st.data())
    @check
    def test_the_boxes_of_all_ranks_cover_every_element_once(self, shape: Shape, data: st.DataObject) -> None:
        sizes = [data.draw(axis_splits) for _ in shape]
        per_axis = [
            [
                split_dimension(length, [Split(parts, i, factor) for (parts, factor), i in zip(axis, coordinate, strict=True)])
                for coordinate in itertools.product(*(range(parts) for parts, _ in axis))
            ]
            for length, axis in zip(shape, sizes, strict=True)
        ]
        assume(math.prod(map(len, per_axis)) <= 300)
        boxes = [box for intervals in itertools.product(*per_axis) for box, _ in boxes_of(intervals)]
        assert (painted(shape, boxes) == 1).all()

    @given(shape=shapes, data=st.data())
    @check
    def test_each_box_has_its_place_in_the_local_block(self, shape: Shape, data: st.DataObject) -> None:
        whole_array = np.arange(math.prod(shape)).reshape(shape)
        intervals = []
        for length in shape:
            parts, factor = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
            intervals.append(split_dimension(length, [Split(parts, data.draw(st.integers(0, parts - 1)), factor)]))
        local = whole_array[np.ix_(*map(indices, intervals))]
        filled = np.full(local.shape, -1)
        for box, place in boxes_of(intervals):
            part = slices(Box(place, box.extent))
            assert (local[part] == whole_array[slices(box)]).all()
            filled[part] = local[part]
        assert (filled == local).all()

    def test_a_tensor_without_dimensions_is_one_box(self) -> None:
        assert boxes_of([]) == [(Box((), ()), ())]

    def test_a_rank_without_elements_has_no_box(self) -> None:
        assert boxes_of([[(0, 4)], []]) == []


class TestIntersect:
    @given(shape=shapes, data=st.data())
    @check
    def test_is_what_both_boxes_hold(self, shape: Shape, data: st.DataObject) -> None:
        def some_box() -> Box:
            offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
            return Box(offset, tuple(data.draw(st.integers(1, n - a)) for a, n in zip(offset, shape, strict=True)))

        a, b = some_box(), some_box()
        both = painted(shape, [a, b]) == 2
        common = a.intersect(b)
        assert common == b.intersect(a)
        if common is None:
            assert not both.any()
        else:
            assert (painted(shape, [common]) == both).all()


class TestContiguousStrides:
    @given(shape=shapes)
    @check
    def test_are_those_of_numpy(self, shape: Shape) -> None:
        assert contiguous_strides(shape) == tuple(n // 8 for n in np.zeros(shape).strides)


class TestCheckTiling:
    @given(tiling=exact_tilings())
    @check
    def test_accepts_every_exact_tiling(self, tiling: tuple[Shape, list[Box]]) -> None:
        shape, boxes = tiling
        assert (painted(shape, boxes) == 1).all()
        assert check_tiling(shape, boxes) is None

    @given(tiling=exact_tilings(), data=st.data())
    @check
    def test_names_a_box_that_nobody_holds(self, tiling: tuple[Shape, list[Box]], data: st.DataObject) -> None:
        shape, boxes = tiling
        count = data.draw(st.integers(1, len(boxes)))
        kept = boxes[count:]
        problem = check_tiling(shape, kept)
        assert isinstance(problem, Uncovered)
        held = painted(shape, kept)
        assert problem.box.numel > 0
        assert (held[slices(problem.box)] == 0).all()
        assert problem.elements == (held == 0).sum()

    @given(tiling=exact_tilings(), data=st.data())
    @check
    def test_names_two_boxes_that_hold_the_same_elements(self, tiling: tuple[Shape, list[Box]], data: st.DataObject) -> None:
        shape, boxes = tiling
        offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        extent = tuple(data.draw(st.integers(1, n - a)) for a, n in zip(offset, shape, strict=True))
        boxes.insert(data.draw(st.integers(0, len(boxes))), Box(offset, extent))
        problem = check_tiling(shape, boxes)
        assert isinstance(problem, Overlapping)
        assert problem.first < problem.second
        common = boxes[problem.first].intersect(boxes[problem.second])
        assert common is not None
        assert problem.box == common

    @given(tiling=exact_tilings(min_size=1), data=st.data())
    @check
    def test_an_overlap_does_not_make_up_for_a_hole_of_the_same_size(self, tiling: tuple[Shape, list[Box]], data: st.DataObject) -> None:
        shape, boxes = tiling
        pairs = [(i, j) for i, j in itertools.permutations(range(len(boxes)), 2) if boxes[i].extent == boxes[j].extent]
        assume(pairs)
        i, j = data.draw(st.sampled_from(pairs))
        boxes[i] = boxes[j]
        problem = check_tiling(shape, boxes)
        assert isinstance(problem, Overlapping)
        assert {problem.first, problem.second} == {i, j}

    @given(shape=st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple).filter(lambda shape: 0 in shape))
    @check
    def test_a_tensor_without_elements_needs_no_box(self, shape: Shape) -> None:
        assert check_tiling(shape, []) is None

    def test_a_scalar_needs_exactly_one_box(self) -> None:
        scalar = Box((), ())
        assert check_tiling((), [scalar]) is None
        assert check_tiling((), []) == Uncovered(scalar, 1)
        assert check_tiling((), [scalar, scalar]) == Overlapping(0, 1, scalar)

    def test_one_element_needs_exactly_one_box(self) -> None:
        element = Box((0,), (1,))
        assert check_tiling((1,), [element]) is None
        assert check_tiling((1,), []) == Uncovered(element, 1)
        assert check_tiling((1,), [element, element]) == Overlapping(0, 1, element)

    def test_numbers_far_beyond_any_array_stay_exact(self) -> None:
        side = 1 << 40
        halves = [Box((0, 0), (side, side // 2)), Box((0, side // 2), (side, side // 2 - 1))]
        assert check_tiling((side, side), halves) == Uncovered(Box((0, side - 1), (side, 1)), side)
