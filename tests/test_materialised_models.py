"""Live models that `to_empty` gave memory: what no checkpoint holds is not in there, and nothing is tied any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import ckpt_cli
from ckpt_cli.errors import MissingTensors, UsageError
from ckpt_cli.loading.modules.transient_buffers import buffer_notes
from tests.architectures import MODELS, build

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")]
IDS = torch.arange(20)[None]
ROTARY = "model.rotary_emb.inv_freq"


def materialised(source: Any) -> Any:
    with torch.device("meta"):
        model = type(source)(source.config)
    model.to_empty(device="cpu")
    for values in (*model.parameters(), *model.buffers()):
        values.data.fill_(-7)
    return model.eval()


def codes(result: Any) -> list[str]:
    return [note.code for note in result.notes if note.level == "warning"]


@pytest.mark.parametrize("kind", ["llama", "llama, tied"])
def test_what_to_empty_leaves_unset_is_named_and_its_recipe_is_followed(kind: str, tmp_path: Path) -> None:
    source = build(*MODELS[kind]).eval()
    source.save_pretrained(tmp_path)
    with torch.device("meta"):
        meta = type(source)(source.config)
    with pytest.raises(UsageError) as raised:
        ckpt_cli.load_into(meta, tmp_path)
    assert "model.to_empty(device=...)" in (raised.value.hint or "")
    model = materialised(source)
    loaded = ckpt_cli.load_into(model, tmp_path)
    (text,) = [note.text for note in loaded.notes if note.code == "unset-buffers"]
    assert ROTARY in text
    assert "model.init_weights()" in text
    model = materialised(source)
    model.init_weights()
    assert codes(ckpt_cli.load_into(model, tmp_path)) == []
    assert torch.equal(model(IDS).logits, source(IDS).logits)


def test_two_parameters_that_the_checkpoint_has_once_are_both_filled(tmp_path: Path) -> None:
    """A folder of the hub stores one of them, and its config ties them."""
    source = build(*MODELS["llama, tied"]).eval()
    source.save_pretrained(tmp_path)
    model = materialised(source)
    assert "untied" in codes(ckpt_cli.load_into(model, tmp_path))
    assert torch.equal(model.lm_head.weight, source.lm_head.weight)
    assert torch.equal(model.model.embed_tokens.weight, source.lm_head.weight)
    model.tie_weights()
    assert "untied" not in codes(ckpt_cli.load_into(model, tmp_path))


def test_a_head_that_is_not_tied_is_still_missing(tmp_path: Path) -> None:
    source = build(*MODELS["llama"])
    source.save_pretrained(tmp_path, state_dict={k: v for k, v in source.state_dict().items() if k != "lm_head.weight"})
    with pytest.raises(MissingTensors, match=r"lm_head\.weight"):
        ckpt_cli.load_into(build(*MODELS["llama"]), tmp_path)
    tied = build(*MODELS["llama, tied"])
    tied.save_pretrained(tmp_path / "tied")
    model = materialised(tied)
    assert ckpt_cli.load_into(model, tmp_path / "tied", exclude="lm_head.weight", strict=False).missing == ("lm_head.weight",)


@pytest.mark.parametrize("kind", list(MODELS))
def test_buffers_that_a_class_made_are_no_warning(kind: str) -> None:
    """As they were made, rounded, and made anew after `to_empty`; the state of random numbers is left alone."""
    model, before = build(*MODELS[kind]), torch.get_rng_state()
    assert buffer_notes(model) == buffer_notes(model.to(torch.bfloat16)) == buffer_notes(model.float()) == []
    assert torch.equal(torch.get_rng_state(), before)


def test_a_rotary_embedding_that_grew_is_no_warning() -> None:
    kind, model_type, options = MODELS["llama"]
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = build(kind, model_type, {**options, "max_position_embeddings": 8, "rope_parameters": scaling})
    before = model.model.rotary_emb.inv_freq.clone()
    model(IDS)
    assert isinstance(model, LlamaForCausalLM)
    assert not torch.equal(model.model.rotary_emb.inv_freq, before)
    assert buffer_notes(model) == []


class Table(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", values, persistent=False)


def test_of_other_models_what_is_certainly_wrong_is_named() -> None:
    named = {
        "fine": torch.tensor([1.0, float("-inf")]),
        "unknown": torch.tensor([3e38]),
        "nan": torch.tensor([float("nan")]),
        "meta": torch.empty(2, device="meta"),
        "bits": torch.ones(2).to(torch.float8_e4m3fn),
    }
    (note,) = buffer_notes(nn.ModuleDict({name: Table(values) for name, values in named.items()}))
    assert "class: nan.table, meta.table: " in note.text
