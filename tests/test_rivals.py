"""Another file that could be the model: what is said of it was compared, and what was not says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from tests.cli import ROOT

EXAMPLE = ROOT / "examples" / "tiny-run"


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "run")) / "checkpoint-200"


def merged(step: Path, out: Path) -> Path:
    ckpt_cli.merge(step, out)
    return out / "model.safetensors"


def told(step: Path) -> dict[str, str]:
    return {note.code: note.text for note in ckpt_cli.detect(step).checkpoint.notes if note.code in ("other-model", "other-weights")}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_merge_of_this_very_step_is_the_same(step: Path, tmp_path: Path, name: str) -> None:
    tensors = load_file(merged(step, tmp_path / "out"))
    save_file(tensors, step / name) if name.endswith("safetensors") else torch.save(tensors, step / name)
    shards = step / "pytorch_model_fsdp_0"
    notes = {note.code for note in ckpt_cli.merge(shards, tmp_path / "again", dry_run=True).checkpoint.notes}
    assert "other-model" not in notes
    assert "other-model" not in told(step)


def test_of_another_step_it_names_what_differs(step: Path, tmp_path: Path) -> None:
    torch.save(load_file(merged(step.with_name("checkpoint-100"), tmp_path / "out")), step / "pytorch_model.bin")
    assert "pytorch_model.bin beside it could also be the model, with other values of " in told(step)["other-model"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("without", "without model."),
        ("more", "also with extra"),
        ("dtype", "with another dtype of "),
        ("head", "with other values of lm_head.weight (samples differ)"),
    ],
)
def test_what_differs_is_said(step: Path, tmp_path: Path, change: str, said: str) -> None:
    tensors = load_file(merged(step, tmp_path / "out"))
    if change == "without":
        del tensors[next(name for name in tensors if "layers" in name)]
    elif change == "more":
        tensors["extra"] = torch.ones(3)
    elif change == "dtype":
        tensors = {name: tensor.double() for name, tensor in tensors.items()}
    else:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    torch.save(tensors, step / "pytorch_model.bin")
    assert said in told(step)["other-model"]


def test_an_index_alone_is_a_leftover(step: Path, tmp_path: Path) -> None:
    merged(step, tmp_path / "out")
    name = "pytorch_model.bin.index.json"
    (step / name).write_text(json.dumps({"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}))
    assert not told(step)
    assert "leftover-index" in {note.code for note in ckpt_cli.detect(step).checkpoint.notes}
    shutil.copy(step / name, tmp_path / "out")
    assert {item.code for item in ckpt_cli.verify(tmp_path / "out").findings if item.severity == "warning"} == {"leftover-index"}


@pytest.mark.parametrize("damage", ["cut", "random"])
def test_what_cannot_be_read_was_not_compared(step: Path, tmp_path: Path, damage: str) -> None:
    out = tmp_path / "out"
    path = merged(step, out)
    name = "pytorch_model.bin"
    if damage == "cut":
        (step / name).write_bytes(path.read_bytes()[:100])
    else:
        (step / name).write_bytes(bytes(range(200)))
    text = told(step)["other-model"]
    assert f"{name} beside it could also be the model, which was not compared: " in text
    assert "values" not in text
    shutil.copy(step / name, out)
    (found,) = (item for item in ckpt_cli.verify(out).findings if item.code == "other-model")
    assert found.message.startswith("this could also be the model, which was not compared: ")
