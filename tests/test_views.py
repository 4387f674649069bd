"""Tensors that are other tensors re-cut: whatever the shards, the bytes read are those that torch would give."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ckpt_cli.boxes import Box, Shape, check_tiling, contiguous_strides, whole
from ckpt_cli.dtypes import BY_CODE
from ckpt_cli.errors import Inconsistent
from ckpt_cli.tensors.reading import read_tile, tiles
from ckpt_cli.tensors.tensor import Piece, Tensor
from ckpt_cli.tensors.views import concatenated, interleaved, merged, permuted, selected, sliced, stacked, unfolded
from tests.test_kernels import Memory, slices, tilings

check = settings(deadline=None, derandomize=True, max_examples=100)
I16 = BY_CODE["I16"]


def numbered(shape: Shape) -> torch.Tensor:
    """Every element is its own number, so that no two can be mistaken for each other."""
    return torch.arange(math.prod(shape), dtype=torch.int16).reshape(shape)


def stored(content: torch.Tensor, boxes: list[Box], orders: list[list[int]]) -> Tensor:
    """A tensor of which each box lies in memory on its own, its dimensions in some order."""
    pieces = []
    for rank, (box, order) in enumerate(zip(boxes, orders, strict=True)):
        block = content[slices(box)].permute(order).contiguous()
        place = [order.index(dim) for dim in range(len(order))]
        source = Memory(b"\0" * 6 + block.numpy().tobytes())
        strides = tuple(block.stride(i) for i in place)
        pieces.append(Piece(source, 6, strides, box, rank=rank, crc=rank))  # type: ignore[arg-type]
    copies = tuple(Piece(piece.source, piece.offset, piece.strides, piece.box, rank=piece.rank + 100) for piece in pieces)
    return Tensor("w", I16, tuple(content.shape), tuple(pieces), copies, alias_of="other", layout="as trained")


def read(tensor: Tensor, budget: int) -> torch.Tensor:
    """All of a tensor, tile by tile, as the writer reads it."""
    data = bytearray()
    for tile in tiles(tensor.shape, tensor.dtype.itemsize, budget):
        buffer = bytearray(tile.numel * tensor.dtype.itemsize)
        read_tile(tensor, tile, buffer)
        data += buffer
    return torch.from_numpy(np.frombuffer(bytes(data), dtype=np.int16).copy()).reshape(tensor.shape)


@st.composite
def sharded(draw: st.DrawFn, most: int = 4) -> tuple[torch.Tensor, Tensor]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=most)))
    boxes = draw(tilings(shape))
    content = numbered(shape)
    return content, stored(content, boxes, [draw(st.permutations(range(len(shape)))) for _ in boxes])


budgets = st.integers(1, 600)


@check
@given(sharded(), budgets)
def test_the_fixture_reads_back(pair: tuple[torch.Tensor, Tensor], budget: int) -> None:
    content, tensor = pair
    assert torch.equal(read(tensor, budget), content)


@check
@given(sharded(), budgets, st.data())
def test_permuted_is_what_torch_permutes(pair: tuple[torch.Tensor, Tensor], budget: int, data: st.DataObject) -> None:
    content, tensor = pair
    order = data.draw(st.permutations(range(content.dim())))
    view = permuted(tensor, order)
    assert view.shape == tuple(content.permute(order).shape)
    assert torch.equal(read(view, budget), content.permute(order))


@st.composite
def with_a_dimension_to_unfold(draw: st.DrawFn) -> tuple[torch.Tensor, Tensor, int, Shape]:
    """Shards may cut any dimension anywhere, as flat partitions do."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    others = draw(st.lists(st.integers(1, 5), max_size=2))
    axis = draw(st.integers(0, len(others)))
    shape = (*others[:axis], math.prod(sizes), *others[axis:])
    boxes = draw(tilings(shape))
    content = numbered(shape)
    tensor = stored(content, boxes, [draw(st.permutations(range(len(shape)))) for _ in boxes])
    return content, tensor, axis, sizes


