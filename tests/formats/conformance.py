"""What every reader of a format promises, as tests. A new format subclasses `FormatConformance` in its own test module.

    class TestMyFormat(FormatConformance):
        reader = MyFormat()
        component = "model"

        def example(self, data: Path) -> Example:
            return Example(data / "layouts" / "my-format", data / "layouts" / "my-format-expected.safetensors")

The example must be a checkpoint of which no file can be spared (so not one with replicas of everything).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import ckpt_cli
from ckpt_cli.errors import CkptError, CorruptFile, IncompleteError
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats import registry
from ckpt_cli.formats.base import Format, Match, ReadOptions
from ckpt_cli.tensors.component import Component
from ckpt_cli.tensors.tensor import Piece
from tests.tensors import differences, load


@dataclass(frozen=True)
class Example:
    """A component folder that the reader recognises, and the tensors that it holds."""

    folder: Path
    expected: Path


def everything_said_by(error: CkptError) -> str:
    return " ".join(filter(None, (error.message, error.path, error.expected, error.hint)))


class FormatConformance:
    reader: Format
    component = "model"

    def example(self, data: Path) -> Example:
        raise NotImplementedError

    # -- what the tests stand on ---------------------------------------------------------------------------------------

    @pytest.fixture
    def original(self, data: Path) -> Example:
        return self.example(data)

    @pytest.fixture
    def folder(self, original: Example, tmp_path: Path) -> Path:
        """A copy of the example, to be damaged."""
        return Path(shutil.copytree(original.folder, tmp_path / "example"))

    def match(self, folder: Path) -> Match:
        return next(match for match in self.reader.recognise(folder, Folders()) if match.component == self.component)

    def describe(self, folder: Path) -> Component:
        with Files() as files:
            return registry.describe(self.match(folder), files, ReadOptions())

    def files_of(self, folder: Path) -> tuple[Path, ...]:
        return self.describe(folder).files

    # -- recognise -----------------------------------------------------------------------------------------------------

    def test_recognise_names_the_component_its_files_and_the_evidence(self, folder: Path) -> None:
        match = self.match(folder)
        assert match.format == self.reader.name
        assert match.root == folder
        assert match.evidence
        assert match.trouble is None
        assert match.missing_ranks == ()
        assert all(file.is_file() and file.parent == folder for file in match.files)

    def test_recognise_looks_at_names_only(self, folder: Path) -> None:
        before = self.reader.recognise(folder, Folders())
        for file in folder.rglob("*"):
            if file.is_file():
                file.write_bytes(b"")
        assert self.reader.recognise(folder, Folders()) == before

    def test_recognise_takes_a_single_file_for_what_it_belongs_to(self, folder: Path) -> None:
        for file in self.match(folder).files:
            assert [match.component for match in self.reader.recognise(file, Folders())] == [self.component]

    def test_recognise_finds_nothing_in_other_folders(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("model")
        (tmp_path / "optim_world_size_4_rank_0.pt").write_bytes(b"")
        assert self.reader.recognise(tmp_path, Folders()) == []
        assert self.reader.recognise(tmp_path / "notes.txt", Folders()) == []
        assert self.reader.recognise(tmp_path / "nowhere", Folders()) == []

    # -- describe ------------------------------------------------------------------------------------------------------

    def test_the_pieces_hold_every_element_exactly_once(self, folder: Path) -> None:
        for tensor in self.describe(folder).tensors.values():
            times = np.zeros(tensor.shape, dtype=np.int64)
            for piece in tensor.pieces:
                times[_slices(piece)] += 1
            assert (times == 1).all(), tensor.name

    def test_a_copy_has_the_box_of_a_piece_and_comes_from_another_rank(self, folder: Path) -> None:
        for tensor in self.describe(folder).tensors.values():
            ranks = {piece.box: piece.rank for piece in tensor.pieces}
            for copy in tensor.copies:
                assert copy.rank != ranks[copy.box], tensor.name

    def test_an_alias_shares_all_its_bytes_with_a_tensor_that_is_none(self, folder: Path) -> None:
        tensors = self.describe(folder).tensors
        for tensor in tensors.values():
            if tensor.alias_of is not None:
                other = tensors[tensor.alias_of]
                assert other.alias_of is None
                assert [piece.same_bytes_as for piece in tensor.pieces] == [piece.same_bytes_as for piece in other.pieces]

    def test_every_piece_lies_inside_its_file(self, folder: Path) -> None:
        component = self.describe(folder)
        for tensor in component.tensors.values():
            for piece in (*tensor.pieces, *tensor.copies):
                last = sum((n - 1) * stride for n, stride in zip(piece.box.extent, piece.strides, strict=True))
                assert piece.offset >= 0
                assert piece.offset + (last + 1) * tensor.dtype.itemsize <= piece.source.size

    def test_names_and_shapes_are_those_of_the_training(self, original: Example, folder: Path) -> None:
        tensors = self.describe(folder).tensors
        assert {name: tensor.shape for name, tensor in tensors.items()} == {
            name: tuple(tensor.shape) for name, tensor in load(original.expected).items()
        }

    # -- damage --------------------------------------------------------------------------------------------------------

    def test_a_truncated_file_is_refused_by_name(self, folder: Path) -> None:
        match = self.match(folder)
        for file in self.files_of(folder):
            content = file.read_bytes()
            for length in (0, 1, 7, len(content) // 2, len(content) - 1):
                os.truncate(file, length)
                with Files() as files, pytest.raises(CorruptFile) as caught:
                    self.reader.describe(match, files, ReadOptions())
                assert caught.value.path == str(file), length
                assert caught.value.exit_code == 3
                file.write_bytes(content)

    def test_a_missing_file_is_refused_by_name(self, folder: Path) -> None:
        for file in self.files_of(folder):
            content = file.read_bytes()
            file.unlink()
            with pytest.raises(IncompleteError) as caught:
                self.describe(folder)
            assert caught.value.exit_code == 4
            assert file.name in everything_said_by(caught.value)
            file.write_bytes(content)

    # -- merge ---------------------------------------------------------------------------------------------------------

    def test_merging_gives_the_tensors_of_the_training(self, original: Example, tmp_path: Path) -> None:
        ckpt_cli.merge(original.folder, tmp_path / "out", type=self.component)
        assert differences(load(tmp_path / "out"), load(original.expected)) == []

    def test_merging_leaves_the_sources_as_they_are(self, folder: Path, tmp_path: Path) -> None:
        before = _digests(folder)
        ckpt_cli.merge(folder, tmp_path / "out", type=self.component)
        assert _digests(folder) == before

    def test_a_damaged_checkpoint_leaves_no_output(self, folder: Path, tmp_path: Path) -> None:
        file = self.files_of(folder)[-1]
        os.truncate(file, file.stat().st_size - 1)
        with pytest.raises(CkptError):
            ckpt_cli.merge(folder, tmp_path / "out", type=self.component)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["example"]


def _slices(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(piece.box.offset, piece.box.extent, strict=True))


def _digests(folder: Path) -> dict[str, str]:
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*") if file.is_file()}
