"""Plans: what will be written is decided, exact and reproducible before the first byte."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_cli.boxes import Box, Shape, contiguous_strides, whole
from ckpt_cli.dtypes import BY_CODE, CAST_NAMES, TABLE
from ckpt_cli.errors import Unsupported, UsageError
from ckpt_cli.files.descriptors import Identity
from ckpt_cli.output import plan as planning
from ckpt_cli.output.plan import CopyWork, Plan, TileWork, make_plan, output_dtype, work_of
from ckpt_cli.tensors.casting import cast, view_as
from ckpt_cli.tensors.reading import read_tile
from ckpt_cli.tensors.tensor import Piece, Tensor

STORABLE = [dtype.code for dtype in TABLE if dtype.storable and dtype.values == 1]
OPAQUE = [dtype.code for dtype in TABLE if dtype.kind == "opaque"]
NOT_STORABLE = [dtype.code for dtype in TABLE if not dtype.storable]


class Memory:
    """A source that lies in memory."""

    def __init__(self, data: bytes, mtime_ns: int = 1, path: str = "memory") -> None:
        self.data = data
        self.identity = Identity(path, len(data), mtime_ns, 0, 0)

    @property
    def size(self) -> int:
        return len(self.data)

    def read_at(self, offset: int, buffer: memoryview) -> None:
        assert 0 <= offset <= offset + len(buffer) <= self.size
        buffer[:] = self.data[offset : offset + len(buffer)]


def tensor(code: str, *shape: int, name: str = "w", mtime_ns: int = 1) -> Tensor:
    """A tensor in one piece, with a source of its own that is all zeros."""
    dtype = BY_CODE[code]
    source = Memory(bytes(math.prod(shape) * dtype.itemsize), mtime_ns, name)
    return Tensor(name, dtype, shape, (Piece(source, 0, contiguous_strides(shape), whole(shape)),) if math.prod(shape) else ())


def named(**tensors: Tensor) -> dict[str, Tensor]:
    return {name: replace(value, name=name) for name, value in tensors.items()}


def index_of(plan: Plan) -> dict[str, Any]:
    assert plan.index is not None
    content: dict[str, Any] = json.loads(plan.index)
    return content


class TestFileNames:
    def test_everything_goes_into_one_file_without_an_index(self) -> None:
        plan = make_plan(named(a=tensor("F32", 4), b=tensor("F32", 4)), max_shard_size=32)
        assert [file.name for file in plan.files] == ["model.safetensors"]
        assert plan.index is None
        assert plan.index_name is None

    def test_above_the_limit_files_are_numbered_and_listed_in_an_index(self) -> None:
        plan = make_plan(named(a=tensor("F32", 4), b=tensor("F32", 4), c=tensor("F32", 1)), max_shard_size=31)
        assert [file.name for file in plan.files] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        assert plan.index_name == "model.safetensors.index.json"
        assert index_of(plan) == {
            "metadata": {"total_size": 36},
            "weight_map": {
                "a": "model-00001-of-00002.safetensors",
                "b": "model-00002-of-00002.safetensors",
                "c": "model-00002-of-00002.safetensors",
            },
        }

    def test_the_name_can_be_chosen(self) -> None:
        tensors = named(a=tensor("F32", 4), b=tensor("F32", 4))
        assert [file.name for file in make_plan(tensors, weights_name="ema.safetensors").files] == ["ema.safetensors"]
        split = make_plan(tensors, weights_name="ema.safetensors", max_shard_size=16)
        assert [file.name for file in split.files] == ["ema-00001-of-00002.safetensors", "ema-00002-of-00002.safetensors"]
        assert split.index_name == "ema.safetensors.index.json"

    def test_the_size_of_the_cast_tensors_counts(self) -> None:
        tensors = named(a=tensor("F32", 4), b=tensor("F32", 4))
        assert len(make_plan(tensors, dtype="bf16", max_shard_size=16).files) == 1
        halved = make_plan(tensors, dtype="bf16", max_shard_size=8)
        assert index_of(halved)["metadata"]["total_size"] == 16

    def test_the_index_keeps_the_order_of_the_model(self) -> None:
        plan = make_plan(named(z=tensor("I8", 3), a=tensor("F32", 9), m=tensor("F64", 2)), max_shard_size=20)
        assert list(index_of(plan)["weight_map"]) == ["z", "a", "m"]

    def test_names_that_are_not_ascii_are_kept(self) -> None:
        plan = make_plan({"größe.\n层": tensor("F32", 4), "b": tensor("F32", 4)}, max_shard_size=16)
        assert list(index_of(plan)["weight_map"]) == ["größe.\n层", "b"]


class TestSplitting:
    @given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12), limit=st.integers(1, 60))
    @settings(deadline=None, derandomize=True, max_examples=100)
    def test_every_tensor_is_in_one_file_and_no_file_is_larger_than_asked_unless_it_is_one_tensor(
        self, sizes: list[int], limit: int
    ) -> None:
        plan = make_plan({f"t{i}": tensor("U8", size, name=f"t{i}") for i, size in enumerate(sizes)}, max_shard_size=limit)
        assert sorted(output.name for output in plan.tensors) == sorted(f"t{i}" for i in range(len(sizes)))
        for file in plan.files:
            nonempty = [output for output in file.tensors if output.nbytes]
            assert sum(output.nbytes for output in file.tensors) <= limit or len(nonempty) == 1
        for file, following in itertools.pairwise(plan.files):
            # A file is closed only when the next tensor of the model does not fit.
            first = min(following.tensors, key=lambda output: int(output.name[1:]))
            assert sum(output.nbytes for output in file.tensors) + first.nbytes > limit
        if len(plan.files) > 1:
            weight_map = index_of(plan)["weight_map"]
            assert {output.name: file.name for file in plan.files for output in file.tensors} == weight_map
            assert index_of(plan)["metadata"]["total_size"] == sum(sizes)

    def test_no_limit_never_splits(self) -> None:
        assert len(make_plan({f"t{i}": tensor("F64", 100, name=f"t{i}") for i in range(9)}, max_shard_size=None).files) == 1


class TestLayoutOfAFile:
    @given(
        specs=st.lists(st.tuples(st.sampled_from(STORABLE), st.lists(st.integers(0, 5), max_size=3).map(tuple)), min_size=1, max_size=10)
    )
    @settings(deadline=None, derandomize=True, max_examples=100)
    def test_tensors_follow_each_other_aligned_to_their_elements(self, specs: list[tuple[str, Shape]]) -> None:
        plan = make_plan({f"t{i}": tensor(code, *shape, name=f"t{i}") for i, (code, shape) in enumerate(specs)})
        (file,) = plan.files
        assert len(file.header) % 8 == 0
        position = len(file.header)
        for output in file.tensors:
            assert output.offset == position
            assert output.offset % output.dtype.itemsize == 0
            position += output.nbytes
        assert file.size == position
        assert plan.bytes_written == file.size
        described = json.loads(file.header[8:])
        assert described.pop("__metadata__") == {"format": "pt"}
        assert {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in described.items()} == {
            f"t{i}": spec for i, spec in enumerate(specs)
        }

    def test_wide_dtypes_come_first_and_otherwise_the_order_stays(self) -> None:
        plan = make_plan(named(a=tensor("BOOL", 3), b=tensor("BF16", 3), c=tensor("F64", 3), d=tensor("F32", 1), e=tensor("BF16", 1)))
        assert [output.name for output in plan.tensors] == ["c", "d", "b", "e", "a"]

    def test_the_width_after_the_cast_counts(self) -> None:
        plan = make_plan(named(a=tensor("F64", 3), b=tensor("I32", 3)), dtype="bf16")
        assert [output.name for output in plan.tensors] == ["b", "a"]


class TestOutputDtype:
    @pytest.mark.parametrize("wanted", sorted(CAST_NAMES))
    @pytest.mark.parametrize("code", ["F64", "F32", "F16", "BF16"])
    def test_floats_are_cast(self, code: str, wanted: str) -> None:
        assert output_dtype(tensor(code, 1), wanted).code == CAST_NAMES[wanted]

    @pytest.mark.parametrize("wanted", sorted(CAST_NAMES))
    @pytest.mark.parametrize("code", [dtype.code for dtype in TABLE if dtype.kind in ("int", "bool", "complex")])
    def test_everything_else_stays(self, code: str, wanted: str) -> None:
        assert output_dtype(tensor(code, 1), wanted).code == code

    @pytest.mark.parametrize("code", [dtype.code for dtype in TABLE])
    def test_keep_keeps(self, code: str) -> None:
        assert output_dtype(tensor(code, 1), "keep", quantised=True).code == code

    @pytest.mark.parametrize("code", OPAQUE)
    def test_float8_and_quantised_dtypes_are_refused(self, code: str) -> None:
        with pytest.raises(Unsupported) as caught:
            output_dtype(tensor(code, 1, name="w8"), "bf16")
        assert caught.value.tensor == "w8"
        assert caught.value.hint == "use --dtype keep"

    @pytest.mark.parametrize("code", ["F32", "BF16", "U8"])
    def test_no_tensor_of_a_quantised_model_is_cast(self, code: str) -> None:
        with pytest.raises(Unsupported):
            output_dtype(tensor(code, 1), "bf16", quantised=True)

    @pytest.mark.parametrize("wanted", ["fp8", "int8", "F32", "", "torch.bfloat16", "BF16"])
    def test_an_unknown_dtype_is_a_usage_error(self, wanted: str) -> None:
        with pytest.raises(UsageError):
            output_dtype(tensor("F32", 1), wanted)

    @pytest.mark.parametrize("code", NOT_STORABLE)
    def test_a_dtype_that_safetensors_lacks_is_refused_by_name(self, code: str) -> None:
        with pytest.raises(Unsupported) as caught:
            make_plan(named(fine=tensor("F32", 2), odd=tensor(code, 2)))
        assert caught.value.tensor == "odd"


class TestDigest:
    @staticmethod
    def halves(first: Box, second: Box) -> Tensor:
        source = Memory(bytes(64))
        pieces = (Piece(source, 0, contiguous_strides(first.extent), first), Piece(source, 32, contiguous_strides(second.extent), second))
        return Tensor("w", BY_CODE["F32"], (4, 4), pieces)

    def test_is_the_same_for_the_same_plan(self) -> None:
        assert make_plan(named(a=tensor("F32", 4))).digest == make_plan(named(a=tensor("F32", 4))).digest

    def test_changes_with_the_source(self) -> None:
        digests = {
            make_plan(named(a=value)).digest for value in (tensor("F32", 4), tensor("F32", 4, mtime_ns=2), tensor("F32", 4, name="other"))
        }
        assert len(digests) == 3

    def test_changes_with_the_options(self) -> None:
        tensors = named(a=tensor("F32", 4), b=tensor("F32", 4))
        plans = [
            make_plan(tensors),
            make_plan(tensors, dtype="bf16"),
            make_plan(tensors, dtype="fp16"),
            make_plan(tensors, max_shard_size=16),
            make_plan(tensors, weights_name="ema.safetensors"),
            make_plan(named(a=tensor("F32", 4))),
        ]
        assert len({plan.digest for plan in plans}) == len(plans)

    def test_changes_with_the_placement(self) -> None:
        rows = self.halves(Box((0, 0), (2, 4)), Box((2, 0), (2, 4)))
        other_rows = self.halves(Box((2, 0), (2, 4)), Box((0, 0), (2, 4)))
        columns = self.halves(Box((0, 0), (4, 2)), Box((0, 2), (4, 2)))
        transposed = replace(rows, pieces=tuple(replace(piece, strides=(1, 2)) for piece in rows.pieces))
        assert len({make_plan({"w": value}).digest for value in (rows, other_rows, columns, transposed)}) == 4

    def test_changes_with_the_byte_order_and_lazy_flags_of_the_source(self) -> None:
        plain = tensor("C64", 4)
        variants = [replace(plain, pieces=(replace(plain.pieces[0], **{flag: True}),)) for flag in ("swapped", "conj", "neg")]
        assert len({make_plan({"w": value}).digest for value in (plain, *variants)}) == 4


@st.composite
def sharded(draw: st.DrawFn, name: str) -> tuple[Tensor, bytes]:
    """A tensor in rows, columns or blocks over several files, some transposed, and its bytes."""
    dtype = BY_CODE[draw(st.sampled_from(["F64", "F32", "BF16", "I16", "BOOL"]))]
    shape: Shape = draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
    raw = np.random.default_rng(len(name)).integers(0, 2, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    values = raw.view(f"V{dtype.itemsize}").reshape(shape)
    boxes = [whole(shape)] if math.prod(shape) else []
    for _ in range(draw(st.integers(0, 3)) if boxes else 0):
        box = boxes.pop(0)
        axes = [d for d, n in enumerate(box.extent) if n > 1]
        if not axes:
            boxes.append(box)
            break
        axis = draw(st.sampled_from(axes))
        half = box.extent[axis] // 2
        boxes.append(Box(box.offset, tuple(half if d == axis else n for d, n in enumerate(box.extent))))
        boxes.append(
            Box(
                tuple(a + half if d == axis else a for d, a in enumerate(box.offset)),
                tuple(n - half if d == axis else n for d, n in enumerate(box.extent)),
            )
        )
    pieces = []
    for box in boxes:
        part = values[(*(slice(a, a + n) for a, n in zip(box.offset, box.extent, strict=True)), ...)]
        strides = contiguous_strides(box.extent)
        if draw(st.booleans()):
            part = part.transpose()
            strides = contiguous_strides(box.extent[::-1])[::-1]
        pad = draw(st.integers(0, 3))
        pieces.append(Piece(Memory(bytes(pad) + part.tobytes()), pad, strides, box))
    return Tensor(name, dtype, shape, tuple(pieces)), values.tobytes()


class TestWork:
    @given(data=st.data(), dtype=st.sampled_from(["keep", "bf16", "fp32"]), worth=st.sampled_from([1, 30, 1 << 18]))
    @settings(deadline=None, derandomize=True, max_examples=150)
    def test_fills_every_byte_of_every_file_exactly_once_and_with_the_right_bytes(
        self, data: st.DataObject, dtype: str, worth: int
    ) -> None:
        held = [data.draw(sharded("t" * (i + 1))) for i in range(data.draw(st.integers(1, 4)))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planning, "TILE", 16)
            patch.setattr(planning, "COPY_STEP", 24)
            patch.setattr(planning, "WORTH_COPYING", worth)
            plan = make_plan({value.name: value for value, _ in held}, dtype=dtype, max_shard_size=data.draw(st.sampled_from([None, 60])))
            written = {}
            for file in plan.files:
                content, count = bytearray(file.size), np.zeros(file.size, dtype=int)
                content[: len(file.header)] = file.header
                count[: len(file.header)] += 1
                for work in work_of(file):
                    start, result = work.target_offset, self.done(work)
                    content[start : start + len(result)] = result
                    count[start : start + len(result)] += 1
                assert (count == 1).all()
                written |= {output.name: bytes(content[output.offset : output.offset + output.nbytes]) for output in file.tensors}
        for value, raw in held:
            target = output_dtype(value, dtype)
            expected = bytearray(value.numel * target.itemsize)
            if target == value.dtype:
                expected[:] = raw
            elif value.numel:
                cast(view_as(bytearray(raw), value.dtype, value.numel), value.dtype, target, view_as(expected, target, value.numel))
            assert written[value.name] == expected

    @staticmethod
    def done(work: CopyWork | TileWork) -> bytes:
        """What a piece of work writes."""
        if isinstance(work, CopyWork):
            assert work.nbytes <= 24
            buffer = bytearray(work.nbytes)
            work.piece.source.read_at(work.source_offset, memoryview(buffer))
            return bytes(buffer)
        value, target = work.output.tensor, work.output.dtype
        stored = bytearray(work.tile.numel * value.dtype.itemsize)
        assert len(stored) <= 16
        read_tile(value, work.tile, stored)
        if not work.output.is_cast:
            return bytes(stored)
        result = bytearray(work.tile.numel * target.itemsize)
        cast(view_as(stored, value.dtype, work.tile.numel), value.dtype, target, view_as(result, target, work.tile.numel))
        return bytes(result)

    def test_large_whole_rows_are_copied_and_columns_are_assembled(self) -> None:
        side = 1024
        source = Memory(bytes(4 * side * side))
        rows = [Piece(source, 0, (side, 1), Box((i, 0), (side // 2, side))) for i in (0, side // 2)]
        columns = [Piece(source, 0, (side // 2, 1), Box((0, i), (side, side // 2))) for i in (0, side // 2)]
        for pieces, kind in ((rows, CopyWork), (columns, TileWork)):
            (file,) = make_plan({"w": Tensor("w", BY_CODE["F32"], (side, side), tuple(pieces))}).files
            assert {type(work) for work in work_of(file)} == {kind}

    @pytest.mark.parametrize("flag", ["swapped", "conj", "neg"])
    def test_bytes_that_must_change_are_never_copied(self, flag: str) -> None:
        value = tensor("C64", 1 << 18)
        value = replace(value, pieces=(replace(value.pieces[0], **{flag: True}),))
        (file,) = make_plan({"w": value}).files
        assert {type(work) for work in work_of(file)} == {TileWork}

    def test_the_totals_are_those_of_the_work(self) -> None:
        plan = make_plan(named(a=tensor("F32", 40), b=tensor("I8", 3), c=tensor("F32", 0)), dtype="bf16")
        assert plan.elements == 43
        assert plan.bytes_read == 163
        assert plan.bytes_written == len(plan.files[0].header) + 83