@check
@given(with_a_dimension_to_unfold(), budgets)
def test_unfolded_is_what_torch_unflattens(case: tuple[torch.Tensor, Tensor, int, Shape], budget: int) -> None:
    content, tensor, axis, sizes = case
    view = unfolded(tensor, axis, sizes)
    assert view.shape == tuple(content.unflatten(axis, sizes).shape)
    assert check_tiling(view.shape, [piece.box for piece in view.pieces]) is None
    assert torch.equal(read(view, budget), content.unflatten(axis, sizes))


@check
@given(with_a_dimension_to_unfold(), budgets, st.data())
def test_views_of_views_are_what_torch_makes_of_them(
    case: tuple[torch.Tensor, Tensor, int, Shape], budget: int, data: st.DataObject
) -> None:
    content, tensor, axis, sizes = case
    opened = content.unflatten(axis, sizes)
    order = data.draw(st.permutations(range(opened.dim())))
    turned = opened.permute(order)
    view, axis = permuted(unfolded(tensor, axis, sizes), order), data.draw(st.integers(0, opened.dim() - 1))
    if axis + 1 < opened.dim():
        view, turned = merged(view, axis), turned.flatten(axis, axis + 1)
    assert torch.equal(read(view, budget), turned)


@check
@given(sharded(), st.data())
def test_permuting_there_and_back_changes_no_piece(pair: tuple[torch.Tensor, Tensor], data: st.DataObject) -> None:
    _, tensor = pair
    order = data.draw(st.permutations(range(len(tensor.shape))))
    back = [list(order).index(dim) for dim in range(len(order))]
    again = permuted(permuted(tensor, order), back)
    assert [(piece.offset, piece.strides, piece.box) for piece in again.pieces] == [
        (piece.offset, piece.strides, piece.box) for piece in tensor.pieces
    ]


class TestWhatGoesAlong:
    @pytest.fixture
    def tensor(self) -> Tensor:
        return stored(numbered((4, 6)), [Box((0, 0), (2, 6)), Box((2, 0), (2, 6))], [[0, 1], [1, 0]])

    @pytest.mark.parametrize("kind", ["permuted", "merged", "unfolded"])
    def test_copies_are_cut_like_pieces(self, tensor: Tensor, kind: str) -> None:
        view = {"permuted": permuted(tensor, (1, 0)), "merged": merged(tensor, 0), "unfolded": unfolded(tensor, 1, (2, 3))}[kind]
        assert [(copy.box, copy.strides) for copy in view.copies] == [(piece.box, piece.strides) for piece in view.pieces]
        assert [copy.rank for copy in view.copies] == [100 + piece.rank for piece in view.pieces]

    def test_a_view_is_no_alias_of_what_its_tensor_was_an_alias_of(self, tensor: Tensor) -> None:
        assert permuted(tensor, (1, 0)).alias_of is None
        assert merged(tensor, 0).alias_of is None
        assert unfolded(tensor, 1, (2, 3)).alias_of is None

    def test_bytes_in_another_order_have_no_checksum(self, tensor: Tensor) -> None:
        """The checksum is of the stored record in its own order; one that is read in another must not be compared with it."""
        assert {piece.crc for piece in permuted(tensor, (1, 0)).pieces} == {None}

    def test_name_dtype_and_layout_stay(self, tensor: Tensor) -> None:
        for view in (permuted(tensor, (1, 0)), merged(tensor, 0), unfolded(tensor, 1, (2, 3))):
            assert (view.name, view.dtype, view.layout) == ("w", I16, "as trained")

    def test_the_tensor_itself_is_left_alone(self, tensor: Tensor) -> None:
        before = tensor.pieces
        permuted(tensor, (1, 0))
        merged(tensor, 0)
        unfolded(tensor, 1, (2, 3))
        assert (tensor.pieces, tensor.shape) == (before, (4, 6))

    def test_another_number_of_elements_is_no_view(self, tensor: Tensor) -> None:
        with pytest.raises(Inconsistent):
            unfolded(tensor, 1, (2, 2))


def test_empty_tensors_can_be_viewed() -> None:
    empty = Tensor("w", I16, (0, 6), ())
    assert permuted(empty, (1, 0)).shape == (6, 0)
    assert merged(empty, 0).shape == (0,)
    assert unfolded(empty, 1, (2, 3)).shape == (0, 2, 3)


