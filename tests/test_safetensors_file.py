"""The safetensors format: the library as oracle in both directions, and every header that must be refused."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ckpt_cli import merge
from ckpt_cli.dtypes import BY_CODE, TABLE
from ckpt_cli.errors import CkptError, CorruptFile, LfsPointer, Unsupported
from ckpt_cli.files.safetensors_file import MAX_HEADER, Header, build_header, read_header
from ckpt_cli.files.source import Files

ONE = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
STORABLE = [dtype for dtype in TABLE if dtype.storable and dtype.values == 1]
GOOD: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def header_of(path: Path) -> Header:
    with Files() as files:
        return read_header(files.source(path))


def raw_file(folder: Path, header: bytes | str | dict[str, Any], data: int = 32, length: int | None = None) -> Path:
    """A file with this header as it is, and ``data`` zero bytes."""
    text = json.dumps(header).encode() if isinstance(header, dict) else header.encode() if isinstance(header, str) else header
    path = folder / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data))
    return path


def library_accepts(path: Path) -> bool:
    try:
        load_file(path)
    except (SafetensorError, ValueError, OverflowError, RuntimeError, TypeError):
        return False
    return True


def with_a(**fields: Any) -> dict[str, Any]:
    return {**GOOD, "a": {**GOOD["a"], **fields}}


class TestTheLibraryReadsWhatWeWrite:
    @pytest.mark.parametrize("dtype", STORABLE, ids=str)
    def test_every_dtype_and_shape(self, dtype: Any, tmp_path: Path) -> None:
        shapes = {"matrix": (2, 3), "scalar": (), "empty": (0, 5), "long": (1, 1, 1, 7)}
        header, offsets = build_header(((name, dtype, shape) for name, shape in shapes.items()), {"format": "pt"})
        data = bytes(range(1, 1 + sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize))
        if dtype.code == "BOOL":
            data = bytes(byte % 2 for byte in data)
        path = tmp_path / "x.safetensors"
        path.write_bytes(header + data)
        loaded = load_file(path)
        for (name, shape), offset in zip(shapes.items(), offsets, strict=True):
            tensor = loaded[name]
            assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, dtype.torch), shape)
            start = offset - len(header)
            assert bytes_of(tensor) == data[start : start + math.prod(shape) * dtype.itemsize]
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}

    @pytest.mark.parametrize("name", ["", "größe", "層.weight", 'quote"\\', "\x00\x1b[31m", "../../x", "=cmd()", "a" * 4000, "😀"])
    def test_names_are_kept_exactly(self, name: str, tmp_path: Path) -> None:
        header, _ = build_header([(name, BY_CODE["F32"], (1,))], {})
        path = tmp_path / "x.safetensors"
        path.write_bytes(header + bytes(4))
        assert list(load_file(path)) == [name]
        assert [entry.name for entry in header_of(path).entries] == [name]

    @pytest.mark.parametrize("count", range(9))
    def test_data_begin_at_a_multiple_of_eight_bytes(self, count: int) -> None:
        header, offsets = build_header([("n" * count, BY_CODE["F64"], (1,))], {})
        assert len(header) % 8 == 0
        assert offsets == [len(header)]
        assert int.from_bytes(header[:8], "little") == len(header) - 8

    def test_a_file_without_tensors(self, tmp_path: Path) -> None:
        header, offsets = build_header([], {})
        path = tmp_path / "x.safetensors"
        path.write_bytes(header)
        assert offsets == []
        assert load_file(path) == {}
        assert header_of(path).entries == ()

    def test_a_header_that_no_reader_would_accept_is_not_built(self) -> None:
        names = (f"{i:08d}{'x' * 4000}" for i in range(MAX_HEADER // 4000))
        with pytest.raises(Unsupported, match="header"):
            build_header(((name, BY_CODE["U8"], (1,)) for name in names), {})


class TestWeReadWhatTheLibraryWrites:
    def test_every_dtype_and_shape(self, tmp_path: Path) -> None:
        tensors = {
            f"{dtype.code}.{i}": torch.ones(*shape[:-1], shape[-1] * dtype.itemsize, dtype=torch.uint8).view(getattr(torch, dtype.torch))
            for dtype in STORABLE
            for i, shape in enumerate([(2, 3), (1,), (4, 1, 2)])
        }
        tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4)}
        path = tmp_path / "x.safetensors"
        save_file(tensors, path, metadata={"format": "pt", "note": "x"})
        header = header_of(path)
        assert header.metadata == {"format": "pt", "note": "x"}
        content = path.read_bytes()
        assert {entry.name for entry in header.entries} == set(tensors)
        for entry in header.entries:
            tensor = tensors[entry.name]
            assert (entry.dtype.torch, entry.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            assert content[entry.offset : entry.offset + entry.nbytes] == bytes_of(tensor)

    @given(
        entries=st.dictionaries(
            st.text(max_size=8).filter(lambda name: name != "__metadata__" and name.isprintable()),
            st.tuples(st.sampled_from(STORABLE), st.lists(st.integers(0, 4), max_size=4).map(tuple)),
            max_size=6,
        ),
        metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3).filter(
            lambda m: all(text.isprintable() for pair in m.items() for text in pair)
        ),
    )
    @settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_what_was_built_reads_back(self, entries: dict[str, Any], metadata: dict[str, str], tmp_path: Path) -> None:
        header, offsets = build_header(((name, dtype, shape) for name, (dtype, shape) in entries.items()), metadata)
        size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in entries.values())
        path = tmp_path / "x.safetensors"
        path.write_bytes(header + bytes(size))
        found = header_of(path)
        assert found.metadata == metadata
        expected = {(name, dtype, shape, offset) for (name, (dtype, shape)), offset in zip(entries.items(), offsets, strict=True)}
        assert {(entry.name, entry.dtype, entry.shape, entry.offset) for entry in found.entries} == expected
        assert library_accepts(path)


def refused(path: Path, kind: type[CkptError] = CorruptFile) -> CkptError:
    """The error for a file that must not be read; it names the file."""
    with pytest.raises(kind) as caught:
        header_of(path)
    assert caught.value.path == str(path)
    return caught.value


class TestTheLengthOfTheHeader:
    @pytest.mark.parametrize("size", range(8))
    def test_fewer_than_eight_bytes_are_no_file(self, size: int, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        path.write_bytes(bytes(size))
        refused(path)

    @pytest.mark.parametrize("length", [0, 1, 33, 1000, 1 << 31, 1 << 63, (1 << 64) - 1])
    def test_must_fit_the_file(self, length: int, tmp_path: Path) -> None:
        refused(raw_file(tmp_path, b"", length=length))

    def test_is_at_most_a_hundred_megabytes(self, tmp_path: Path) -> None:
        path = raw_file(tmp_path, b"{", length=MAX_HEADER + 1)
        with path.open("r+b") as file:
            file.truncate(MAX_HEADER + 100)
        assert "100000001" in refused(path).message

    def test_a_git_lfs_pointer_is_recognised(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 123\n")
        with Files() as files, pytest.raises(LfsPointer):
            files.source(path)


class TestTheJsonOfTheHeader:
    @pytest.mark.parametrize(
        "text",
        [
            b"", b"{", b"[]", b"[1]", b"null", b'"a"', b"{}}", b"{} x", b"{'a': 1}", b'{"a": }', b'{"a": 1,}', b"\xef\xbb\xbf{}",
            b'{"a": "\xff"}', b'{"\xff": {}}', b'{"a\x00": 1}', "{}".encode("utf-16"),
            b'{"a": ' + b"9" * 5000 + b"}", b'{"a": 1e999}', b'{"a": NaN}',
        ],
    )  # fmt: skip
    def test_is_one_object_in_utf8_from_the_first_byte_on(self, text: bytes, tmp_path: Path) -> None:
        path = raw_file(tmp_path, text, data=0)
        assert not library_accepts(path)
        refused(path)

    @pytest.mark.parametrize("blank", [b" ", b"\n"])
    def test_begins_with_a_brace_as_the_format_says(self, blank: bytes, tmp_path: Path) -> None:
        refused(raw_file(tmp_path, blank + b"{}", data=0))

    @pytest.mark.parametrize("opening", [b"[", b'{"a":'])
    def test_may_not_be_nested_without_end(self, opening: bytes, tmp_path: Path) -> None:
        refused(raw_file(tmp_path, b'{"a":' + opening * 200_000))

    @pytest.mark.parametrize(
        "text",
        [
            f'{{"a": {ONE}, "a": {ONE}}}',
            f'{{"a": {ONE}, "a": {ONE.replace("F32", "I32")}}}',
            f'{{"a": {ONE}, "\\u0061": {ONE}}}',
            '{"a": {"dtype": "F32", "dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}',
            f'{{"__metadata__": {{"k": "1", "k": "2"}}, "a": {ONE}}}',
        ],
    )
    def test_names_no_key_twice(self, text: str, tmp_path: Path) -> None:
        assert "twice" in refused(raw_file(tmp_path, text, data=4)).message

    def test_has_no_lone_surrogate_in_a_name(self, tmp_path: Path) -> None:
        path = raw_file(tmp_path, f'{{"\\ud800": {ONE}}}', data=4)
        assert not library_accepts(path)
        refused(path)

    @pytest.mark.parametrize("metadata", [{"a": 1}, {"a": None}, {"a": {"b": "c"}}, {"a": ["b"]}, ["a"], "a", 1])
    def test_metadata_are_strings(self, metadata: object, tmp_path: Path) -> None:
        path = raw_file(tmp_path, {**GOOD, "__metadata__": metadata})
        assert not library_accepts(path)
        refused(path)

    def test_a_tensor_called_like_the_metadata_is_no_tensor(self, tmp_path: Path) -> None:
        refused(raw_file(tmp_path, {"__metadata__": GOOD["a"]}, data=24))

    def test_unknown_fields_are_ignored(self, tmp_path: Path) -> None:
        path = raw_file(tmp_path, with_a(later={"x": [1, 2]}))
        assert library_accepts(path)
        assert [entry.name for entry in header_of(path).entries] == ["a", "b"]


class TestTheTensorsOfTheHeader:
    def test_the_good_header_is_good(self, tmp_path: Path) -> None:
        path = raw_file(tmp_path, GOOD)
        assert library_accepts(path)
        assert [entry.offset for entry in header_of(path).entries] == [path.stat().st_size - 32, path.stat().st_size - 8]

    @pytest.mark.parametrize("extra", [-32, -1, 1, 8])
    def test_data_end_with_the_file(self, extra: int, tmp_path: Path) -> None:
        path = raw_file(tmp_path, GOOD, data=32 + extra)
        assert not library_accepts(path)
        refused(path)

    @pytest.mark.parametrize(
        ("a", "b"),
        [([0, 24], [20, 28]), ([0, 24], [0, 8]), ([0, 24], [28, 36]), ([8, 32], [32, 40]), ([24, 0], [24, 32]), ([0, 24], [32, 24])],
        ids=["overlap", "same start", "hole", "hole at the start", "reversed", "reversed at the end"],
    )
    def test_neither_overlap_nor_leave_holes(self, a: list[int], b: list[int], tmp_path: Path) -> None:
        path = raw_file(tmp_path, {"a": {**GOOD["a"], "data_offsets": a}, "b": {**GOOD["b"], "data_offsets": b}}, data=max(*a, *b))
        assert not library_accepts(path)
        assert refused(path).tensor in ("a", "b")

    def test_may_be_listed_in_any_order(self, tmp_path: Path) -> None:
        path = raw_file(tmp_path, {"b": GOOD["b"], "a": GOOD["a"]})
        assert library_accepts(path)
        assert [entry.name for entry in header_of(path).entries] == ["a", "b"]

    def test_empty_ones_may_stand_anywhere_between_others(self, tmp_path: Path) -> None:
        empty = {name: {"dtype": "F32", "shape": [0, 3], "data_offsets": [at, at]} for name, at in (("x", 0), ("y", 24), ("z", 32))}
        path = raw_file(tmp_path, {**GOOD, **empty})
        assert library_accepts(path)
        assert len(header_of(path).entries) == 5

    @pytest.mark.parametrize(
        "fields",
        [
            {"shape": [2, 4]}, {"shape": []}, {"shape": [-2, -3]}, {"shape": [6.0]}, {"shape": [True, 6]}, {"shape": ["6"]},
            {"shape": 6}, {"shape": None}, {"shape": {"0": 6}}, {"shape": [1 << 32, 1 << 32]}, {"shape": [1 << 64]},
            {"shape": [1 << 63, 0], "data_offsets": [0, 0]}, {"dtype": "F64"}, {"dtype": 1}, {"dtype": None},
            {"data_offsets": [0]}, {"data_offsets": [0, 12, 24]}, {"data_offsets": [0.0, 24.0]}, {"data_offsets": [False, 24]},
            {"data_offsets": [-24, 0]}, {"data_offsets": None}, {"data_offsets": [0, 1 << 64]},
        ],
        ids=str,
    )  # fmt: skip
    def test_agree_with_their_shape_and_dtype_in_natural_numbers(self, fields: dict[str, Any], tmp_path: Path) -> None:
        path = raw_file(tmp_path, with_a(**fields))
        assert not library_accepts(path)
        assert refused(path).tensor == "a"

    @pytest.mark.parametrize("missing", ["dtype", "shape", "data_offsets"])
    def test_lack_no_field(self, missing: str, tmp_path: Path) -> None:
        entry = {key: value for key, value in GOOD["a"].items() if key != missing}
        assert refused(raw_file(tmp_path, {**GOOD, "a": entry})).tensor == "a"

    @pytest.mark.parametrize("entry", [None, 1, "F32", [], ["F32", [2, 3], [0, 24]]])
    def test_are_objects(self, entry: object, tmp_path: Path) -> None:
        assert refused(raw_file(tmp_path, {**GOOD, "a": entry})).tensor == "a"

    @pytest.mark.parametrize("code", ["F128", "f32", "", "F6_E2M3", "C128", "QINT8"])
    def test_an_unknown_dtype_is_named(self, code: str, tmp_path: Path) -> None:
        error = refused(raw_file(tmp_path, with_a(dtype=code)), Unsupported)
        assert error.tensor == "a"
        assert code in error.message


class TestTruncation:
    def test_at_every_byte_is_noticed(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bool)}, path)
        content = path.read_bytes()
        for size in range(len(content)):
            path.write_bytes(content[:size])
            refused(path)
        path.write_bytes(content)
        assert len(header_of(path).entries) == 2


class TestNeverMoreLenientThanTheLibrary:
    @given(data=st.data())
    @settings(deadline=None, derandomize=True, max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_a_damaged_header_that_the_library_refuses_is_refused(self, data: st.DataObject, tmp_path: Path) -> None:
        text = bytearray(json.dumps(GOOD).encode())
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(text) - 1))
            byte = data.draw(st.sampled_from(b'0123456789"{}[],:. \\ntfuFB_ab\xc3\x00'))
            kind = data.draw(st.sampled_from(["replace", "insert", "delete"]))
            text[at : at + (kind != "insert")] = b"" if kind == "delete" else bytes([byte])
        path = raw_file(tmp_path, bytes(text))
        try:
            header = header_of(path)
        except CkptError:
            return
        loaded = load_file(path)
        assert {entry.name: (entry.dtype.torch, entry.shape) for entry in header.entries} == {
            name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in loaded.items()
        }


class TestNamesThatCannotBeWritten:
    @pytest.mark.parametrize("name", ["__metadata__", "\ud800.weight"], ids=ascii)
    def test_are_refused_before_anything_is_written(self, name: str, tmp_path: Path) -> None:
        torch.save({name: torch.ones(2), "fine": torch.ones(2)}, tmp_path / "model_world_size_1_rank_0.pt")
        with pytest.raises(CorruptFile):
            merge(tmp_path, tmp_path.parent / f"{tmp_path.name}-out")
        assert not (tmp_path.parent / f"{tmp_path.name}-out").exists()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
