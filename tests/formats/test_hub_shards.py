"""Shards of torch's HuggingFaceStorageWriter: safetensors files that say which part of a tensor they hold, and nothing about the whole."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.boxes import Box
from ckpt_cli.errors import CkptError, CorruptFile, Gap, IncompleteError, Inconsistent, MissingShard, Overlap
from ckpt_cli.formats.safetensors.shards import HubShards
from tests.conftest import Copy
from tests.formats.conformance import Example, FormatConformance, everything_said_by
from tests.formats.test_dcp import cut_tensors
from tests.tensors import Tensors, differences, load
from tests.test_kernels import slices

INFO = "DCP_SHARDING_INFO"


def shard_name(rank: int, part: int = 1, parts: int = 1) -> str:
    return f"shard-{rank:05d}-model-{part:05d}-of-{parts:05d}.safetensors"


def write(path: Path, tensors: Tensors, offsets: dict[str, Any] | str | None) -> None:
    """A shard as torch writes it; ``offsets`` may also be the text itself, or None for a file without any."""
    text = json.dumps({name: {"saved_offsets": corner} for name, corner in offsets.items()}) if isinstance(offsets, dict) else offsets
    metadata = {"format": "pt", "DCP_VERSION": "1.0"} | ({} if text is None else {INFO: text})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)


def refused(folder: Path, error: type[CkptError], match: str | None = None) -> CkptError:
    """Merging is refused for this reason and writes nothing."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(error, match=match) as caught:
        ckpt_cli.merge(folder, folder.parent / "out")
    assert sorted(folder.parent.iterdir()) == before
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shards").mkdir()
    return tmp_path / "shards"


@pytest.fixture
def real(copy: Copy) -> Path:
    """Four ranks, two parts each."""
    return copy("layouts", "dcp-options", "hub_shards")


class TestFourRanks(FormatConformance):
    reader = HubShards()

    def example(self, data: Path) -> Example:
        layout = data / "layouts" / "dcp-options"
        return Example(layout / "hub_shards", layout / "expected-hub_shards.safetensors")


class TestWrittenByTorch:
    @pytest.mark.parametrize("mapping", [None, {"a": 1, "b": 2, "c": 2}])
    def test_what_one_process_saves_is_merged(self, tmp_path: Path, mapping: dict[str, int] | None) -> None:
        content = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(7)}
        writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "shards"), fqn_to_index_mapping=mapping, save_distributed=True)
        dcp.save(content, storage_writer=writer, no_dist=True)
        ckpt_cli.merge(tmp_path / "shards", tmp_path / "out")
        assert differences(load(tmp_path / "out"), content) == []


@settings(deadline=None, derandomize=True, max_examples=30)
@given(cut_tensors(), st.integers(1, 3))
def test_parts_of_any_tiling_are_put_together(cut: tuple[torch.Tensor, list[Box]], replicas: int) -> None:
    tensor, boxes = cut
    with tempfile.TemporaryDirectory() as name:
        shards = Path(name, "shards")
        shards.mkdir()
        for i, box in enumerate(boxes * replicas):
            write(shards / shard_name(i + 1), {"whole": tensor[slices(box)]}, {"whole": list(box.offset)})
        ckpt_cli.merge(shards, Path(name, "out"))
        assert differences(load(Path(name, "out")), {"whole": tensor}) == []


class TestMissingShards:
    @pytest.mark.parametrize("rank", [1, 2, 3])
    def test_a_gap_in_the_numbering_is_refused(self, real: Path, rank: int) -> None:
        for part in (1, 2):
            (real / shard_name(rank, part, 2)).unlink()
        error = refused(real, MissingShard, str(rank))
        assert error.exit_code == 4

    @pytest.mark.parametrize("rank", [1, 2, 3, 4])
    @pytest.mark.parametrize("part", [1, 2])
    def test_one_lost_part_is_refused(self, real: Path, rank: int, part: int) -> None:
        """The names say that there are two parts, so the last rank's is missed as well; its rows would be lost without a sign."""
        (real / shard_name(rank, part, 2)).unlink()
        assert shard_name(rank, part, 2) in everything_said_by(refused(real, IncompleteError))

    @pytest.mark.parametrize("part", [1, 2])
    def test_a_part_that_all_ranks_lack_is_refused(self, real: Path, part: int) -> None:
        """Whole tensors would be lost."""
        for rank in range(1, 5):
            (real / shard_name(rank, part, 2)).unlink()
        refused(real, IncompleteError)

    def test_a_lost_last_rank_cannot_be_seen_and_that_is_said(self, real: Path, tmp_path: Path) -> None:
        result = ckpt_cli.merge(real, tmp_path / "out")
        assert "unproven-end" in {note.code for note in result.checkpoint.notes}

    def test_a_hole_inside_is_refused(self, folder: Path) -> None:
        write(folder / shard_name(1), {"a": torch.ones(2, 3)}, {"a": [0, 0]})
        write(folder / shard_name(2), {"a": torch.ones(2, 3)}, {"a": [3, 0]})
        assert refused(folder, Gap).tensor == "a"

    def test_shards_of_saves_with_other_parts_are_not_mixed(self, real: Path) -> None:
        """A folder that was used twice: which of the two saves is meant cannot be told."""
        for rank in range(1, 5):
            (real / shard_name(rank, 1, 1)).write_bytes((real / shard_name(rank, 1, 2)).read_bytes())
        refused(real, IncompleteError)