def test_a_scalar_can_be_viewed() -> None:
    scalar = Tensor("w", I16, (), (Piece(Memory(b"\7\0"), 0, contiguous_strides(()), whole(())),))  # type: ignore[arg-type]
    assert read(permuted(scalar, ()), 8).item() == 7
    assert read(stacked([scalar, scalar], 0), 8).tolist() == [7, 7]


@check
@given(sharded(), budgets, st.data())
def test_a_slice_is_what_indexing_gives(pair: tuple[torch.Tensor, Tensor], budget: int, data: st.DataObject) -> None:
    content, tensor = pair
    axis = data.draw(st.integers(0, content.dim() - 1))
    start = data.draw(st.integers(0, content.shape[axis]))
    stop = data.draw(st.integers(start, content.shape[axis]))
    step = data.draw(st.integers(1, 3))
    view = sliced(tensor, axis, start, stop, step)
    place = tuple(slice(start, stop, step) if dim == axis else slice(None) for dim in range(content.dim()))
    assert torch.equal(read(view, budget), content[place])
    assert {piece.box for piece in view.copies} == {piece.box for piece in view.pieces}
    assert view.alias_of is None


@check
@given(sharded(), budgets, st.data())
def test_one_element_of_a_dimension_is_what_select_gives(pair: tuple[torch.Tensor, Tensor], budget: int, data: st.DataObject) -> None:
    content, tensor = pair
    axis = data.draw(st.integers(0, content.dim() - 1))
    index = data.draw(st.integers(0, content.shape[axis] - 1))
    assert torch.equal(read(selected(tensor, axis, index), budget), content.select(axis, index))


@check
@given(sharded(), budgets, st.data())
def test_parts_put_together_again_are_the_whole(pair: tuple[torch.Tensor, Tensor], budget: int, data: st.DataObject) -> None:
    content, tensor = pair
    axis = data.draw(st.integers(0, content.dim() - 1))
    cut = data.draw(st.integers(0, content.shape[axis]))
    parts = [sliced(tensor, axis, 0, cut), sliced(tensor, axis, cut, content.shape[axis])]
    whole_again = concatenated(parts, axis)
    assert torch.equal(read(whole_again, budget), content)
    first, second = content.narrow(axis, 0, cut), content.narrow(axis, cut, content.shape[axis] - cut)
    assert torch.equal(read(concatenated(parts[::-1], axis), budget), torch.cat([second, first], axis))
    rows = [selected(tensor, axis, index) for index in range(content.shape[axis])]
    assert torch.equal(read(stacked(rows, axis), budget), content)
    assert torch.equal(read(stacked([tensor, tensor], axis), budget), torch.stack([content, content], axis))


@check
@given(sharded(3), budgets, st.data())
def test_two_dimensions_as_one_are_what_flatten_gives(pair: tuple[torch.Tensor, Tensor], budget: int, data: st.DataObject) -> None:
    content, tensor = pair
    assume(content.dim() >= 2)
    axis = data.draw(st.integers(0, content.dim() - 2))
    view = merged(tensor, axis)
    assert torch.equal(read(view, budget), content.flatten(axis, axis + 1))
    assert len(view.copies) == len(view.pieces)


@check
@given(sharded(3), budgets, st.data())
def test_interleaving_is_undone_by_its_inverse(pair: tuple[torch.Tensor, Tensor], budget: int, data: st.DataObject) -> None:
    content, tensor = pair
    axis = data.draw(st.integers(0, content.dim() - 1))
    length = content.shape[axis]
    assume(length % 2 == 0)
    halves = content.unflatten(axis, (length // 2, 2)).transpose(axis, axis + 1).flatten(axis, axis + 1)
    assert torch.equal(read(interleaved(tensor, axis), budget), halves)
    pairs = content.unflatten(axis, (2, length // 2)).transpose(axis, axis + 1).flatten(axis, axis + 1)
    assert torch.equal(read(interleaved(tensor, axis, inverse=True), budget), pairs)
    assert torch.equal(read(interleaved(interleaved(tensor, axis), axis, inverse=True), budget), content)
