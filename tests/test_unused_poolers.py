"""The pooler of an encoder whose decoder reads its last hidden state: never used, and what makes the model may leave it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import MissingTensors
from tests import architectures

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("asked_here")

WORDS = {**architectures.WORDS, "max_position_embeddings": 16}


def bert() -> Any:
    return transformers.BertConfig(**WORDS)


def trocr() -> Any:
    vision = transformers.ViTModel(transformers.ViTConfig(**architectures.IMAGES), add_pooling_layer=False)
    return transformers.VisionEncoderDecoderModel(encoder=vision, decoder=transformers.BertLMHeadModel(decoder()))


def texts() -> Any:
    return transformers.EncoderDecoderModel(
        encoder=transformers.BertModel(bert(), add_pooling_layer=False), decoder=transformers.BertLMHeadModel(decoder())
    )


def decoder() -> Any:
    return transformers.BertConfig(**WORDS, is_decoder=True, add_cross_attention=True)


def codes(notes: Any) -> set[str]:
    return {note.code for note in notes}


@pytest.mark.parametrize("make", [trocr, texts])
def test_is_not_missed(make: Any, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path / "run")
    state = load_file(tmp_path / "run" / "model.safetensors")
    assert not [name for name in state if "pooler" in name]
    done = ckpt_cli.merge(tmp_path / "run", tmp_path / "out").outputs[0]
    assert "recomputed-tensors" in codes(done.notes)
    assert "optional-tensors" not in codes(done.notes)
    found = ckpt_cli.verify(tmp_path / "out").findings
    assert {item.tensor for item in found if item.code == "recomputed-tensor"} == {
        "encoder.pooler.dense.bias",
        "encoder.pooler.dense.weight",
    }
    assert "error" not in {item.severity for item in found}
    # A base with one has nothing that is missing here; the rest of the model is looked for as ever.
    base = {**state, "encoder.pooler.dense.weight": torch.ones(32, 32), "encoder.pooler.dense.bias": torch.ones(32)}
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    (tmp_path / "base" / "config.json").write_bytes((tmp_path / "run" / "config.json").read_bytes())
    ckpt_cli.merge(tmp_path / "run", tmp_path / "based", base=tmp_path / "base")
    assert "missing-of-base" not in codes(ckpt_cli.verify(tmp_path / "out", base=tmp_path / "base").findings)
    del state[max(name for name in state if name.startswith("encoder.") and name.endswith("query.weight"))]
    save_file(state, tmp_path / "run" / "model.safetensors", {"format": "pt"})
    with pytest.raises(MissingTensors):
        ckpt_cli.merge(tmp_path / "run", tmp_path / "lost")


def test_is_missed_where_it_is_used(tmp_path: Path) -> None:
    transformers.BertForSequenceClassification(bert()).save_pretrained(tmp_path / "run")
    state = load_file(tmp_path / "run" / "model.safetensors")
    save_file({name: tensor for name, tensor in state.items() if "pooler" not in name}, tmp_path / "run" / "model.safetensors")
    with pytest.raises(MissingTensors):
        ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
