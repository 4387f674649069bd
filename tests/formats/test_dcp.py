"""torch.distributed.checkpoint folders: written by torch in every way that one process can, patched, and damaged."""

from __future__ import annotations

import contextlib
import copy as copying
import io
import itertools
import math
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

import ckpt_cli
from ckpt_cli.boxes import Box
from ckpt_cli.errors import (
    CkptError,
    CorruptFile,
    Gap,
    IncompleteError,
    Inconsistent,
    MissingShard,
    NotFound,
    Overlap,
    PartOfSet,
    Unsupported,
)
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.dcp.metadata import metadata_files
from ckpt_cli.formats.dcp.reader import Dcp
from ckpt_cli.formats.placeholders import placeholders
from ckpt_cli.tensors.component import Component
from tests.conftest import Copy
from tests.formats.conformance import Example, FormatConformance, everything_said_by
from tests.tensors import Tensors, differences, load
from tests.test_kernels import slices, tilings

Change = Callable[[Metadata], object]
Write = Callable[..., Path]

ITEM = "__0_0.distcp"
ROWS = "model.layers.0.self_attn.q_proj.weight"
"""Cut into rows of four ranks in `mesh-line`, and there below the key "model"."""


def state() -> dict[str, torch.Tensor]:
    return {"embed.weight": torch.arange(12.0).reshape(3, 4), "norm.weight": torch.arange(4.0) - 1}