class TestWhatTheFilesSay:
    def test_shards_that_overlap_are_refused(self, folder: Path) -> None:
        write(folder / shard_name(1), {"a": torch.ones(2, 3)}, {"a": [0, 0]})
        write(folder / shard_name(2), {"a": torch.ones(2, 3)}, {"a": [1, 0]})
        assert refused(folder, Overlap).tensor == "a"

    def test_replicas_that_differ_are_refused(self, folder: Path) -> None:
        write(folder / shard_name(1), {"a": torch.ones(2, 3)}, {"a": [0, 0]})
        write(folder / shard_name(2), {"a": torch.zeros(2, 3)}, {"a": [0, 0]})
        assert refused(folder, Inconsistent, "different values").tensor == "a"

    @pytest.mark.parametrize("other", [torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(6)])
    def test_shards_of_other_dtype_or_rank_are_refused(self, folder: Path, other: torch.Tensor) -> None:
        write(folder / shard_name(1), {"a": torch.ones(2, 3)}, {"a": [0, 0]})
        write(folder / shard_name(2), {"a": other}, {"a": [2, 0][: other.dim()]})
        assert refused(folder, Inconsistent).tensor == "a"

    def test_a_tensor_that_is_not_listed_begins_at_zero(self, folder: Path, tmp_path: Path) -> None:
        write(folder / shard_name(1), {"a": torch.ones(2, 3), "b": torch.ones(2)}, {"a": [0, 0]})
        ckpt_cli.merge(folder, tmp_path / "out")
        assert differences(load(tmp_path / "out"), {"a": torch.ones(2, 3), "b": torch.ones(2)}) == []

    @pytest.mark.parametrize("corner", [[0], [0, 0, 0], [-1, 0], [0.0, 0], ["0", 0], [True, 0], [1 << 70, 0], {}, "00", 5], ids=repr)
    def test_offsets_that_make_no_sense_are_refused(self, folder: Path, corner: object) -> None:
        write(folder / shard_name(1), {"a": torch.ones(2, 3)}, {"a": corner})
        error = refused(folder, CorruptFile)
        assert (error.tensor, error.path) == ("a", str(folder / shard_name(1)))

    @pytest.mark.parametrize("text", [None, "", "[]", "5", "{", '{"a": 1, "a": 2}', "[" * 100_000], ids=lambda text: repr(text)[:12])
    def test_a_file_without_readable_offsets_is_refused(self, folder: Path, text: str | None) -> None:
        write(folder / shard_name(1), {"a": torch.ones(2, 3)}, text)
        assert refused(folder, CorruptFile).path == str(folder / shard_name(1))

    def test_a_far_away_shard_costs_neither_memory_nor_time(self, folder: Path) -> None:
        write(folder / shard_name(1), {"a": torch.ones(2, 3)}, {"a": [0, 0]})
        write(folder / shard_name(2), {"a": torch.ones(2, 3)}, {"a": [1 << 50, 1 << 50]})
        assert refused(folder, Gap).tensor == "a"


@pytest.mark.parametrize("rank", [1, 4])
def test_a_file_copied_over_another_is_told_where_no_gap_shows(rank: int, folder: Path) -> None:
    """Without the last rows a tensor only looks shorter."""
    for number in range(1, 5):
        write(folder / shard_name(number), {"w": torch.full((2, 3), float(number)), "norm": torch.ones(3)}, {"w": [2 * number - 2, 0]})
    merged = ckpt_cli.merge(folder, folder.parent / "whole")
    assert "equal-files" not in {note.code for note in merged.checkpoint.notes}
    (folder / shard_name(rank)).write_bytes((folder / shard_name(2)).read_bytes())
    if rank == 1:
        refused(folder, Gap)
        return
    (note,) = (note for note in ckpt_cli.merge(folder, folder.parent / "out").checkpoint.notes if note.code == "equal-files")
    assert f"{shard_name(4)} holds the same parts of tensors as {shard_name(2)}" in note.text
