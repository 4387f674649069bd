"""Configs that a checkpoint holds itself: written where there is no config.json, and compared with one that is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ckpt_cli
from ckpt_cli.hub.entries.marks import other_marks
from tests import tiny

pytestmark = pytest.mark.filterwarnings("ignore")
"""Of torch, that there is no process group."""

SIZES = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "tie_word_embeddings": False}
TRAINED = {"num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
OTHER = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}


@pytest.fixture(autouse=True)
def quiet(quiet_transformers: None) -> None:
    """transformers is the oracle here."""


def llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    return model.eval()


def plain(model: LlamaForCausalLM) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return content


def composer(model: LlamaForCausalLM) -> dict[str, Any]:
    kept = {"content": plain(model), "file_extension": ".json", "class": "transformers.models.llama.LlamaForCausalLM"}
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    return {"state": {"model": weights, "integrations": {"huggingface": {"model": {"config": kept}, "tokenizer": {}}}}, "rng": []}


def lightning(model: LlamaForCausalLM) -> dict[str, Any]:
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    config = {**plain(model), "architectures": ["LlamaForCausalLM"]}
    return {"state_dict": weights, "pytorch-lightning_version": "2.5.0", "hyper_parameters": {"model_config": config}}


def own_loop(model: LlamaForCausalLM) -> dict[str, Any]:
    return {"model": model.state_dict(), "config": model.config.to_dict(), "step": 5}


def pickled(model: LlamaForCausalLM) -> dict[str, Any]:
    return {"model": model.state_dict(), "config": model.config}


def in_file(content: dict[str, Any], folder: Path) -> Path:
    folder.mkdir()
    torch.save(content, folder / "last.pt")
    return folder / "last.pt"


def in_dcp(content: dict[str, Any], folder: Path) -> Path:
    dcp.save({"state": content["state"]}, checkpoint_id=folder / "ep1-ba100")
    return folder / "ep1-ba100"


def in_dcp_of_lightning(content: dict[str, Any], folder: Path) -> Path:
    step = folder / "epoch=1-step=100"
    dcp.save({"state_dict": content.pop("state_dict")}, checkpoint_id=step)
    torch.save(content, step / "meta.pt")
    return step


def in_deepspeed(content: dict[str, Any], folder: Path) -> Path:
    step = folder / "global_step5"
    step.mkdir(parents=True)
    weights = content.pop("model")
    shapes = [{name: value.shape for name, value in weights.items()}]
    state = {"module": weights, "param_shapes": shapes, "buffer_names": [], "ds_version": "0.15.0", "ds_config": {}, "mp_world_size": 1}
    torch.save({**state, "dp_world_size": 1, "global_steps": 5, "optimizer": None, **content}, step / "mp_rank_00_model_states.pt")
    return folder


def in_rank_file(content: dict[str, Any], folder: Path) -> Path:
    folder.mkdir()
    torch.save(content, folder / "model_world_size_1_rank_0.pt")
    return folder


SAVES = [
    (composer, in_file),
    (composer, in_dcp),
    (lightning, in_file),
    (own_loop, in_file),
    (pickled, in_file),
    (own_loop, in_rank_file),
    (own_loop, in_deepspeed),
    (lightning, in_dcp_of_lightning),
]


def codes(result: Any) -> list[str]:
    return [note.code for note in (*result.checkpoint.notes, *result.outputs[0].notes)]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(torch.arange(10)[None]).logits)


@pytest.mark.parametrize(("content", "saved"), SAVES)
def test_a_base_with_other_settings_gives_way(content: Callable[..., Any], saved: Callable[..., Path], tmp_path: Path) -> None:
    trained = llama(**TRAINED)
    llama(**OTHER).save_pretrained(tmp_path / "base")
    llama(**TRAINED).save_pretrained(tmp_path / "right")
    path = saved(content(trained), tmp_path / "run")
    result = ckpt_cli.merge(path, tmp_path / "out", base=tmp_path / "base")
    (note,) = [note for note in result.checkpoint.notes if note.code == "other-settings"]
    for told in ("num_attention_heads is 4, in the checkpoint 8", "rms_norm_eps", "rope_theta", "that of the checkpoint is written"):
        assert told in note.text
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(loaded), logits(trained), atol=1e-5)
    assert ckpt_cli.verify(tmp_path / "out", against=path).exit_code == 0
    assert "other-settings" not in codes(ckpt_cli.merge(path, tmp_path / "same", base=tmp_path / "right"))
    assert (tmp_path / "same" / "config.json").read_text() == (tmp_path / "right" / "config.json").read_text()


@pytest.mark.parametrize(("content", "saved"), SAVES[:3])
def test_it_is_the_config_where_there_is_no_other(content: Callable[..., Any], saved: Callable[..., Path], tmp_path: Path) -> None:
    trained = llama(**TRAINED)
    result = ckpt_cli.merge(saved(content(trained), tmp_path / "run"), tmp_path / "out", dtype="bf16")
    assert "config-made" in codes(result)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.allclose(logits(loaded), logits(trained), atol=0.5)
    assert loaded.config.num_attention_heads == 8


def test_a_config_beside_the_checkpoint_stays_and_is_compared(tmp_path: Path) -> None:
    path = in_file(lightning(llama(**TRAINED)), tmp_path / "run")
    other = llama(**OTHER).config
    other.architectures = ["LlamaForCausalLM"]
    other.save_pretrained(tmp_path / "run")
    result = ckpt_cli.merge(path, tmp_path / "out")
    (note,) = [note for note in result.checkpoint.notes if note.code == "other-settings"]
    assert "is written" not in note.text
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_attention_heads"] == 4


def small_teacher(content: dict[str, Any]) -> None:
    content["hyper_parameters"]["teacher"] = {**content["hyper_parameters"].pop("model_config"), "hidden_size": 64}


def two_that_differ(content: dict[str, Any]) -> None:
    content["hyper_parameters"]["reference"] = {**content["hyper_parameters"]["model_config"], "rope_theta": 1.0}


def code_of_its_own(content: dict[str, Any]) -> None:
    content["hyper_parameters"]["model_config"]["auto_map"] = {"AutoModel": "modeling.Own"}


def no_class(content: dict[str, Any]) -> None:
    content["hyper_parameters"]["model_config"]["architectures"] = None


def no_config(content: dict[str, Any]) -> None:
    content["hyper_parameters"] = {"model_type": "llama", "lr": 1e-5}


@pytest.mark.parametrize("change", [small_teacher, two_that_differ, code_of_its_own, no_class, no_config])
def test_what_may_not_be_the_config_of_these_weights_is_not_written(change: Callable[[Any], None], tmp_path: Path) -> None:
    content = lightning(llama(**TRAINED))
    change(content)
    result = ckpt_cli.merge(in_file(content, tmp_path / "run"), tmp_path / "out")
    assert "config-made" not in codes(result)
    assert not (tmp_path / "out" / "config.json").exists()
    assert ("no-config" in codes(result)) == (change in (code_of_its_own, no_class))


MARKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"eos_token_id": 1}, {"eos_token_id": 7}),
    ({"eos_token_id": [1, 2]}, {"eos_token_id": 1}),
    ({}, {"id2label": {"0": "no", "1": "yes"}}),
    ({"id2label": {"0": "no", "1": "yes"}}, {"id2label": {"0": "yes", "1": "no"}}),
    ({}, {"problem_type": "multi_label_classification"}),
    ({"pad_token_id": 0}, {"pad_token_id": 2, "architectures": ["LlamaForSequenceClassification"]}),
]
NO_MARKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"eos_token_id": [1]}, {"eos_token_id": 1}),
    ({}, {"eos_token_id": 7}),
    ({"eos_token_id": 7}, {}),
    ({"pad_token_id": 0}, {"pad_token_id": 2}),
    ({}, {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "problem_type": None}),
    ({"id2label": {"0": "no"}, "problem_type": "regression"}, {"id2label": {0: "no"}, "problem_type": "regression"}),
]


@pytest.mark.parametrize(("mine", "other"), MARKS)
def test_ends_and_labels_are_compared(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert [entry.key for entry in other_marks(mine, other)] == [key for key in other if key != "architectures"]


@pytest.mark.parametrize(("mine", "other"), NO_MARKS)
def test_ends_and_labels_that_are_the_same_or_not_said_are_none(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert other_marks(mine, other) == []


def test_a_base_that_ends_texts_elsewhere_gives_way(tmp_path: Path) -> None:
    base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.config(eos_token_id=1), {"generation_config.json": {"eos_token_id": 1}})
    torch.save({"model": tiny.weights(1), "config": tiny.config(eos_token_id=7)}, tmp_path / "last.pt")
    result = ckpt_cli.merge(tmp_path / "last.pt", tmp_path / "out", base=base)
    assert {"other-settings", "other-end"} <= set(codes(result))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 7
    same = tiny.folder(tmp_path / "same", tiny.weights(), tiny.config(eos_token_id=7), {"generation_config.json": {"eos_token_id": 7}})
    assert not {"other-settings", "other-end"} & set(codes(ckpt_cli.merge(tmp_path / "last.pt", tmp_path / "right", base=same)))
