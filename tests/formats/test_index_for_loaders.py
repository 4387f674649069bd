"""What `verify` says of an index is what transformers does with it: it loads, or it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from tests.conftest import Copy

INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
TOTAL = "total_size"
MARK = b"\xef\xbb\xbf"


@pytest.fixture
def folder(copy: Copy) -> Path:
    return copy("layouts", "plain-files", "hub")


def rewritten(path: Path, change: dict[str, Any], *, without: str = "") -> None:
    content = {key: value for key, value in {**json.loads(path.read_text()), **change}.items() if key != without}
    path.write_text(json.dumps(content))


def loads(path: Path) -> bool:
    hub = pytest.importorskip("transformers.utils.hub")
    try:
        hub.get_checkpoint_shard_files(str(path.parent), str(path))
    except (KeyError, TypeError, ValueError):
        return False
    return True


METADATA: list[tuple[Any, str]] = [
    (None, "its metadata is null: transformers and diffusers need a JSON object there"),
    ([], "its metadata is []: "),
    ("x", 'its metadata is "x": '),
    (17, "its metadata is 17: "),
    ({}, ""),
    ({TOTAL: None}, ""),
    ({"other": 1}, ""),
]


@pytest.mark.parametrize(("metadata", "said"), METADATA)
def test_metadata_of_other_types_is_an_error_where_transformers_fails(folder: Path, metadata: Any, said: str) -> None:
    rewritten(folder / INDEX, {"metadata": metadata})
    found = [item for item in ckpt_cli.verify(folder).findings if item.code == "damaged-index"]
    assert loads(folder / INDEX) is not bool(said)
    assert [item.message.startswith(said) for item in found] == ([True] if said else [])
    ckpt_cli.inspect(folder)


def test_no_metadata_is_an_error_and_no_obstacle_to_a_merge(folder: Path, tmp_path: Path) -> None:
    rewritten(folder / INDEX, {}, without="metadata")
    assert not loads(folder / INDEX)
    (found,) = ckpt_cli.verify(folder).of_severity("error")
    assert (found.code, found.file) == ("damaged-index", INDEX)
    assert found.message.startswith("it has no metadata: transformers and diffusers need")
    ckpt_cli.merge(folder, output=tmp_path / "out", max_shard_size="4KB")
    assert (tmp_path / "out" / INDEX).is_file()
    assert loads(tmp_path / "out" / INDEX)
    assert not ckpt_cli.verify(tmp_path / "out").of_severity("error")


def test_a_byte_order_mark_is_an_error(folder: Path) -> None:
    (folder / INDEX).write_bytes(MARK + (folder / INDEX).read_bytes())
    assert not loads(folder / INDEX)
    assert ["byte order mark" in item.message for item in ckpt_cli.verify(folder).of_severity("error")] == [True]


def test_of_files_of_torch_too(copy: Copy) -> None:
    folder = copy("layouts", "plain-files", "hub_bin")
    assert not ckpt_cli.verify(folder).of_severity("error")
    rewritten(folder / TORCH_INDEX, {}, without="metadata")
    assert not loads(folder / TORCH_INDEX)
    (found,) = ckpt_cli.verify(folder).of_severity("error")
    assert (found.code, found.file) == ("damaged-index", TORCH_INDEX)


WRONG: list[tuple[Any, str]] = [
    ("right", 'total_size is "{}", where a number is needed: {} bytes are in the files'),
    ("74000", 'total_size is "74000", where a number is needed: '),
    (True, "total_size is true, "),
    ([1], "total_size is [1], "),
    (12345, "12345 bytes in the index, "),
    (0.5, "0.5 bytes in the index, "),
    (0, "0 bytes in the index, "),
    (float("nan"), "nan bytes in the index, "),
    (-1, "-1 bytes in the index, "),
]


@pytest.mark.parametrize(("total", "said"), WRONG)
def test_a_total_that_is_not_that_of_the_files_is_told(folder: Path, total: Any, said: str) -> None:
    size = json.loads((folder / INDEX).read_text())["metadata"][TOTAL]
    rewritten(folder / INDEX, {"metadata": {TOTAL: str(size) if total == "right" else total}})
    (found,) = [item for item in ckpt_cli.verify(folder).findings if item.code == "index-total"]
    assert found.message.startswith(said.format(size, size))
    assert (found.severity, found.numbers["bytes"]) == ("warning", size)
    assert loads(folder / INDEX)


@pytest.mark.parametrize("kind", [int, float])
def test_a_right_total_is_nothing(folder: Path, kind: type[float]) -> None:
    size = json.loads((folder / INDEX).read_text())["metadata"][TOTAL]
    rewritten(folder / INDEX, {"metadata": {TOTAL: kind(size)}})
    assert "index-total" not in {item.code for item in ckpt_cli.verify(folder).findings}


class TestFilesInFolders:
    """An index may name files in folders below its own: they are read, and nothing else is said of them."""

    @pytest.fixture
    def folder(self, folder: Path) -> Path:
        index = json.loads((folder / INDEX).read_text())
        second = "model-00002-of-00003.safetensors"
        (folder / "sub").mkdir()
        (folder / second).rename(folder / "sub" / second)
        rewritten(folder / INDEX, {"weight_map": {k: f"sub/{v}" if v == second else v for k, v in index["weight_map"].items()}})
        return folder

    def test_are_read(self, folder: Path, tmp_path: Path) -> None:
        notes = ckpt_cli.merge(folder, tmp_path / "out").checkpoint.notes
        assert not [note for note in notes if note.code == "other-folders"]
        assert not [note for note in ckpt_cli.verify(folder).notes if note.code == "other-folders"]

    def test_beside_others_that_are_not(self, folder: Path, tmp_path: Path) -> None:
        (folder / "sub" / "model-00001-of-00003.safetensors").write_bytes((folder / "model-00001-of-00003.safetensors").read_bytes())
        assert "other-folders" in {note.code for note in ckpt_cli.merge(folder, tmp_path / "out").checkpoint.notes}

    def test_in_another_folder_are_told(self, folder: Path, tmp_path: Path) -> None:
        (folder / "copy").mkdir()
        (folder / "copy" / "model.safetensors").write_bytes((folder / "model-00001-of-00003.safetensors").read_bytes())
        assert "other-folders" in {note.code for note in ckpt_cli.verify(folder).notes}
