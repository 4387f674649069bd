"""Bases that a program packed, with the model and the tokenizer in folders of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import NotFound
from tests import tiny


def packed(folder: Path) -> Path:
    """What `mlflow.transformers.log_model` writes."""
    tiny.folder(folder / "model", tiny.weights())
    (folder / "model" / "tokenizer.json").unlink()
    (folder / "components" / "tokenizer").mkdir(parents=True)
    (folder / "components" / "tokenizer" / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    for name in ("MLmodel", "conda.yaml", "python_env.yaml"):
        (folder / name).write_text("flavors: {}")
    return folder


def trained(path: Path) -> Path:
    path.mkdir()
    save_file(tiny.weights(3), path / "model.safetensors")
    return path


def test_hints_name_the_folders_and_the_description_is_no_file_of_the_model(tmp_path: Path) -> None:
    base, run = packed(tmp_path / "art"), trained(tmp_path / "full")
    (output,) = ckpt_cli.merge(run, tmp_path / "out", base=base).outputs
    (text,) = [note.text for note in output.notes if note.code == "lacks-asset"]
    assert text.endswith(
        f"the base has its model in model/: pass --base {base}/model, and copy the tokenizer from {base}/components/tokenizer"
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "ckpt-manifest.json"}
    (output,) = ckpt_cli.merge(run, tmp_path / "again", base=base / "model").outputs
    (text,) = [note.text for note in output.notes if note.code == "lacks-asset"]
    assert text == f"the output has no tokenizer: copy the tokenizer from {base}/components/tokenizer"


def test_weights_that_are_needed_are_pointed_at(tmp_path: Path) -> None:
    base, adapter = packed(tmp_path / "art"), tiny.adapter(tmp_path / "adapter", tiny.factors(), "base")
    with pytest.raises(NotFound, match="in folders below") as caught:
        ckpt_cli.merge(adapter, tmp_path / "out", base=base)
    assert caught.value.hint == f"pass --base {base}/model"
    ckpt_cli.merge(adapter, tmp_path / "out", base=base / "model")
