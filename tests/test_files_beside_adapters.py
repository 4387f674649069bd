"""Files beside adapters that are exported: what these lack is told, as it is of a model, but for what only a model needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ckpt_cli

LEAD = "base_model.model.encoder.layer.0.attention.self.query"


def adapter(folder: Path, *, metadata: dict[str, str] | None = None, tail: bool = False) -> Path:
    """A folder as PEFT writes it, without config.json; with ``tail``, as an interrupted copy leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    rank, width = 4, 8
    factors = {f"{LEAD}.lora_A.weight": torch.randn(rank, width), f"{LEAD}.lora_B.weight": torch.randn(width, rank)}
    if tail:
        factors["base_model.model.score.weight"] = torch.randn(64, 64)
        factors["base_model.model.score.weight"][32:] = 0
    save_file(factors, folder / "adapter_model.safetensors", metadata={"format": "pt", **(metadata or {})})
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["query"], "modules_to_save": ["score"] if tail else None}
    put(folder / "adapter_config.json", said)
    return folder


def put(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def told(result: Any) -> dict[str, str]:
    (output,) = result.outputs
    return {note.code: note.text for note in output.notes if note.level == "warning"}


def test_an_adapter_alone_needs_neither_config_nor_tokenizer(tmp_path: Path) -> None:
    result = ckpt_cli.merge(adapter(tmp_path / "run"), tmp_path / "out")
    assert told(result) == {}
    assert result.outputs[0].lacking == ()


def test_parts_of_sentence_transformers_beside_an_adapter_are_told(tmp_path: Path) -> None:
    run = adapter(tmp_path / "run")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    put(run / "modules.json", [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()])
    put(run / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    put(run / "2_Dense" / "config.json", {"in_features": 8, "out_features": 4})
    save_file({"linear.weight": torch.randn(4, 8)}, run / "2_Dense" / "model.safetensors")
    result = ckpt_cli.merge(run, tmp_path / "out")
    text = next(note.text for note in result.outputs[0].notes if note.code == "lacks-part" and "modules.json" in note.text)
    assert text == f"modules.json names 1_Pooling, 2_Dense, folders that are not written: copy them from {run}"


def test_half_a_tokenizer_beside_an_adapter_is_told(tmp_path: Path) -> None:
    run = adapter(tmp_path / "run")
    put(run / "vocab.json", {"a": 0})
    put(run / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    text = told(ckpt_cli.merge(run, tmp_path / "out"))["partial-tokenizer"]
    assert "merges.txt" in text
    assert "--base" not in text  # which would fuse the adapter


def test_the_code_of_a_tokenizer_goes_with_an_adapter(tmp_path: Path) -> None:
    """That of the model does not: it belongs to the config.json of the base."""
    run = adapter(tmp_path / "run")
    put(run / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}})
    put(run / "config.json", {"auto_map": {"AutoModel": "modeling_own.OwnModel"}, "model_type": "own"})
    (run / "tokenization_own.py").write_text("from .helper_own import x\nclass OwnTokenizer: pass\n")
    (run / "helper_own.py").write_text("x = 1\n")
    (run / "modeling_own.py").write_text("class OwnModel: pass\n")
    assert "lacks-code" not in told(ckpt_cli.merge(run, tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out").glob("*.py")) == ["helper_own.py", "tokenization_own.py"]
    (run / "tokenization_own.py").unlink()
    assert "tokenization_own.py" in told(ckpt_cli.merge(run, tmp_path / "out", overwrite=True))["lacks-code"]


def test_files_that_a_manifest_beside_an_adapter_lists_are_missed(tmp_path: Path) -> None:
    run = adapter(tmp_path / "run")
    put(run / "tokenizer_config.json", {"model_max_length": 8})
    ckpt_cli.merge(run, tmp_path / "first")
    (tmp_path / "first" / "tokenizer_config.json").unlink()
    assert "tokenizer_config.json" in told(ckpt_cli.merge(tmp_path / "first", tmp_path / "second"))["fewer-files"]


def test_what_the_header_of_an_adapter_says_is_kept(tmp_path: Path) -> None:
    run = adapter(tmp_path / "run", metadata={"trained_on": "own texts"})
    ckpt_cli.merge(run, tmp_path / "out")
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "trained_on": "own texts"}
    cast = ckpt_cli.merge(run, tmp_path / "cast", dtype="bf16")
    assert [note.level for note in cast.outputs[0].notes if note.code == "header-metadata"] == ["info"]


def test_an_adapter_from_an_interrupted_copy_is_told(tmp_path: Path) -> None:
    assert "zero-tail" in told(ckpt_cli.merge(adapter(tmp_path / "run", tail=True), tmp_path / "out"))
