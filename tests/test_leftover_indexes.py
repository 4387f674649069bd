"""An index that came with the other .json files of a model into a folder that has other weights: none of its files is there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import MissingShard
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.safetensors.leftovers import listing_nothing
from tests import tiny
from tests.conftest import Copy

INDEX, TORCH_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"


def index_in(folder: Path, name: str = INDEX, count: int = 3) -> Path:
    stem, suffix = ("model", "safetensors") if name == INDEX else ("pytorch_model", "bin")
    names = list(tiny.shapes())
    owners = {each: f"{stem}-{number % count + 1:05d}-of-{count:05d}.{suffix}" for number, each in enumerate(names)}
    path = folder / name
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": owners}))
    return path


def step_of_torch(folder: Path) -> None:
    tiny.folder(folder, None)
    torch.save(tiny.weights(1), folder / "model.pt")


def step_whole(folder: Path) -> None:
    tiny.folder(folder, tiny.weights(1))


def step_of_bin(folder: Path) -> None:
    tiny.folder(folder, None)
    torch.save(tiny.weights(1), folder / "pytorch_model.bin")


STEPS: list[Callable[[Path], None]] = [step_of_torch, step_whole, step_of_bin]


@pytest.mark.parametrize("name", [INDEX, TORCH_INDEX])
@pytest.mark.parametrize("step", STEPS)
def test_it_is_told_and_not_used(tmp_path: Path, step: Callable[[Path], None], name: str) -> None:
    folder = tmp_path / "step_5"
    step(folder)
    index_in(folder, name)
    result = ckpt_cli.merge(folder, tmp_path / "out")
    told = [note for note in result.checkpoint.notes if note.code == "leftover-index"]
    assert [note.level for note in told] == ["warning"]
    assert "none of the 3 files that it lists is here" in told[0].text
    assert not [note for note in result.checkpoint.notes if note.code in ("other-model", "passed-over")]
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(held[key], value) for key, value in tiny.weights(1).items())
    assert not (tmp_path / "out" / name).exists()
    checked = ckpt_cli.verify(folder)
    assert not [item for item in checked.findings if item.severity == "error"]


def test_beside_an_adapter(tmp_path: Path) -> None:
    base = tiny.folder(tmp_path / "base", tiny.weights())
    tiny.adapter(tmp_path / "step", tiny.factors(), base)
    index_in(tmp_path / "step")
    told = ckpt_cli.merge(tmp_path / "step", tmp_path / "out", base=base).checkpoint.notes
    assert "leftover-index" in {note.code for note in told}


@pytest.mark.parametrize("where", ["huggingface", "actor", "step", "run"])
def test_in_any_folder_of_a_run(tmp_path: Path, where: str) -> None:
    actor = tiny.verl(tmp_path / "run", tiny.weights(1), step=7)
    folder = {"huggingface": actor / "huggingface", "actor": actor, "step": actor.parent, "run": tmp_path / "run"}[where]
    for file in (actor / "huggingface").iterdir():
        if folder != actor / "huggingface":
            shutil.copy(file, folder)
    index_in(folder)
    result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
    assert result.checkpoint.step == 7
    codes = {note.code for note in result.checkpoint.notes if note.level == "warning"}
    assert codes <= {"leftover-index", "stray-weights"}
    assert bool(codes) is (where != "huggingface")


def test_beside_a_save_in_a_folder_of_its_own(copy: Copy, tmp_path: Path) -> None:
    run = copy("layouts", "torchtitan", "run") / "checkpoint"
    index_in(next(run.glob("step-*")))
    assert "leftover-index" in {note.code for note in ckpt_cli.detect(run).checkpoint.notes}


def test_a_base_of_json_files_is_one_without_weights(tmp_path: Path) -> None:
    step_of_torch(tmp_path / "step")
    index_in(tiny.folder(tmp_path / "base", None))
    ckpt_cli.merge(tmp_path / "step" / "model.pt", tmp_path / "out", base=tmp_path / "base")
    with pytest.raises(MissingShard):
        ckpt_cli.merge(tmp_path / "step" / "model.pt", tmp_path / "other", base=tmp_path / "base", match_base=True)


def test_alone_it_says_what_is_missing(tmp_path: Path) -> None:
    for name in (INDEX, TORCH_INDEX):
        folder = tiny.folder(tmp_path / name, None)
        index_in(folder, name)
        with pytest.raises(MissingShard, match="3 of 3 weight files are missing"):
            ckpt_cli.merge(folder, tmp_path / "out")
        save_file({"w": torch.ones(2)}, folder / "ema.safetensors")
        with pytest.raises(MissingShard):
            ckpt_cli.merge(folder, tmp_path / "out")
        (folder / "ema.safetensors").unlink()


def test_beside_a_head_it_says_what_is_missing(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "step", None)
    index_in(folder)
    save_file({"v_head.summary.weight": torch.ones(1, 16)}, folder / "value_head.safetensors")
    with pytest.raises(MissingShard):
        ckpt_cli.merge(folder, tmp_path / "out")


def test_with_some_of_its_files_it_is_none(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "step", tiny.weights(1))
    index = index_in(folder)
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00003.safetensors")
    assert listing_nothing(index, Folders()) is None
    with pytest.raises(MissingShard, match="2 of 3"):
        ckpt_cli.merge(folder, tmp_path / "out")


def test_over_the_index_of_other_parts_the_hint_asks_for_theirs(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "step", None)
    index_in(folder, count=3)
    save_file(tiny.weights(1), folder / "model-00001-of-00002.safetensors")
    with pytest.raises(MissingShard) as caught:
        ckpt_cli.merge(folder, tmp_path / "out")
    assert "copy the one that was saved with it" in str(caught.value.hint)
