"""An adapter in a folder of its own, as PEFT saves each of several: tokenizer and chat template lie beside these, in the step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckpt_cli
from tests import tiny

VOCABULARY = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
OWN = {"tokenizer.json": VOCABULARY, "tokenizer_config.json": {"of": "the run"}}


def merged(adapter: Path, top: Path) -> str:
    """Where the template of a merged model is from."""
    base = tiny.folder(top / "base", tiny.weights(), files={"chat_template.jinja": "BASE"})
    output = top / "out"
    result = ckpt_cli.merge(adapter, output, base=base)
    template = (output / "chat_template.jinja").read_text()
    is_own = "of" in json.loads((output / "tokenizer_config.json").read_text())
    assert is_own is (template != "BASE")
    notes = [note for note in result.checkpoint.notes if note.code in ("assets-of-folder", "assets-of-run")]
    assert bool(notes) is (template in ("STEP", "RUN"))
    return template


def side_files(folder: Path, template: str) -> Path:
    return tiny.folder(folder, None, files={**OWN, "chat_template.jinja": template}, bare=True)


def adapter(folder: Path, top: Path) -> Path:
    return tiny.adapter(folder, tiny.factors(), top / "base")


@pytest.mark.parametrize("name", ["dpo", "reference", "lora_adapter", "actor/lora_adapter"])
def test_have_what_lies_in_their_step(name: str, tmp_path: Path) -> None:
    step = side_files(tmp_path / "run" / "checkpoint-200", "STEP")
    assert merged(adapter(step / name, tmp_path), tmp_path) == "STEP"


def test_have_their_own_first(tmp_path: Path) -> None:
    step = side_files(tmp_path / "run" / "checkpoint-200", "STEP")
    assert merged(side_files(adapter(step / "dpo", tmp_path), "OWN"), tmp_path) == "OWN"


def test_have_what_lies_in_the_run_of_their_step(tmp_path: Path) -> None:
    run = side_files(tmp_path / "run", "RUN")
    assert merged(adapter(run / "checkpoint-200" / "dpo", tmp_path), tmp_path) == "RUN"


@pytest.mark.parametrize(("other", "wanted"), [("dpo", "RUN"), ("sft", "BASE")])
def test_of_the_last_save_have_what_lies_in_the_run(other: str, wanted: str, tmp_path: Path) -> None:
    """Where steps have the same one: other folders in a run, or beside it, are anyone's."""
    run = side_files(tmp_path / "run", "RUN")
    adapter(run / "checkpoint-200" / other, tmp_path)
    assert merged(adapter(run / "dpo", tmp_path), tmp_path) == wanted


def test_in_any_folder_have_nothing_from_there(tmp_path: Path) -> None:
    models = side_files(tmp_path / "models", "MODELS")
    assert merged(adapter(models / "dpo", tmp_path), tmp_path) == "BASE"
