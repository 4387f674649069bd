"""The dtype that config.json names is the one that was written, in whatever form it stood there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from tests.architectures import MODELS, answered_here, build


@pytest.fixture
def run(tmp_path: Path, quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)
    kind, model_type, options = MODELS["qwen2"]
    build(kind, model_type, options).save_pretrained(tmp_path / "run")
    return tmp_path / "run"


def says(folder: Path, **entries: Any) -> dict[str, Any]:
    path = folder / "config.json"
    content = {**{key: value for key, value in json.loads(path.read_text()).items() if "dtype" not in key}, **entries}
    path.write_text(json.dumps(content, indent=2))
    return content


@pytest.mark.parametrize(
    "entries",
    [
        {"dtype": {"": "float32"}},
        {"torch_dtype": {"": "float32", "text_config": "float16"}},
        {"dtype": {"text_config": "float32"}},
        {"dtype": "float32", "torch_dtype": {"": "float32"}},
        {"dtype": "torch.float32"},
        {"dtype": "auto"},
    ],
    ids=json.dumps,
)
def test_a_cast_is_said(entries: dict[str, Any], run: Path, tmp_path: Path) -> None:
    before = says(run, **entries)
    result = ckpt_cli.merge(run, tmp_path / "out", dtype="bf16")
    assert "unbuildable-config" not in {note.code for note in result.outputs[0].notes}
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: after[key] for key in entries if "dtype" in key} == {key: "bfloat16" for key in entries if "dtype" in key}
    assert after.keys() == before.keys()
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_what_is_right_stays_byte_for_byte(run: Path, tmp_path: Path) -> None:
    says(run, dtype={"": "float32", "text_config": "float32"})
    ckpt_cli.merge(run, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (run / "config.json").read_bytes()


def test_of_several_dtypes_that_of_the_whole_follows(run: Path, tmp_path: Path) -> None:
    says(run, dtype={"": "float16", "text_config": "bfloat16"})
    from safetensors.torch import load_file, save_file

    held = load_file(run / "model.safetensors")
    save_file({name: tensor.bfloat16() if "norm" in name else tensor for name, tensor in held.items()}, run / "model.safetensors")
    ckpt_cli.merge(run, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == {"": "float32", "text_config": "bfloat16"}


def test_a_folder_that_cannot_be_loaded_for_its_dtype_is_still_told(run: Path) -> None:
    says(run, dtype="torch.float32")
    assert "unbuildable-config" in {found.code for found in ckpt_cli.verify(run).findings}
