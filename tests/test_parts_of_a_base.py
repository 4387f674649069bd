"""Folders of a base with other models, which a model may be loaded with, are told where the output lacks them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli

KIND, OTHER = "own", "own_codec"
MODEL = {"model.layers.0.weight": torch.arange(24.0).reshape(4, 6), "model.layers.1.weight": torch.arange(24.0).reshape(4, 6)}
CODEC = {"encoder.weight": torch.arange(9.0).reshape(3, 3)}


def model(folder: Path, tensors: dict[str, torch.Tensor] = MODEL, kind: str | None = KIND, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    elif name.endswith(".pt"):
        torch.save(tensors, folder / name)
    else:
        (folder / name).write_bytes(b"weights of another program")
    if kind is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


def told(result: Any) -> str:
    return "".join(note.text for note in result.outputs[0].notes if (note.level, note.code) == ("warning", "lacks-part"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return model(tmp_path / "run" / "checkpoint-5")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return model(tmp_path / "base")


@pytest.mark.parametrize(
    ("name", "kind", "file"),
    [
        ("speech_tokenizer", OTHER, "model.safetensors"),
        ("whisper-large-v3", OTHER, "model.safetensors"),
        ("vocoder", None, "model.pt"),
        ("audio_tokenizer", None, "codec.onnx"),
        ("assets/token2wav", OTHER, "model.safetensors"),
        ("damaged", OTHER, "pytorch_model.bin"),
    ],
)
def test_another_model_is_told(name: str, kind: str | None, file: str, run: Path, base: Path, tmp_path: Path) -> None:
    model(base / name, CODEC, kind, file)
    for made in (
        ckpt_cli.merge(run, tmp_path / "out", base=base),
        ckpt_cli.average([run, model(tmp_path / "run" / "checkpoint-6")], tmp_path / "mean", base=base),
    ):
        assert f"in {name}/" in told(made)
        assert f"copy it from {base}" in told(made)


def test_of_several_each_is_told_once(run: Path, base: Path, tmp_path: Path) -> None:
    model(base / "codec" / "inner", CODEC, OTHER)
    model(base / "codec2", CODEC, OTHER)
    assert "in codec2/ (own_codec), codec/inner/ (own_codec), which are not written" in told(
        ckpt_cli.merge(run, tmp_path / "out", base=base)
    )


@pytest.mark.parametrize("where", ["run", "output"])
def test_what_is_there_is_not(where: str, run: Path, base: Path, tmp_path: Path) -> None:
    model(base / "codec", CODEC, OTHER)
    if where == "run":
        model(run / "codec", CODEC, OTHER)
        merged = ckpt_cli.merge(run, tmp_path / "out", base=base)
        assert "codec/" in "".join(note.text for note in merged.checkpoint.notes if note.code == "other-folders")
    else:
        model(run / "codec", CODEC, OTHER)
        merged = ckpt_cli.merge(run, base=base, in_place=True, weights_name="other.safetensors")
    assert told(merged) == ""


@pytest.mark.parametrize(
    ("name", "kind", "file"),
    [
        *(
            (name, OTHER, "model.safetensors")
            for name in ("original", "fp16", "model-4bit", "onnx", "runs", "eval", ".cache", ".git", "checkpoint-7")
        ),
        *(
            (name, None, file)
            for name, file in (("onnx", "model.onnx"), ("gguf", "a.gguf"), ("openvino", "openvino_model.bin"), ("web", "a.onnx"))
        ),
        *((name, None, "consolidated.safetensors") for name in ("consolidated", "meta")),
        ("awq-v2", KIND, "model.safetensors"),
        ("metal", None, "model.bin"),
        ("device", None, "model.bin"),
        ("best", OTHER, "model.safetensors"),
    ],
)
def test_other_forms_of_a_base_are_not(name: str, kind: str | None, file: str, run: Path, base: Path, tmp_path: Path) -> None:
    model(base / name, {f"layers.{number}.w": tensor for number, tensor in enumerate(MODEL.values())}, kind, file)
    assert told(ckpt_cli.merge(run, tmp_path / "out", base=base)) == ""


def test_neither_are_the_same_weights_of_another_type(run: Path, base: Path, tmp_path: Path) -> None:
    model(base / "variant", {name: tensor.half() for name, tensor in MODEL.items()}, OTHER)
    assert told(ckpt_cli.merge(run, tmp_path / "out", base=base)) == ""


def test_folders_of_sentence_transformers_are_told_as_such(run: Path, base: Path, tmp_path: Path) -> None:
    model(base / "2_Dense", CODEC, None)
    (base / "modules.json").write_text(json.dumps([{"idx": 0, "path": ""}, {"idx": 1, "path": "2_Dense"}]))
    text = told(ckpt_cli.merge(run, tmp_path / "out", base=base))
    assert text.count("2_Dense") == 1
    assert text.startswith("modules.json names 2_Dense")


@pytest.mark.parametrize("kind", ["rag", KIND, "llama"])
def test_tokenizers_in_folders_of_their_own_are_told(kind: str, run: Path, base: Path, tmp_path: Path) -> None:
    """As RAG has one for questions and one for answers."""
    (run / "config.json").unlink()
    (base / "config.json").write_text(json.dumps({"model_type": kind, "architectures": {"rag": ["RagModel"]}.get(kind, [])}))
    for name in ("question_encoder_tokenizer", "generator_tokenizer"):
        (base / name).mkdir()
        (base / name / "vocab.txt").write_text("[PAD]")
    merged = ckpt_cli.merge(run, tmp_path / "out", base=base, names="native")
    texts = [note.text for note in merged.outputs[0].notes if note.level == "warning"]
    (text,) = [text for text in texts if "no tokenizer" in text]
    assert "generator_tokenizer/, question_encoder_tokenizer/: copy" in text


def test_a_tokenizer_beside_the_config_is_enough(run: Path, base: Path, tmp_path: Path) -> None:
    for folder in (base, base / "tokenizer"):
        folder.mkdir(exist_ok=True)
        (folder / "vocab.txt").write_text("[PAD]")
    assert told(ckpt_cli.merge(run, tmp_path / "out", base=base)) == ""
