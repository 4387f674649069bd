"""One look at a Hugging Face folder: describing raises the first problem that keeps it from being read, `verify` lists every one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, Inconsistent, PartOfSet
from ckpt_cli.files.source import Files
from ckpt_cli.formats.safetensors.scan import scan, scan_set
from tests.conftest import Copy

INDEX = "model.safetensors.index.json"
FIRST, SECOND, THIRD = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


@pytest.fixture
def folder(copy: Copy) -> Path:
    return copy("layouts", "plain-files", "hub")


def lose(folder: Path) -> None:
    (folder / SECOND).unlink()


def cut(folder: Path) -> None:
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:40])


def leave_behind(folder: Path) -> None:
    (folder / "model-00004-of-00004.safetensors").write_bytes((folder / THIRD).read_bytes())


def double(folder: Path) -> None:
    save_file({**load_file(folder / THIRD), **load_file(folder / FIRST)}, folder / THIRD)


def empty_the_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {}}')


def leave_a_part_out(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != SECOND}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / SECOND).unlink()


def count_wrong(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, "metadata": {"total_size": 12345}}))


def cut_into_shards(folder: Path) -> None:
    """As torch's writer marks a file whose tensors begin elsewhere, under the name of a part of a whole model."""
    tensors = load_file(folder / SECOND)
    info = {name: {"saved_offsets": [2, *[0] * (value.ndim - 1)]} for name, value in tensors.items()}
    save_file(tensors, folder / SECOND, metadata={"DCP_SHARDING_INFO": json.dumps(info)})


Damage = Callable[[Path], None]
KINDS: dict[Damage, tuple[str, str | None]] = {
    lose: ("missing-file", "1 of 3 weight files are missing"),
    leave_behind: ("stale-file", "the index does not mention model-00004-of-00004"),
    cut: ("damaged-file", ""),
    double: ("duplicate-tensor", "the file holds a tensor that the index does not assign to it"),
    empty_the_index: ("damaged-index", "the index has no weight_map"),
    leave_a_part_out: ("part-of-set", "the index lists 2 files but not model-00002-of-00003.safetensors, which their names imply"),
    cut_into_shards: ("part-of-set", "this is one shard of a DCP save in safetensors"),
    count_wrong: ("index-total", None),
}
"""What is done to a folder: the code that `verify` finds, and what describing says; None for what can be read all the same."""


@pytest.mark.parametrize("damage", KINDS)
def test_what_verify_finds_keeps_the_model_from_being_read(damage: Damage, folder: Path) -> None:
    damage(folder)
    code, told = KINDS[damage]
    assert code in {item.code for item in ckpt_cli.verify(folder).findings}
    if told is None:
        ckpt_cli.inspect(folder)
    else:
        with pytest.raises(CkptError) as caught:
            ckpt_cli.inspect(folder)
        assert told in caught.value.message


def test_a_whole_folder_has_no_problem_and_one_set(folder: Path) -> None:
    with Files() as files:
        whole, alone = scan(folder, files), scan_set(folder / INDEX, files)
    assert (whole.problems, alone.problems) == ((), ())
    ((one,), (other,)) = whole.sets, alone.sets
    assert (one.name, one.index, one.files) == (other.name, other.index, other.files) == ("model", folder / INDEX, one.files)
    assert one.tensors == other.tensors
    assert one.readable
    assert list(other.tensors) == list(json.loads((folder / INDEX).read_text())["weight_map"])


def test_all_problems_are_listed_the_first_obstacle_is_raised(folder: Path) -> None:
    for damage in (count_wrong, cut, leave_behind, lose):
        damage(folder)
    codes = [item.code for item in ckpt_cli.verify(folder).findings]
    assert {"missing-file", "stale-file", "damaged-file"} <= set(codes)
    with pytest.raises(CkptError, match="1 of 3 weight files are missing"):
        ckpt_cli.inspect(folder)


def test_a_tensor_that_two_files_hold_is_told_of_the_file_that_should_not(folder: Path) -> None:
    double(folder)
    with safe_open(folder / FIRST, "numpy") as first:
        held = set(first.keys())
    with pytest.raises(Inconsistent) as caught:
        ckpt_cli.inspect(folder)
    assert caught.value.path == str(folder / THIRD)
    assert caught.value.tensor in held


def test_shards_under_the_names_of_parts_are_not_merged(folder: Path, tmp_path: Path) -> None:
    cut_into_shards(folder)
    with pytest.raises(PartOfSet) as caught:
        ckpt_cli.merge(folder, tmp_path / "out")
    assert caught.value.path == str(folder / SECOND)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("total", [10**400, 1e400, True, "many", -1.5])
def test_any_total_in_an_index_is_read(total: object, folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, "metadata": {"total_size": total}}))
    ckpt_cli.inspect(folder)
    assert {item.code for item in ckpt_cli.verify(folder).findings if item.severity == "error"} == set()
