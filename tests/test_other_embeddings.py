"""Embeddings and output heads that are not called as those of most models: what the class ties, and how many rows a vocabulary needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning")]

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1}
ATTENTION = {**SIZES, "num_attention_heads": 2, "intermediate_size": 32}
MODELS: dict[str, tuple[str, Any, str, str]] = {
    "mamba": ("MambaForCausalLM", {**SIZES, "state_size": 4, "time_step_rank": 4}, "x_proj", "embeddings"),
    "bert": ("BertForMaskedLM", ATTENTION, "query", "word_embeddings"),
}


def base_of(folder: Path, kind: str, settings: dict[str, Any]) -> Path:
    model = getattr(transformers, kind)
    torch.manual_seed(0)
    model(model.config_class(**settings)).save_pretrained(folder)
    return folder


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(8)[None]).logits
    return found


def trained(folder: Path, base: Path, kind: str, **settings: Any) -> torch.Tensor:
    """Saves an adapter as PEFT does; the logits of the model with it."""
    wrapped = peft.get_peft_model(getattr(transformers, kind).from_pretrained(base), peft.LoraConfig(r=2, lora_alpha=4, **settings))
    torch.manual_seed(1)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    wrapped.save_pretrained(folder)
    return logits(wrapped)


def told(result: Any, code: str) -> list[str]:
    return [note.text for note in result.outputs[0].notes if note.code == code]


@pytest.mark.parametrize("name", MODELS)
def test_a_head_that_was_not_trained_with_its_embedding_is_written_as_training_had_it(name: str, tmp_path: Path) -> None:
    kind, settings, module, embedding = MODELS[name]
    base = base_of(tmp_path / "base", kind, settings)
    wanted = trained(tmp_path / "run", base, kind, target_modules=[module], modules_to_save=[embedding])
    result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base)
    assert torch.allclose(logits(getattr(transformers, kind).from_pretrained(tmp_path / "out")), wanted, atol=1e-5)
    assert told(result, "tied-heads-differ")


def test_an_adapter_on_an_embedding_changes_the_head_that_the_class_ties_to_it(tmp_path: Path) -> None:
    kind, settings, module, embedding = MODELS["mamba"]
    base = base_of(tmp_path / "base", kind, settings)
    trained(tmp_path / "run", base, kind, target_modules=[module, embedding])
    (said,) = told(ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base), "lora-tied")
    assert said.startswith("the adapter of backbone.embeddings.weight changes the output head too")


@pytest.mark.parametrize("settings", [{"target_modules": ["q_proj", "embed_tokens"]}, {"modules_to_save": ["embed_tokens", "score"]}])
def test_a_classifier_has_no_head_that_is_tied(settings: dict[str, Any], tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "LlamaForCausalLM", {**ATTENTION, "tie_word_embeddings": True, "pad_token_id": 0})
    kind = "LlamaForSequenceClassification"
    wanted = trained(tmp_path / "run", base, kind, task_type="SEQ_CLS", **{"target_modules": ["q_proj"], **settings})
    result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base)
    assert not told(result, "lora-tied")
    assert torch.allclose(logits(getattr(transformers, kind).from_pretrained(tmp_path / "out")), wanted, atol=1e-5)


@pytest.mark.parametrize("with_config", [True, False])
def test_a_file_that_holds_each_tensor_once_has_the_head_as_the_first_state_of_the_embedding(with_config: bool, tmp_path: Path) -> None:
    """As accelerate writes a wrapped model: of tied tensors only the first one, which training replaced by a copy."""
    base = base_of(tmp_path / "base", "LlamaForCausalLM", {**ATTENTION, "tie_word_embeddings": True, "pad_token_id": 0})
    settings = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(base), settings)
    wrapped.base_model.model.model.embed_tokens.modules_to_save["default"].weight.data.add_(1.0)
    run = tmp_path / "run"
    run.mkdir()
    state = {name: tensor.contiguous() for name, tensor in wrapped.state_dict().items() if "lm_head" not in name}
    save_file(state, run / "model.safetensors", metadata={"format": "pt"})
    (run / "config.json").write_bytes((base / "config.json").read_bytes())
    if with_config:
        settings.save_pretrained(run)
    result = ckpt_cli.merge(run, tmp_path / "out", lora_alpha=None if with_config else 4)
    assert torch.allclose(logits(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")), logits(wrapped), atol=1e-5)
    levels = [note.level for note in result.outputs[0].notes if note.code == "lora-tied"]
    assert levels == ["info" if with_config else "warning"]


def with_tokenizer(folder: Path, embeddings: dict[str, int], tokens: int, added: tuple[int, ...] = ()) -> Path:
    """A folder with embeddings of so many rows, beside a tokenizer with so many tokens, some of which are listed as added too."""
    folder.mkdir()
    save_file({name: torch.ones(rows, 2) for name, rows in embeddings.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    listed = [{"id": number, "content": f"t{number}", "special": True} for number in added]
    model = {"type": "BPE", "vocab": {f"t{number}": number for number in range(tokens)}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": listed}))
    return folder


@pytest.mark.parametrize(
    "name", ["shared", "model.shared", "backbone.embeddings", "transformer.word_embedding", "text_model.embeddings.token_embedding"]
)
def test_a_vocabulary_is_compared_with_an_embedding_of_any_usual_name(name: str, tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model", {f"{name}.weight": 8}, 10)
    assert [item.tensor for item in ckpt_cli.verify(folder).findings if item.code == "vocabulary"] == [f"{name}.weight"]
    (said,) = told(ckpt_cli.merge(folder, tmp_path / "out"), "vocabulary")
    assert "2 of 10 tokens have ids of 8 and above" in said


@pytest.mark.parametrize("rows", [(8, 12), (12, 8)])
def test_of_several_embeddings_the_largest_is_that_of_the_tokenizer(rows: tuple[int, int], tmp_path: Path) -> None:
    """InstructBLIP has one in its Q-Former too, and a pair of encoder and decoder one in each."""
    names = ("language_model.model.decoder.embed_tokens.weight", "qformer.embeddings.word_embeddings.weight")
    folder = with_tokenizer(tmp_path / "model", dict(zip(names, rows, strict=True)), 10)
    assert not [item for item in ckpt_cli.verify(folder).findings if item.code in ("vocabulary", "added-tokens")]


def test_a_token_of_the_vocabulary_that_is_listed_as_added_may_have_no_row(tmp_path: Path) -> None:
    """bart-large-cnn has none for its mask, which no text has."""
    folder = with_tokenizer(tmp_path / "model", {"model.shared.weight": 9}, 10, (0, 9))
    assert [item.severity for item in ckpt_cli.verify(folder).findings if item.code in ("vocabulary", "added-tokens")] == ["info"]
    assert not told(ckpt_cli.merge(folder, tmp_path / "out"), "vocabulary")