def save(folder: Path, content: dict[str, Any], **options: Any) -> Path:
    """One process saves ``content``; ``options`` are those of torch's writer."""
    dcp.save(content, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


def patch(folder: Path, change: Change, name: str = ".metadata") -> Path:
    """Rewrite the metadata that a test wrote or unpacked, by torch's own classes."""
    path = folder / name
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return folder


def relocate(metadata: Metadata, name: str, **fields: Any) -> None:
    """Change where the bytes of every chunk of a tensor are said to be."""
    for index, info in metadata.storage_data.items():
        if index.fqn == name:
            vars(info).update(fields)


def index_of(metadata: Metadata, name: str, offset: tuple[int, ...]) -> MetadataIndex:
    return next(index for index in metadata.storage_data if index.fqn == name and index.offset == torch.Size(offset))


def describe(folder: Path) -> Component:
    with Files() as files:
        (match,) = Dcp().recognise(folder, Folders())
        return Dcp().describe(match, files, ReadOptions())


def refused(folder: Path, error: type[CkptError], match: str | None = None) -> CkptError:
    """Merging is refused for this reason and writes nothing."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(error, match=match) as caught:
        ckpt_cli.merge(folder, folder.parent / "out")
    assert sorted(folder.parent.iterdir()) == before
    return caught.value


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return save(tmp_path / "dcp", state())


@pytest.fixture
def sharded(copy: Copy) -> Path:
    """Four ranks on a line."""
    return copy("layouts", "mesh-line", "line", "dcp")


# -- what every reader promises --------------------------------------------------------------------------------------


class TestFsdp2WithTensorParallelism(FormatConformance):
    reader = Dcp()

    def example(self, data: Path) -> Example:
        return Example(data / "layouts" / "mesh-grid" / "tp" / "dcp", data / "layouts" / "mesh-grid" / "expected-tp.safetensors")


class TestShardedTensorsOfFsdp1(FormatConformance):
    reader = Dcp()

    def example(self, data: Path) -> Example:
        mode = "fsdp1_sharded_tensor"
        return Example(data / "dcp" / "2.4.1" / mode, data / "torch-2.4.1" / mode / "expected.safetensors")


class TestOneMetadataFilePerRank(FormatConformance):
    reader = Dcp()

    def example(self, data: Path) -> Example:
        layout = data / "layouts" / "dcp-options"
        return Example(layout / "no_collectives", layout / "expected.safetensors")


class TestCompressedItems(FormatConformance):
    reader = Dcp()

    def example(self, data: Path) -> Example:
        layout = data / "layouts" / "dcp-options"
        return Example(layout / "zstd", layout / "expected-zstd.safetensors")


class TestSafetensorsItems(FormatConformance):
    reader = Dcp()

    def example(self, data: Path) -> Example:
        layout = data / "layouts" / "dcp-options"
        return Example(layout / "safetensors_items", layout / "expected-safetensors_items.safetensors")


# -- whatever torch saves, comes back --------------------------------------------------------------------------------

DTYPES = [getattr(torch, name) for name in (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "uint8",
    "uint16", "uint32", "uint64", "bool", "complex64",
)]  # fmt: skip
TOPS = [(), ("model",), ("state_dict",), ("app", "model"), ("fsdp_checkpoint", "model")]
"""The levels above a model that trainers write."""


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bytes of any dtype, behind any strides that torch can make."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    tensor = (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)
    for change in draw(st.lists(st.sampled_from(["permute", "step", "narrow", "expand", "conj"]), max_size=3)):
        if change == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif change == "step" and tensor.dim():
            tensor = tensor[..., ::2]
        elif change == "narrow" and tensor.dim() and tensor.shape[0] > 1:
            tensor = tensor[1:]
        elif change == "expand" and tensor.dim() < 4:
            tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
        elif change == "conj" and dtype.is_complex:
            tensor = tensor.conj()
    return tensor


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Any], Tensors]:
    """What a trainer passes to ``dcp.save``, and the names under which its tensors must come out."""
    names = draw(st.lists(st.from_regex(r"[a-d](\.[a-d0-3]){0,2}", fullmatch=True), min_size=1, max_size=5, unique=True))
    expected = {name: draw(tensors()) for name in names}
    content: dict[str, Any] = dict(expected)
    top = draw(st.sampled_from(TOPS))
    if top:
        # Within a model, tensors may also hang on nested dicts and lists; their keys are joined by dots.
        for name in draw(st.sets(st.sampled_from(["x", "y"]))):
            inner = draw(tensors()), draw(tensors())
            content[name] = {"one": inner[0], "list": [inner[1], 3]}
            expected |= {f"{name}.one": inner[0], f"{name}.list.0": inner[1]}
        content["an object"] = {"epoch": 3}
    for level in reversed(top):
        content = {level: content, "optimizer": {"state": {"a.exp_avg": torch.ones(2)}}, "step": 7}
    return content, expected


def resolved(tensors: Tensors) -> Tensors:
    return {name: tensor.resolve_conj().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


@settings(deadline=None, derandomize=True, max_examples=40)
@given(models(), st.sampled_from([{}, {"single_file_per_rank": False}, {"thread_count": 2}, {"_extensions": [ZStandard()]}]))
def test_what_one_process_saves_is_merged_bit_for_bit(model: tuple[dict[str, Any], Tensors], options: dict[str, Any]) -> None:
    content, expected = model
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder, "dcp"), content, **options)
        if placeholders({name: tuple(tensor.shape) for name, tensor in expected.items()}):
            with pytest.raises(Gap):
                ckpt_cli.merge(Path(folder, "dcp"), Path(folder, "out"))
            return
        ckpt_cli.merge(Path(folder, "dcp"), Path(folder, "out"))
        assert differences(load(Path(folder, "out")), resolved(expected)) == []


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 1 << 30))))
    return tensor, draw(tilings(shape))


@settings(deadline=None, derandomize=True, max_examples=40)
@given(cut_tensors(), st.booleans())
def test_chunks_of_any_tiling_are_put_together(cut: tuple[torch.Tensor, list[Box]], transposed: bool) -> None:
    """Each part is saved as a tensor of its own; the metadata then says that they are chunks of one."""
    tensor, boxes = cut
    parts = {f"part{i}": tensor[slices(box)] for i, box in enumerate(boxes)}
    if transposed:
        parts = {name: part.mT.contiguous().mT if part.dim() > 1 else part for name, part in parts.items()}

    def join(metadata: Metadata) -> None:
        chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.extent)) for box in boxes]
        entry = TensorStorageMetadata(metadata.state_dict_metadata["part0"].properties, tensor.shape, chunks)
        places = {index.fqn: info for index, info in metadata.storage_data.items()}
        metadata.storage_data = {MetadataIndex("whole", torch.Size(box.offset)): places[f"part{i}"] for i, box in enumerate(boxes)}
        metadata.state_dict_metadata, metadata.planner_data = {"whole": entry}, {"whole": ("whole",)}

    with tempfile.TemporaryDirectory() as folder:
        patch(save(Path(folder, "dcp"), parts), join)
        ckpt_cli.merge(Path(folder, "dcp"), Path(folder, "out"))
        assert differences(load(Path(folder, "out")), {"whole": tensor}) == []


class TestSafetensorsBlobs:
    """``SerializationFormat.SAFETENSORS``: torch itself cannot read these back."""

    @pytest.fixture
    def written(self, tmp_path: Path) -> Path:
        return save(tmp_path / "dcp", state(), serialization_format=SerializationFormat.SAFETENSORS)

    def test_one_blob_holds_all_tensors_of_a_file(self, written: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(written, tmp_path / "out")
        assert differences(load(tmp_path / "out"), state()) == []

    def test_objects_before_the_blob_do_not_matter(self, tmp_path: Path) -> None:
        content = {"model": state(), "step": 7, "args": {"lr": 0.1}}
        save(tmp_path / "dcp", content, serialization_format=SerializationFormat.SAFETENSORS)
        ckpt_cli.merge(tmp_path / "dcp", tmp_path / "out")
        assert differences(load(tmp_path / "out"), state()) == []

    def test_a_tensor_that_is_not_in_the_blob_is_refused(self, written: Path) -> None:
        def rename(metadata: Metadata) -> None:
            metadata.state_dict_metadata["other"] = metadata.state_dict_metadata.pop("norm.weight")
            index = index_of(metadata, "norm.weight", (0,))
            metadata.storage_data[MetadataIndex("other", index.offset)] = metadata.storage_data.pop(index)

        error = refused(patch(written, rename), CorruptFile)
        assert (error.tensor, error.path) == ("other", str(written / ITEM))

    def test_a_dtype_that_the_blob_has_not_is_refused(self, written: Path) -> None:
        def lie(metadata: Metadata) -> None:
            metadata.state_dict_metadata["norm.weight"].properties.dtype = torch.int32

        assert refused(patch(written, lie), Inconsistent).tensor == "norm.weight"


# -- metadata --------------------------------------------------------------------------------------------------------


class TestMetadataFile:
    def test_without_it_the_save_did_not_finish(self, written: Path) -> None:
        (written / ".metadata").unlink()
        error = refused(written, MissingShard, "did not finish")
        assert (error.exit_code, error.expected) == (4, str(written / ".metadata"))

    def test_the_temporary_one_is_named_and_not_read(self, written: Path) -> None:
        (written / ".metadata").rename(written / ".metadata.tmp")
        assert ".metadata.tmp" in everything_said_by(refused(written, MissingShard))

    def test_it_stands_for_its_folder(self, written: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(written / ".metadata", tmp_path / "out")
        assert differences(load(tmp_path / "out"), state()) == []

    def test_a_data_file_stands_for_its_folder(self, written: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(written / ITEM, tmp_path / "out")
        assert differences(load(tmp_path / "out"), state()) == []

    def test_any_truncation_is_refused_by_name(self, written: Path) -> None:
        content = (written / ".metadata").read_bytes()
        for length in range(len(content)):
            (written / ".metadata").write_bytes(content[:length])
            with pytest.raises(CorruptFile) as caught:
                describe(written)
            assert (caught.value.path, caught.value.exit_code) == (str(written / ".metadata"), 3), length

    def test_it_ends_where_its_pickle_ends(self, written: Path) -> None:
        with (written / ".metadata").open("ab") as file:
            file.write(b"\0")
        assert refused(written, CorruptFile).path == str(written / ".metadata")

    @pytest.mark.parametrize("content", [{}, [], None, 7, {"state_dict_metadata": {}}, MetadataIndex("a")], ids=repr)
    def test_another_object_is_refused(self, written: Path, content: object) -> None:
        (written / ".metadata").write_bytes(pickle.dumps(content))
        assert refused(written, CorruptFile).path == str(written / ".metadata")

    def test_a_zip_of_torch_save_is_refused(self, written: Path) -> None:
        buffer = io.BytesIO()
        torch.save(state(), buffer)
        (written / ".metadata").write_bytes(buffer.getvalue())
        refused(written, CorruptFile)

    def test_one_of_torch_2_2_is_read(self, written: Path, tmp_path: Path) -> None:
        """Properties lived in another module, and the fields of later versions were not there."""

        def age(metadata: Metadata) -> None:
            for entry in metadata.state_dict_metadata.values():
                entry.properties = OldProperties(dtype=entry.properties.dtype)
            for field in ("storage_meta", "version"):
                vars(metadata).pop(field, None)

        ckpt_cli.merge(patch(written, age), tmp_path / "out")
        assert differences(load(tmp_path / "out"), state()) == []
        assert describe(written).writer == "torch DCP (<= 2.2)"

    def test_one_without_planner_data_is_read(self, written: Path, tmp_path: Path) -> None:
        ckpt_cli.merge(patch(written, lambda metadata: setattr(metadata, "planner_data", None)), tmp_path / "out")
        assert differences(load(tmp_path / "out"), state()) == []

    def test_one_without_a_tensor_is_refused(self, tmp_path: Path) -> None:
        refused(save(tmp_path / "dcp", {"step": 7, "args": {"lr": 0.1}}), CorruptFile, "no tensor")


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


class TestCodeInThePickles:
    @pytest.fixture
    def marker(self, tmp_path: Path) -> Path:
        return tmp_path / "marker"

    def test_the_bomb_would_go_off(self, marker: Path) -> None:
        pickle.loads(pickle.dumps(Bomb(marker)))
        assert marker.exists()

    def test_metadata_that_is_code_is_refused_and_does_not_run(self, written: Path, marker: Path) -> None:
        (written / ".metadata").write_bytes(pickle.dumps(Bomb(marker)))
        refused(written, CorruptFile)
        assert not marker.exists()

    @pytest.mark.parametrize("place", ["state_dict_metadata", "storage_data"])
    def test_code_among_entries_is_refused_and_does_not_run(self, written: Path, marker: Path, place: str) -> None:
        path = written / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        getattr(metadata, place)["norm.weight" if place == "state_dict_metadata" else MetadataIndex("x")] = Bomb(marker)
        path.write_bytes(pickle.dumps(metadata))
        refused(written, CorruptFile)
        assert not marker.exists()

    @pytest.mark.parametrize("place", ["planner_data", "storage_meta"])
    def test_code_where_nothing_is_needed_does_not_run(self, written: Path, marker: Path, tmp_path: Path, place: str) -> None:
        path = written / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        setattr(metadata, place, {"norm.weight": Bomb(marker)} if place == "planner_data" else Bomb(marker))
        path.write_bytes(pickle.dumps(metadata))
        try:
            ckpt_cli.merge(written, tmp_path / "out")
        except CorruptFile:
            assert not (tmp_path / "out").exists()
        else:
            assert differences(load(tmp_path / "out"), state()) == []
        assert not marker.exists()

    def test_objects_beside_the_weights_are_not_even_read(self, marker: Path, tmp_path: Path) -> None:
        save(tmp_path / "dcp", {"model": state(), "args": Bomb(marker)})
        ckpt_cli.merge(tmp_path / "dcp", tmp_path / "out")
        assert differences(load(tmp_path / "out"), state()) == []
        assert not marker.exists()
        assert [leaf.name for leaf in describe(tmp_path / "dcp").leaves] == ["args"]

    def test_an_item_that_is_code_is_refused_and_does_not_run(self, written: Path, marker: Path) -> None:
        buffer = io.BytesIO()
        torch.save(Bomb(marker), buffer)
        (written / "__1_0.distcp").write_bytes(buffer.getvalue())
        change = {"relative_path": "__1_0.distcp", "offset": 0, "length": len(buffer.getvalue())}
        refused(patch(written, lambda metadata: relocate(metadata, "norm.weight", **change)), CorruptFile)
        assert not marker.exists()


class TestPathsOfDataFiles:
    @pytest.mark.parametrize(
        "path",
        ["../{}", "{folder}/{}", "C:{}", "C:\\{}", "..\\{}", "x/../../{}", "//server/share/{}", "\\{}", "", "{}\0", 5, None, b"{}"],
        ids=repr,
    )
    def test_a_path_that_leaves_the_folder_is_refused_and_not_opened(
        self, written: Path, monkeypatch: pytest.MonkeyPatch, path: object
    ) -> None:
        outside = written.parent / ITEM
        outside.write_bytes((written / ITEM).read_bytes())
        (written / "x").mkdir()
        if isinstance(path, str):
            path = path.replace("{folder}", str(written.parent)).replace("{}", ITEM)
        patch(written, lambda metadata: relocate(metadata, "norm.weight", relative_path=path))
        opened = []
        real = os.open

        def spy(name: Any, *arguments: Any, **options: Any) -> int:
            opened.append(Path(os.fsdecode(name)).resolve())
            return real(name, *arguments, **options)

        monkeypatch.setattr(os, "open", spy)
        error = refused(written, CorruptFile)
        assert (error.tensor, error.path) == ("norm.weight", str(written / ".metadata"))
        assert set(opened) <= {(written / ".metadata").resolve()}

    def test_a_path_may_lead_deeper_into_the_folder(self, written: Path, tmp_path: Path) -> None:
        """The S3 connector spreads its files over prefixes."""
        (written / "0110" / "epoch_0").mkdir(parents=True)
        (written / ITEM).rename(written / "0110" / "epoch_0" / ITEM)
        for name in state():
            patch(written, lambda metadata, name=name: relocate(metadata, name, relative_path=f"0110/epoch_0/{ITEM}"))
        ckpt_cli.merge(written, tmp_path / "out")
        assert differences(load(tmp_path / "out"), state()) == []

    def test_a_folder_in_place_of_a_data_file_is_missing(self, written: Path) -> None:
        (written / ITEM).unlink()
        (written / ITEM).mkdir()
        assert ITEM in refused(written, MissingShard).message


# -- metadata that do not fit their data -----------------------------------------------------------------------------


class TestChunks:
    @staticmethod
    def chunks(metadata: Metadata) -> list[ChunkStorageMetadata]:
        return metadata.state_dict_metadata[f"model.{ROWS}"].chunks

    def move(self, metadata: Metadata, number: int, offset: tuple[int, ...]) -> None:
        """Say that a chunk begins somewhere else; its bytes stay where they are."""
        chunk = self.chunks(metadata)[number]
        index = index_of(metadata, f"model.{ROWS}", tuple(chunk.offsets))
        metadata.storage_data[MetadataIndex(f"model.{ROWS}", torch.Size(offset))] = metadata.storage_data.pop(index)
        chunk.offsets = torch.Size(offset)

    def test_the_fixture_is_cut_into_rows(self, sharded: Path) -> None:
        metadata = pickle.loads((sharded / ".metadata").read_bytes())
        assert [tuple(chunk.offsets) for chunk in self.chunks(metadata)] == [(0, 0), (3, 0), (6, 0), (9, 0)]

    @pytest.mark.parametrize("number", range(4))
    def test_a_missing_chunk_is_a_hole(self, sharded: Path, number: int) -> None:
        error = refused(patch(sharded, lambda metadata: self.chunks(metadata).pop(number)), Gap)
        assert error.tensor == ROWS

    def test_chunks_that_overlap_are_refused(self, sharded: Path) -> None:
        assert refused(patch(sharded, lambda metadata: self.move(metadata, 1, (2, 0))), Overlap).tensor == ROWS

    def test_a_chunk_moved_away_leaves_a_hole(self, sharded: Path) -> None:
        def change(metadata: Metadata) -> None:
            entry = metadata.state_dict_metadata[f"model.{ROWS}"]
            entry.size = torch.Size((entry.size[0] + 1, entry.size[1]))
            self.move(metadata, 3, (10, 0))

        assert refused(patch(sharded, change), Gap).tensor == ROWS

    def test_a_tensor_larger_than_its_chunks_has_a_hole(self, sharded: Path) -> None:
        def change(metadata: Metadata) -> None:
            entry = metadata.state_dict_metadata[f"model.{ROWS}"]
            entry.size = torch.Size((entry.size[0] + 1, entry.size[1]))

        assert refused(patch(sharded, change), Gap).tensor == ROWS

    def test_a_tensor_without_chunks_is_a_hole(self, sharded: Path) -> None:
        assert refused(patch(sharded, lambda metadata: self.chunks(metadata).clear()), Gap).tensor == ROWS

    @pytest.mark.parametrize("offset", [(10, 0), (9, 1), (1 << 40, 0), (9,), (9, 0, 0), ()], ids=repr)
    def test_a_chunk_outside_of_the_tensor_is_refused(self, sharded: Path, offset: tuple[int, ...]) -> None:
        error = refused(patch(sharded, lambda metadata: self.move(metadata, 3, offset)), CorruptFile)
        assert (error.tensor, error.path) == (f"model.{ROWS}", str(sharded / ".metadata"))

    def test_a_chunk_at_a_negative_place_is_refused(self, sharded: Path) -> None:
        error = refused(patch(sharded, lambda metadata: self.move(metadata, 3, (-3, 0))), CorruptFile)
        assert error.path == str(sharded / ".metadata")

    def test_a_chunk_that_nothing_stores_is_refused(self, sharded: Path) -> None:
        def change(metadata: Metadata) -> None:
            del metadata.storage_data[index_of(metadata, f"model.{ROWS}", (3, 0))]

        error = refused(patch(sharded, change), CorruptFile)
        assert (error.tensor, error.path) == (f"model.{ROWS}", str(sharded / ".metadata"))

    def test_empty_chunks_are_passed_over(self, sharded: Path, layouts: Path, tmp_path: Path) -> None:
        """Ranks without rows have chunks at the end, all at the same place, without bytes."""

        def change(metadata: Metadata) -> None:
            size = metadata.state_dict_metadata[f"model.{ROWS}"].size
            for _ in range(2):
                self.chunks(metadata).append(ChunkStorageMetadata(torch.Size((size[0], 0)), torch.Size((0, size[1]))))

        ckpt_cli.merge(patch(sharded, change), tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(layouts / "mesh-line" / "expected-line.safetensors")) == []

    def test_chunks_of_another_shape_than_their_items_are_refused(self, written: Path) -> None:
        def change(metadata: Metadata) -> None:
            entry = metadata.state_dict_metadata["embed.weight"]
            entry.size = torch.Size((4, 3))
            entry.chunks[0].sizes = torch.Size((4, 3))

        error = refused(patch(written, change), Inconsistent, r"\[3, 4\].*\[4, 3\]")
        assert (error.tensor, error.path) == ("embed.weight", str(written / ITEM))

    @pytest.mark.parametrize(("dtype", "code"), [(torch.int32, "I32"), (torch.bfloat16, "BF16"), (torch.float64, "F64")])
    def test_a_dtype_that_the_items_have_not_is_refused(self, written: Path, dtype: torch.dtype, code: str) -> None:
        def change(metadata: Metadata) -> None:
            metadata.state_dict_metadata["embed.weight"].properties.dtype = dtype

        error = refused(patch(written, change), Inconsistent, f"is F32 .* says {code} ")
        assert error.tensor == "embed.weight"

    def test_a_dtype_that_nobody_knows_is_refused(self, written: Path) -> None:
        def change(metadata: Metadata) -> None:
            metadata.state_dict_metadata["embed.weight"].properties.dtype = torch.uint3

        assert refused(patch(written, change), Unsupported, "uint3").tensor == "embed.weight"

    def test_metadata_of_an_older_save_over_newer_data_are_refused(self, written: Path) -> None:
        old = (written / ".metadata").read_bytes()
        save(
            written, {name: tensor.T.contiguous() for name, tensor in state().items() if tensor.dim() > 1} | {"norm.weight": torch.ones(5)}
        )
        (written / ".metadata").write_bytes(old)
        refused(written, Inconsistent)


class TestItems:
    @pytest.mark.parametrize("field", ["offset", "length"])
    @pytest.mark.parametrize("value", [-1, 1.5, None, "0", True, 1 << 62, 1 << 70], ids=repr)
    def test_an_offset_or_length_that_makes_no_sense_is_refused(self, written: Path, field: str, value: object) -> None:
        error = refused(patch(written, lambda metadata: relocate(metadata, "norm.weight", **{field: value})), CorruptFile)
        assert error.tensor == "norm.weight"

    def test_an_item_beyond_the_file_is_refused(self, written: Path) -> None:
        size = (written / ITEM).stat().st_size
        for offset in (size, size - 1, 1 << 61):
            error = refused(patch(written, lambda metadata, at=offset: relocate(metadata, "norm.weight", offset=at)), CorruptFile)
            assert (error.tensor, error.path) == ("norm.weight", str(written / ITEM))

    @pytest.mark.parametrize("change", [-64, -1, 1, 64])
    @pytest.mark.parametrize("field", ["offset", "length"])
    def test_an_item_that_is_cut_elsewhere_is_refused(self, tmp_path: Path, field: str, change: int) -> None:
        content = {"a": torch.arange(5.0), "b": torch.arange(5.0), "c": torch.arange(5.0)}
        folder = save(tmp_path / "dcp", content)
        places = {index.fqn: info for index, info in pickle.loads((folder / ".metadata").read_bytes()).storage_data.items()}
        middle = sorted(places, key=lambda name: places[name].offset)[1]
        value = getattr(places[middle], field) + change
        error = refused(patch(folder, lambda metadata: relocate(metadata, middle, **{field: value})), CorruptFile)
        assert (error.tensor, error.path) == (middle, str(folder / ITEM))

    def test_an_item_that_holds_something_else_is_refused(self, written: Path) -> None:
        buffer = io.BytesIO()
        torch.save({"norm.weight": torch.ones(4)}, buffer)
        (written / "__1_0.distcp").write_bytes(buffer.getvalue())
        change = {"relative_path": "__1_0.distcp", "offset": 0, "length": len(buffer.getvalue())}
        refused(patch(written, lambda metadata: relocate(metadata, "norm.weight", **change)), CorruptFile, "no tensor")

    def test_an_empty_item_is_refused(self, written: Path) -> None:
        refused(patch(written, lambda metadata: relocate(metadata, "norm.weight", length=0)), CorruptFile)

    def test_all_missing_files_are_counted_and_the_first_is_expected(self, sharded: Path) -> None:
        for rank in (1, 3):
            (sharded / f"__{rank}_0.distcp").unlink()
        error = refused(sharded, MissingShard, r"2 of 4 data files are missing: __1_0\.distcp, __3_0\.distcp")
        assert (error.exit_code, error.expected) == (4, str(sharded / "__1_0.distcp"))

    def test_files_of_an_earlier_save_are_noted_and_not_used(self, layouts: Path, tmp_path: Path) -> None:
        folder = layouts / "dcp-options" / "left_overs"
        component = describe(folder)
        (note,) = (note for note in component.notes if note.code == "left-overs")
        unused = {path.name for path in folder.glob("*.distcp")} - {path.name for path in component.files}
        assert len(unused) > 0
        assert note.text.startswith(f"{len(unused)} files of an earlier save are not used: ")
        ckpt_cli.merge(folder, tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(layouts / "dcp-options" / "expected-left_overs.safetensors")) == []

    def test_files_of_other_groups_are_no_left_overs(self, tmp_path: Path) -> None:
        folder = save(tmp_path / "dcp", {"model": state(), "optimizer": {"exp_avg": torch.ones(3)}}, single_file_per_rank=False)
        assert describe(folder).notes == ()


class TestCompression:
    @pytest.fixture
    def written(self, tmp_path: Path) -> Path:
        return save(tmp_path / "dcp", state(), _extensions=[ZStandard()])

    def test_the_fixture_is_compressed(self, written: Path) -> None:
        metadata = pickle.loads((written / ".metadata").read_bytes())
        assert {tuple(info.transform_descriptors) for info in metadata.storage_data.values()} == {("stream.zstd/1",)}
        assert (written / ITEM).read_bytes()[:4] != b"PK\x03\x04"

    def test_large_items_are_inflated_in_bounded_steps(self, tmp_path: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        content = {"w": torch.randn(700, 900, generator=generator).T, "v": torch.zeros(1 << 20), "u": torch.randn(3, generator=generator)}
        ckpt_cli.merge(save(tmp_path / "dcp", content, _extensions=[ZStandard()]), tmp_path / "out")
        assert differences(load(tmp_path / "out"), resolved(content)) == []

    def test_without_the_package_it_is_refused_by_name(self, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "zstandard", None)
        error = refused(written, Unsupported, "zstd")
        assert "zstandard" in everything_said_by(error)
        assert "pip install" in (error.hint or "")

    @pytest.mark.parametrize("transforms", [["stream.rot13"], ["stream.zstd/2"], ["stream.zstd/1", "stream.zstd/1"], ["\x1b[2J"]])
    def test_another_transform_is_refused_by_name(self, written: Path, transforms: list[str]) -> None:
        error = refused(patch(written, lambda metadata: relocate(metadata, "norm.weight", transform_descriptors=transforms)), Unsupported)
        assert ", ".join(transforms) in error.message
        assert error.tensor == "norm.weight"

    @pytest.mark.parametrize("transforms", ["stream.zstd/1", [1], {"stream.zstd/1": 1}])
    def test_transforms_that_make_no_sense_are_refused(self, written: Path, transforms: object) -> None:
        error = refused(patch(written, lambda metadata: relocate(metadata, "norm.weight", transform_descriptors=transforms)), CorruptFile)
        assert error.tensor == "norm.weight"

    def test_every_damaged_byte_of_the_stream_is_refused_or_harmless(self, written: Path, tmp_path: Path) -> None:
        """zstd has no checksum here, but the zip inside has one, and its structure."""
        content = (written / ITEM).read_bytes()
        for position in range(0, len(content), 7):
            (written / ITEM).write_bytes(content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
            try:
                component = describe(written)
            except CorruptFile as error:
                assert error.path == str(written / ITEM)  # noqa: PT017
            else:
                assert {name: tensor.shape for name, tensor in component.tensors.items()} == {n: tuple(t.shape) for n, t in state().items()}

    def test_an_item_that_ends_early_is_refused(self, written: Path) -> None:
        metadata = pickle.loads((written / ".metadata").read_bytes())
        length = next(info.length for index, info in metadata.storage_data.items() if index.fqn == "norm.weight")
        for lost in (16, length // 2, length - 5):
            refused(patch(written, lambda m, n=length - lost: relocate(m, "norm.weight", length=n)), CorruptFile)


# -- several metadata files ------------------------------------------------------------------------------------------


class TestSavesWithoutCollectives:
    """``use_collectives=False``: every rank writes the metadata of its own chunks, but the sizes of whole tensors."""

    @pytest.fixture
    def folder(self, copy: Copy) -> Path:
        return copy("layouts", "dcp-options", "no_collectives")

    @pytest.mark.parametrize("rank", range(4))
    def test_a_missing_metadata_file_leaves_holes(self, folder: Path, rank: int) -> None:
        (folder / f"__{rank}.metadata").unlink()
        refused(folder, IncompleteError)

    def test_ranks_that_disagree_about_a_shape_are_refused(self, folder: Path) -> None:
        def grow(metadata: Metadata) -> None:
            entry = metadata.state_dict_metadata["model.embed_tokens.weight"]
            entry.size = torch.Size((entry.size[0] + 1, entry.size[1]))

        error = refused(patch(folder, grow, "__2.metadata"), Inconsistent)
        assert (error.tensor, error.path) == ("model.embed_tokens.weight", str(folder / "__2.metadata"))

    def test_more_than_nine_ranks_are_in_the_order_of_numbers(self, tmp_path: Path) -> None:
        folder = self.replicas(tmp_path, *(state() for _ in range(11)))
        assert [path.name for path in metadata_files([folder], Files())] == [f"__{rank}.metadata" for rank in range(11)]
        ckpt_cli.merge(folder, tmp_path / "out")
        assert differences(load(tmp_path / "out"), state()) == []

    def test_replicas_that_differ_are_refused_unless_they_are_allowed_to(self, tmp_path: Path) -> None:
        """Nothing was compared at save, and the metadata do not say which rank is right."""
        other = state()
        other["norm.weight"][2] = 9
        folder = self.replicas(tmp_path, state(), other)
        error = refused(folder, Inconsistent, "ranks 0 and 1 hold different values")
        assert error.tensor == "norm.weight"
        ckpt_cli.merge(folder, tmp_path / "out", allow_unequal_replicas=True)
        assert differences(load(tmp_path / "out"), state()) == []

    def replicas(self, tmp_path: Path, *states: Tensors) -> Path:
        """What ranks with these plain tensors leave."""
        folder = tmp_path / "dcp"
        folder.mkdir()
        for rank, content in enumerate(states):
            own = save(tmp_path / f"rank{rank}", content)
            for name in content:
                patch(own, lambda metadata, name=name, rank=rank: relocate(metadata, name, relative_path=f"__{rank}_0.distcp"))
            (own / ".metadata").rename(folder / f"__{rank}.metadata")
            (own / ITEM).rename(folder / f"__{rank}_0.distcp")
            own.rmdir()
        return folder


# -- groups ----------------------------------------------------------------------------------------------------------


def components(path: Path) -> list[str]:
    return [component.name for component in ckpt_cli.detect(path).checkpoint.components]


class TestGroups:
    def test_every_group_with_tensors_is_a_component(self, layouts: Path, tmp_path: Path) -> None:
        folder = layouts / "dcp-odd-tensors" / "dcp"
        assert components(folder) == ["model", "extra"]
        ckpt_cli.merge(folder, tmp_path / "out", type="extra")
        assert {name: tensor.shape for name, tensor in load(tmp_path / "out").items()} == {"history.1.loss": (), "history.2.0": (2,)}

    def test_all_of_them_can_be_merged_at_once(self, tmp_path: Path) -> None:
        groups = {"model": state(), "ema": {name: tensor + 1 for name, tensor in state().items()}}
        save(tmp_path / "dcp", groups)
        ckpt_cli.merge(tmp_path / "dcp", tmp_path / "out", type="all")
        for name, expected in groups.items():
            assert differences(load(tmp_path / "out" / name), expected) == []

    @pytest.mark.parametrize(
        "path",
        [
            "torchtitan/run/checkpoint",
            "lightning/fabric/step-5.ckpt",
            "lightning/trainer/epoch=0-step=5.ckpt",
            "composer/run",
            "olmo-core/run",
        ],
    )
    def test_an_optimizer_beside_the_model_is_no_component(self, layouts: Path, tmp_path: Path, path: str) -> None:
        assert components(layouts / path) == ["model"]
        for kind in ("optimizer", "optim", "state"):
            with pytest.raises(NotFound):
                ckpt_cli.merge(layouts / path, tmp_path / "out", type=kind)

    @pytest.mark.parametrize(
        "group",
        [
            "optimizer",
            "optimizers",
            "optim",
            "optim_0",
            "optimizer_states",
            "lr_scheduler",
            "dataloader",
            "rng",
            "rng_state",
            "train_state",
        ],
    )
    def test_a_group_of_other_state_is_no_component(self, tmp_path: Path, group: str) -> None:
        save(tmp_path / "dcp", {"model": state(), group: {"x": torch.ones(2)}})
        assert components(tmp_path / "dcp") == ["model"]

    def test_exactly_one_level_goes_away(self, tmp_path: Path) -> None:
        """With accelerate, model.layers.0 of Hugging Face is stored as model.model.layers.0."""
        save(tmp_path / "dcp", {"model": {"model.layers.0.weight": torch.ones(2), "model.model.weight": torch.ones(3)}})
        ckpt_cli.merge(tmp_path / "dcp", tmp_path / "out")
        assert set(load(tmp_path / "out")) == {"model.layers.0.weight", "model.model.weight"}

    def test_a_key_with_dots_is_told_from_nested_keys(self, tmp_path: Path) -> None:
        """The flat key is model.weight both times; only the planner's paths tell a group from a name."""
        save(tmp_path / "flat", {"model.weight": torch.ones(2)})
        ckpt_cli.merge(tmp_path / "flat", tmp_path / "out1")
        assert set(load(tmp_path / "out1")) == {"model.weight"}
        save(tmp_path / "nested", {"model": {"weight": torch.ones(2)}})
        ckpt_cli.merge(tmp_path / "nested", tmp_path / "out2")
        assert set(load(tmp_path / "out2")) == {"weight"}

    def test_a_wrapper_goes_away_only_where_every_name_has_it(self, tmp_path: Path) -> None:
        """llm-foundry's wrapper is around the whole model; a head beside it would mean that there is none."""
        save(tmp_path / "all", {"state": {"model": {"model.a": torch.ones(2), "model.b": torch.ones(2)}}})
        ckpt_cli.merge(tmp_path / "all", tmp_path / "out1")
        assert set(load(tmp_path / "out1")) == {"a", "b"}
        save(tmp_path / "some", {"state": {"model": {"model.a": torch.ones(2), "lm_head": torch.ones(2)}}})
        ckpt_cli.merge(tmp_path / "some", tmp_path / "out2")
        assert set(load(tmp_path / "out2")) == {"model.a", "lm_head"}

    def test_two_entries_of_one_name_are_refused(self, tmp_path: Path) -> None:
        folder = save(tmp_path / "dcp", {"model": {"a": torch.ones(2), "b": torch.zeros(2)}})

        def collide(metadata: Metadata) -> None:
            metadata.planner_data["model.b"] = ("model", "a")

        assert refused(patch(folder, collide), Inconsistent).tensor == "model.b"

    @pytest.mark.parametrize("where", ["model", "elsewhere"])
    def test_a_model_is_never_hidden_by_another(self, tmp_path: Path, where: str) -> None:
        """Two state dicts side by side are two components, whatever they are called."""
        save(tmp_path / "dcp", {"state_dict": state(), where: {"other": torch.ones(2)}})
        names = components(tmp_path / "dcp")
        assert len(names) == 2
        found = []
        for number, name in enumerate(names):
            ckpt_cli.merge(tmp_path / "dcp", tmp_path / f"out{number}", type=name)
            found.append(set(load(tmp_path / f"out{number}")))
        assert sorted(map(sorted, found)) == [sorted(state()), ["other"]]

    @pytest.mark.parametrize("name", ["../../outside", "..", "/outside", "a/b", "a\\b", "\0", ".", "x" * 300, "\x1b[2J"], ids=ascii)
    @pytest.mark.parametrize("type", ["all", "group"])
    def test_a_group_never_names_a_place_outside_of_the_output(self, tmp_path: Path, name: str, type: str) -> None:
        """The name of a group comes from the file, and the name of a folder comes from the group."""
        inner = tmp_path / "deep" / "deeper"
        folder = save(inner / "dcp", {"model": state(), "extra": {"w": torch.ones(2)}})
        name = name.replace("/outside", f"{tmp_path}/outside") if name.startswith("/") else name
        patch(folder, lambda metadata: metadata.planner_data.update({"extra.w": (name, "w")}))
        output = None if type == "group" else inner / "out"
        before = sorted(path for path in tmp_path.rglob("*") if path.is_relative_to(inner / "dcp"))
        with contextlib.suppress(CkptError):
            ckpt_cli.merge(folder, output, type="all" if type == "all" else name)
        allowed = (folder, output) if output else (folder, *inner.glob("dcp_merged*"))
        written = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert [path for path in written if not any(path.is_relative_to(place) for place in allowed)] == []
        assert sorted(path for path in tmp_path.rglob("*") if path.is_relative_to(inner / "dcp")) == before

    def test_names_that_cannot_be_written_are_refused(self, tmp_path: Path) -> None:
        for number, name in enumerate(["__metadata__", "\ud800"]):
            folder = save(tmp_path / str(number) / "dcp", {"model": {"a": torch.ones(2)}})
            refused(patch(folder, lambda metadata, name=name: metadata.planner_data.update({"model.a": ("model", name)})), CorruptFile)


def test_the_ranks_of_files_tell_the_world_size(layouts: Path) -> None:
    (component,) = ckpt_cli.inspect(layouts / "mesh-line" / "line" / "dcp").checkpoint.components
    assert component.world_size == 4


def test_layouts_are_written_by_their_cuts(sharded: Path) -> None:
    tensors = describe(sharded).tensors
    assert tensors[ROWS].layout == "dim 0 x4"
    assert {tensor.layout for tensor in tensors.values()} == {"dim 0 x4", "dim 1 x4", "dim 0 x3", "dim 0 x2", ""}


def test_a_patched_folder_is_no_other_than_torch_reads(sharded: Path, tmp_path: Path) -> None:
    """What the tests above stand on: rewriting the pickle changes nothing by itself."""
    before = copying.deepcopy(pickle.loads((sharded / ".metadata").read_bytes()))
    patch(sharded, lambda metadata: None)
    assert pickle.loads((sharded / ".metadata").read_bytes()) == before
    assert all(isinstance(info, _StorageInfo) for info in before.storage_data.values())
    assert len(list(itertools.chain.from_iterable(e.chunks for e in before.state_dict_metadata.values()))) == len(before.storage_data)


class TestGroupsBesideTheModel:
    """are named, wherever the model lies: a warning where they could be the model, else a note."""

    @pytest.mark.parametrize(
        ("content", "code", "named"),
        [
            ({"model": {"model": "W"}, "ema": {"model": "W"}}, "other-components", "ema"),
            ({"app": {"model": "W", "model_ema": "W"}}, "other-components", "model_ema"),
            ({"model": "W", "critic": {"head.weight": (2, 2)}}, "other-components", "critic"),
            ({"app": {"model": "W"}, "old": {"app": {"model": "W"}}}, "other-groups", "old"),
            ({"state": {"model": "W"}, "model": "W"}, "other-groups", "model_2"),
            ({"model": "W", "projector": {"head.weight": (2, 2)}}, "other-groups", "projector"),
            ({"model": "W", "model_part1": {"layers.1.weight": (2, 2)}}, "other-groups", "model_part1"),
            ({"model": "W", "my model": "W"}, "other-groups", "other"),
            ({"actor": {"model": "W"}, "critic": {"model": "W"}}, "other-groups", "critic"),
        ],
        ids=str,
    )
    def test_are_told(self, tmp_path: Path, content: dict[str, Any], code: str, named: str) -> None:
        def filled(node: Any) -> Any:
            if isinstance(node, dict):
                return {key: filled(value) for key, value in node.items()}
            return {"layers.0.weight": torch.ones(2, 3), "norm.weight": torch.ones(3)} if node == "W" else torch.ones(*node)

        folder = save(tmp_path / "step", filled(content))
        told = [note for note in describe(folder).notes if note.code in ("other-groups", "other-components")]
        assert [note.code for note in told] == [code]
        assert f"{named} (--type {named}" in told[0].text
        assert ckpt_cli.merge(folder, tmp_path / "out", type=named).outputs[0].component == named

    @pytest.mark.parametrize("above", [(), ("app",)], ids=["top", "nested"])
    def test_are_joined_where_they_are_parts_of_one_model(self, tmp_path: Path, above: tuple[str, ...]) -> None:
        parts = {f"model_part{number}": {f"layers.{number}.weight": torch.full((2, 3), float(number))} for number in (0, 1, 2)}
        content: Any = parts
        for key in above:
            content = {key: content}
        component = describe(save(tmp_path / "step", content))
        assert sorted(component.tensors) == ["layers.0.weight", "layers.1.weight", "layers.2.weight"]
        assert component.notes == ()

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ({"model_part0": {"layers.0.weight": 1.0}, "model_part2": {"layers.2.weight": 1.0}}, "part 1 is not"),
            ({"model_part1": {"layers.0.weight": 1.0}}, "part 0 is not"),
            ({"model_part0": {"layers.0.weight": 1.0}, "model_part1": {"layers.0.weight": 2.0}}, "two of them hold this tensor"),
        ],
        ids=["between", "first", "counted anew"],
    )
    def test_are_refused_where_they_are_not_all_parts(self, tmp_path: Path, content: dict[str, dict[str, float]], said: str) -> None:
        held = {key: {name: torch.full((2, 3), value) for name, value in part.items()} for key, part in content.items()}
        with pytest.raises(PartOfSet, match=said):
            ckpt_cli.merge(save(tmp_path / "step", held), tmp_path / "out")

    @pytest.mark.parametrize(
        ("first", "second"), [("app", "app2"), ("app2", "app3"), ("spare_part", "spare_part2"), ("counterpart1", "counterpart2")]
    )
    def test_another_model_with_a_number_is_none(self, tmp_path: Path, first: str, second: str) -> None:
        held = {first: {"layers.0.weight": torch.ones(2, 3)}, second: {"layers.1.weight": torch.zeros(2, 3)}}
        found = ckpt_cli.merge(save(tmp_path / "step", held), tmp_path / "out", type=second)
        assert [*load(tmp_path / "out")] == ["layers.1.weight"], found

    def test_are_no_counters_and_no_optimizer(self, tmp_path: Path) -> None:
        model = {"layers.0.weight": torch.ones(2, 3)}
        state = {"model": model, "train": {"step": torch.tensor(3)}, "optim": {"state": {"layers.0.weight": torch.ones(2, 3)}}}
        assert describe(save(tmp_path / "step", state)).notes == ()


@pytest.mark.parametrize("module", ["loops", "callbacks", "extra_state", "train_state", "trainer_state"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_a_module_that_is_called_like_state_of_a_trainer_is_whole(tmp_path: Path, module: str, nested: bool) -> None:
    """Vectors below such a name belong to its matrices; without a matrix they are counters."""
    weights = {f"{module}.{i}.attn.weight": torch.full((4, 4), float(i)) for i in range(2)}
    weights |= {f"{module}.{i}.norm.weight": torch.full((4,), float(i)) for i in range(2)}
    weights["head.weight"] = torch.ones(8, 4)
    save(tmp_path / "run", {"model": weights} if nested else weights)
    ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == weights.keys()
    save(tmp_path / "other", {"head.weight": torch.ones(8, 4), f"{module}.timer": torch.ones(3)})
    ckpt_cli.merge(tmp_path / "other", tmp_path / "second")
    assert load_file(tmp_path / "second" / "model.safetensors").keys() == {"head.weight"}
