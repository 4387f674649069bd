"""Model folders of Hugging Face: safetensors, alone or with an index."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.errors import CorruptFile, Inconsistent, MissingShard
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.safetensors.folder import HubFolder
from tests.conftest import Copy
from tests.formats.conformance import Example, FormatConformance
from tests.tensors import differences, load

INDEX = "model.safetensors.index.json"


class TestFolderWithIndex(FormatConformance):
    reader = HubFolder()

    def example(self, data: Path) -> Example:
        return Example(data / "layouts" / "plain-files" / "hub", data / "layouts" / "plain-files" / "expected.safetensors")


def test_one_file_of_any_name_is_a_model(layouts: Path) -> None:
    file = layouts / "plain-files" / "single" / "weights.safetensors"
    (match,) = HubFolder().recognise(file, Folders())
    assert (match.component, match.files) == ("model", (file,))


def test_a_folder_with_model_safetensors_is_a_model(layouts: Path, tmp_path: Path) -> None:
    shutil.copyfile(layouts / "plain-files" / "single" / "weights.safetensors", tmp_path / "model.safetensors")
    (match,) = HubFolder().recognise(tmp_path, Folders())
    assert match.files == (tmp_path / "model.safetensors",)


def test_the_index_file_stands_for_its_folder(layouts: Path, tmp_path: Path) -> None:
    ckpt_cli.merge(layouts / "plain-files" / "hub" / INDEX, tmp_path / "out")
    assert differences(load(tmp_path / "out"), load(layouts / "plain-files" / "expected.safetensors")) == []


def test_parts_without_an_index_prove_nothing(copy: Copy) -> None:
    folder = copy("layouts", "plain-files", "hub")
    (folder / INDEX).unlink()
    with pytest.raises(MissingShard, match="index") as caught:
        ckpt_cli.inspect(folder)
    assert caught.value.path == str(folder / INDEX)


class TestAnIndexThatLies:
    @pytest.fixture
    def folder(self, copy: Copy) -> Path:
        return copy("layouts", "plain-files", "hub")

    @staticmethod
    def edit(folder: Path, **files: str | None) -> None:
        """Assign tensors to files; None removes a tensor from the index."""
        index = json.loads((folder / INDEX).read_text())
        for name, file in files.items():
            index["weight_map"][name] = file
            if file is None:
                del index["weight_map"][name]
        (folder / INDEX).write_text(json.dumps(index))

    def test_a_tensor_that_the_file_lacks_is_named(self, folder: Path) -> None:
        self.edit(folder, **{"model.extra": "model-00001-of-00003.safetensors"})
        with pytest.raises(Inconsistent) as caught:
            ckpt_cli.inspect(folder)
        assert caught.value.tensor == "model.extra"
        assert caught.value.path == str(folder / "model-00001-of-00003.safetensors")

    def test_a_tensor_that_the_index_lacks_is_named(self, folder: Path) -> None:
        self.edit(folder, **{"model.norm.weight": None})
        with pytest.raises(Inconsistent) as caught:
            ckpt_cli.inspect(folder)
        assert caught.value.tensor == "model.norm.weight"

    @pytest.mark.parametrize("outside", ["../weights.safetensors", "/weights.safetensors", "C:weights.safetensors", "model.bin", ""])
    def test_a_file_outside_of_the_folder_is_never_opened(self, folder: Path, layouts: Path, outside: str) -> None:
        shutil.copyfile(layouts / "plain-files" / "single" / "weights.safetensors", folder.parent / "weights.safetensors")
        self.edit(folder, **{"model.norm.weight": outside})
        with pytest.raises(CorruptFile) as caught:
            ckpt_cli.inspect(folder)
        assert caught.value.tensor == "model.norm.weight"
        assert caught.value.path == str(folder / INDEX)
