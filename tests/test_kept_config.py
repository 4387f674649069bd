"""Weights that are written in place go beside a config.json that stays as it is: what does not fit them is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from tests import tiny


def run_of(path: Path, **changes: Any) -> Path:
    """Rank files in a step that has a config.json of its own."""
    home = path / "checkpoint-10" / "pytorch_model_fsdp_0"
    home.mkdir(parents=True)
    torch.save(tiny.weights(), home / "model_world_size_1_rank_0.pt")
    tiny.folder(path / "checkpoint-10", None)
    config = path / "checkpoint-10" / "config.json"
    content = {**json.loads(config.read_text()), **changes}
    config.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return path


def kept(run: Path, **options: Any) -> list[str]:
    (output,) = ckpt_cli.merge(run, in_place=True, **options).outputs
    return [note.text for note in output.notes if (note.level, note.code) == ("warning", "config-kept")]


@pytest.mark.parametrize(("said", "dtype"), [("bfloat16", "keep"), ("float32", "bf16"), ("float32", "fp16")])
def test_another_dtype(tmp_path: Path, said: str, dtype: str) -> None:
    """Loaders cast to what the config says, and verify calls that an error."""
    run = run_of(tmp_path / "run", dtype=said, torch_dtype=None)
    held = {"keep": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype]
    (text,) = kept(run, dtype=dtype)
    assert f"dtype is {said}, not {held}" in text
    assert [item.code for item in ckpt_cli.verify(run / "checkpoint-10").findings if item.code.startswith("config")] == ["config-dtype"]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_same_dtype_under_either_name(tmp_path: Path, key: str) -> None:
    run = run_of(tmp_path / "run", **{"dtype": None, "torch_dtype": None, key: "float32"})
    assert kept(run) == []
    assert ckpt_cli.verify(run / "checkpoint-10").exit_code == 0


def test_no_dtype_at_all(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", dtype=None, torch_dtype=None)
    assert kept(run) == []


def test_weights_under_a_name_of_their_own(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", dtype="bfloat16", torch_dtype=None)
    assert kept(run, weights_name="other.safetensors") == []


def test_another_folder_gets_one_that_fits(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", dtype="bfloat16", torch_dtype=None)
    (output,) = ckpt_cli.merge(run, tmp_path / "out").outputs
    assert "config-kept" not in {note.code for note in output.notes}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
