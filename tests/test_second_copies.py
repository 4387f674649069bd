"""Second downloads and copies beside what was read are told where they are not the same, by whatever name programs give to them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import ckpt_cli
from ckpt_cli.hub.beside.copied import copied_name
from tests.test_asset_names import model, told

DCP = "mesh-grid/tp/dcp"
MARKS = ["{0}.1", "{0}.12", "{0}.~1~", "{0}.new", "Copy of {0}", "Copy (2) of {0}", "{1} (1){2}", "{1} copy{2}", "{1} - Copy{2}"]
MARKS += [
    "{1} - Copy (2){2}",
    "{1} copy 2{2}",
    "{1} 2{2}",
    "{1}.sync-conflict-20240102-030405-ABCDEFG{2}",
    "{1} (Ann's conflicted copy 2024-01-02){2}",
]


def marked(mark: str, name: str) -> str:
    return mark.format(name, Path(name).stem, Path(name).suffix)


@pytest.mark.parametrize(
    "name", ["model_world_size_4_rank_0.pt", "config.json", ".metadata", "model.safetensors.index.json", "chat_template.jinja"]
)
@pytest.mark.parametrize("mark", MARKS)
def test_what_it_is_a_copy_of(mark: str, name: str) -> None:
    assert copied_name(marked(mark, name)) == name


@pytest.mark.parametrize(
    "name",
    [
        *("model-00001-of-00002.safetensors", "mp_rank_00_model_states.pt", "__0_0.distcp", "tokenizer.model.v3", "model.safetensors.bak"),
        *(
            "events.out.tfevents.1700000000.host",
            "model.pt.1000",
            "merges.txt",
            "rng_state_0.pth",
            "copying.txt",
            "copy.pt",
            "config_1.json",
        ),
    ],
)
def test_names_that_are_none(name: str) -> None:
    assert copied_name(name) is None


@pytest.mark.parametrize("mark", [mark for mark in MARKS if not mark.endswith("{2}")])
@pytest.mark.parametrize("form", ["fsdp", "dcp", "safetensors"])
def test_of_weights_are_warned_of(mark: str, form: str, layouts: Path, tmp_path: Path) -> None:
    if form == "safetensors":
        run, first = model(tmp_path / "run", "tokenizer.json"), "model.safetensors"
    else:
        source, first = {"fsdp": ("verl-run/run/global_step_20/actor", "model_world_size_*_rank_0.pt"), "dcp": (DCP, "__0_0.distcp")}[form]
        run = Path(shutil.copytree(layouts / source, tmp_path / "run"))
    weights = next(run.rglob(first))
    copy = weights.with_name(marked(mark, weights.name))
    shutil.copyfile(weights, copy)
    notes = ckpt_cli.merge(run, tmp_path / "equal").checkpoint.notes
    assert {note.level for note in notes if note.code == "second-copy"} <= {"info"}
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    result = ckpt_cli.merge(run, tmp_path / "out")
    text = told(result).get("second-copy", "") + told(result).get("other-weights", "")
    assert copy.name in text
    assert "warning" in {note.level for note in result.checkpoint.notes if note.code in ("second-copy", "other-weights")}


@pytest.mark.parametrize("mark", MARKS[::3])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_of_side_files_are_warned_of(mark: str, name: str, tmp_path: Path) -> None:
    run = model(tmp_path / "run", "tokenizer.json", "chat_template.jinja")
    copy = run / marked(mark, name)
    shutil.copyfile(run / name, copy)
    equal = ckpt_cli.merge(run, tmp_path / "equal")
    assert [note.level for note in equal.checkpoint.notes if note.code == "second-copy"] == ["info"]
    copy.write_text(json.dumps({"model_type": "another"}))
    notes = [note for note in ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes if note.code == "second-copy"]
    assert [note.level for note in notes] == ["warning"]
    assert f"{copy.name} beside {name}" in notes[0].text
    assert not (tmp_path / "out" / copy.name).exists()


def test_without_a_first_one_are_warned_of(tmp_path: Path) -> None:
    run = model(tmp_path / "run", "tokenizer.json", "chat_template (1).jinja", "notes (1).txt")
    result = ckpt_cli.merge(run, tmp_path / "out")
    assert told(result)["second-copy"].endswith("that are not beside them: chat_template (1).jinja")
    assert not (tmp_path / "out" / "chat_template (1).jinja").exists()


def test_that_cannot_be_read_are_not_said_to_differ(tmp_path: Path) -> None:
    run = model(tmp_path / "run", "tokenizer.json")
    (run / "tokenizer (1).json").write_text("other")
    (run / "tokenizer (1).json.aria2").write_bytes(b"")
    assert (
        "tokenizer (1).json beside tokenizer.json (not compared: the download of"
        in told(ckpt_cli.merge(run, tmp_path / "out"))["second-copy"]
    )


def test_of_a_file_that_was_passed_are_not_looked_for(tmp_path: Path) -> None:
    run = model(tmp_path / "run", "tokenizer.json")
    (run / "model.safetensors.1").write_bytes(b"another")
    assert "second-copy" not in told(ckpt_cli.merge(run / "model.safetensors", tmp_path / "out"))
