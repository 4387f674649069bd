"""Adapters of classifiers on a language model, and of embeddings that encoder, decoder and head share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import ckpt_cli
from ckpt_cli.errors import Undecidable
from tests.tensors import load

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")),
    pytest.mark.usefixtures("quiet_transformers", "asked_here"),
]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32, "pad_token_id": 0}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def classifier(base: Path, folder: Path, task: str | None) -> dict[str, torch.Tensor]:
    """An adapter with a head for three labels; returned is what PEFT merges."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    settings: dict[str, Any] = {"task_type": task} if task is not None else {"modules_to_save": ["score"]}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **settings))
    wrapped.save_pretrained(folder)
    return dict(wrapped.merge_and_unload().state_dict())


def texts(result: Any, code: str) -> list[str]:
    return [note.text for note in result.outputs[0].notes if note.code == code]


def test_a_classifier_is_written_without_the_head_of_the_base(llama: Path, tmp_path: Path) -> None:
    expected = classifier(llama, tmp_path / "run", "SEQ_CLS")
    result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=llama)
    merged = load(tmp_path / "out")
    assert merged.keys() == expected.keys()
    assert all(torch.allclose(merged[name], tensor, atol=1e-6) for name, tensor in expected.items())
    assert texts(result, "other-head") == ["lm_head.weight of the base is not written: the adapters are for a classifier without it"]
    assert not texts(result, "extra-tensors") + texts(result, "value-head")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["num_labels"]) == (["LlamaForSequenceClassification"], 3)
    assert ckpt_cli.verify(tmp_path / "out", against=tmp_path / "run").exit_code == 0
    _, info = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))


def test_where_no_task_says_so_the_advice_is_about_the_other_head(llama: Path, tmp_path: Path) -> None:
    expected = classifier(llama, tmp_path / "run", None)
    (said,) = texts(ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=llama), "extra-tensors")
    assert said.endswith("--exclude lm_head.weight writes the class that has them into config.json")
    followed = ckpt_cli.merge(tmp_path / "run", tmp_path / "followed", base=llama, exclude=["lm_head.weight"])
    assert load(tmp_path / "followed").keys() == expected.keys()
    assert not texts(followed, "extra-tensors")
    assert json.loads((tmp_path / "followed" / "config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]


@pytest.fixture
def t5(tmp_path: Path) -> Path:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=32, tie_word_embeddings=True, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    return tmp_path / "t5"


def adapted(base: Path, folder: Path, *modules: str) -> Path:
    model = transformers.T5ForConditionalGeneration.from_pretrained(base)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[*modules], init_lora_weights=False)).save_pretrained(folder)
    return folder


def test_an_adapter_of_one_use_of_a_shared_embedding_is_told_as_such(t5: Path, tmp_path: Path) -> None:
    run = adapted(t5, tmp_path / "run", "embed_tokens")
    with pytest.raises(Undecidable) as error:
        ckpt_cli.merge(run, tmp_path / "out", base=t5)
    assert "one of the uses of shared.weight, which is stored once" in error.value.advice
    ckpt_cli.merge(run, tmp_path / "exported", lora="export")  # as the hint says


def test_an_adapter_of_the_shared_embedding_changes_the_head(t5: Path, tmp_path: Path) -> None:
    result = ckpt_cli.merge(adapted(t5, tmp_path / "run", "shared"), tmp_path / "out", base=t5)
    (said,) = texts(result, "lora-tied")
    assert said.startswith("the adapter of shared.weight changes the output head too")


def test_copies_of_a_shared_embedding_are_no_base(t5: Path, tmp_path: Path) -> None:
    """PEFT saves the weights of both beside their factors."""
    ckpt_cli.merge(adapted(t5, tmp_path / "run", "shared", "lm_head"), tmp_path / "out", base=t5)
    assert load(t5).keys() <= load(tmp_path / "out").keys()
