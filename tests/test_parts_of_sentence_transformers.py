"""Parts of a model of sentence-transformers: those that lost their weights, and those of a Router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli

KINDS = {
    "query_0_StaticEmbedding": "sentence_transformers.models.StaticEmbedding",
    "document_0_Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "document_1_Pooling": "sentence_transformers.models.Pooling",
}


def put(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def weights(folder: Path, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"linear.weight": torch.randn(4, 8)}, folder / name, metadata={"format": "pt"})
    return folder / name


def modules(folder: Path, **parts: str) -> None:
    put(folder / "modules.json", [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in parts.items()])


def router(folder: Path) -> Path:
    """A model whose texts go to one of two others; that of queries has lost its weights."""
    put(folder / "modules.json", [{"path": "", "type": "sentence_transformers.models.Router"}])
    put(folder / "router_config.json", {"types": KINDS, "structure": {}, "parameters": {}})
    weights(folder / "document_0_Transformer")
    for part in KINDS:
        put(folder / part / "config.json", {"model_type": "own"})
    return folder


def told(result: Any) -> list[str]:
    return [note.text for note in result.outputs[0].notes if (note.level, note.code) == ("warning", "lacks-part")]


def found(folder: Path) -> list[tuple[str, str]]:
    named = ("lacks-part", "lacks-named-file", "damaged-side-file")
    return [(item.code, item.message) for item in ckpt_cli.verify(folder).findings if item.code in named]


def test_a_model_around_its_parts_that_lost_its_weights_is_told(tmp_path: Path) -> None:
    """The only weights are those of a layer that follows the model, which nothing but their folder tells."""
    run = tmp_path / "run"
    run.mkdir()
    modules(run, **{"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"})
    put(run / "1_Pooling" / "config.json", {})
    put(run / "2_Dense" / "config.json", {"in_features": 8, "out_features": 4})
    weights(run / "2_Dense")
    (text,) = told(ckpt_cli.merge(run, tmp_path / "out"))
    assert f"the model that belongs in {run} itself has no weights there" in text
    assert found(run) == [("lacks-part", "the model that it names in its own folder has no weights there")]
    weights(run)
    (text,) = told(ckpt_cli.merge(run, tmp_path / "out", overwrite=True))
    assert "itself" not in text
    assert found(run) == []


@pytest.mark.parametrize("kind", ["Dense", "LayerNorm", "WordEmbeddings"])
def test_a_part_that_lost_its_weights_is_told(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    weights(run)
    modules(run, **{"1_Pooling": "Pooling", "2_X": kind, "3_Dropout": "Dropout", "4_Normalize": "Normalize"})
    for part in ("1_Pooling", "2_X", "3_Dropout"):
        put(run / part / "config.json", {})
    assert found(run) == [("lacks-part", "2_X, which it names, holds no weights")]
    (text,) = told(ckpt_cli.merge(run, tmp_path / "out"))
    assert text.endswith(f"not written: 2_X in {run} holds no weights")
    weights(run / "2_X" / "onnx").unlink()
    assert found(run)
    (run / "2_X" / "onnx" / "model.onnx").write_bytes(b"x")
    assert not found(run)
    (run / "2_X" / "onnx" / "model.onnx").unlink()
    weights(run / "2_X")
    assert not found(run)
    assert told(ckpt_cli.merge(run, tmp_path / "again"))[0].endswith(f"copy them from {run}")


def test_parts_of_a_router_are_parts_of_the_model(tmp_path: Path) -> None:
    run = router(tmp_path / "run")
    inner = run / "document_0_Transformer"
    expected = [("lacks-part", "query_0_StaticEmbedding, which it names, holds no weights")]
    assert found(run) == found(inner) == expected
    weights(run / "query_0_StaticEmbedding")
    assert found(inner) == []


@pytest.mark.parametrize("of_run", [True, False])
def test_what_is_written_of_a_router_is_said_to_be_a_part(of_run: bool, tmp_path: Path) -> None:
    """A part of a step that was passed has the files of the step: with them goes the one that names the parts."""
    run = router(tmp_path / "run" / "checkpoint-5" if of_run else tmp_path / "model")
    weights(run / "query_0_StaticEmbedding")
    out = tmp_path / "out"
    texts = told(ckpt_cli.merge(run / "document_0_Transformer", out))
    assert (out / "modules.json").is_file() == (out / "router_config.json").is_file() == of_run
    if of_run:
        assert "the weights are those of document_0_Transformer" in texts[0]
        assert "query_0_StaticEmbedding" in texts[0]
        assert found(out)


def test_a_router_needs_the_file_that_names_its_parts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    weights(run)
    put(run / "modules.json", [{"path": "", "type": "sentence_transformers.models.Router"}])
    assert [code for code, _ in found(run)] == ["lacks-named-file"]
    (text,) = told(ckpt_cli.merge(run, tmp_path / "out"))
    assert "does not load without router_config.json" in text
    put(run / "router_config.json", {"types": {}})
    assert not found(run)
