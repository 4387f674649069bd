"""What a training noted of its model in its own files, and a config.json of the base contradicts."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_cli
from ckpt_cli.files.texts.yaml_text import read_yaml
from ckpt_cli.hub.entries.recorded import contradicted
from tests import tiny

SCALED = {"type": "linear", "factor": 4.0}


@dataclass
class Arguments:
    """Settings as a program's own class has them."""

    rope_theta: float = 5e5
    more: dict[str, Any] = field(default_factory=dict)


def of_swift(run: Path, step: Path) -> None:
    (step / "args.json").write_text(json.dumps({"model_type": "llama", "rope_scaling": SCALED, "num_labels": None, "seed": 1}))


def of_llama_factory(run: Path, step: Path) -> None:
    (run / "training_args.yaml").write_text("bf16: true\nlora_rank: 8\nrope_scaling: linear\nstage: sft\n")


def of_hydra(run: Path, step: Path) -> None:
    (run / ".hydra").mkdir()
    (run / ".hydra" / "config.yaml").write_text(
        "model:  # the policy\n  path: /base\n  override_config: {rope_theta: 5e5, use_cache: false}\n"
    )


def of_a_program(run: Path, step: Path) -> None:
    (step / "model_config.json").write_text(json.dumps({**tiny.config(), "rms_norm_eps": 1e-3}))


def of_trl(run: Path, step: Path) -> None:
    torch.save(argparse.Namespace(output_dir="out", model_init_kwargs={"rope_theta": 5e5}), step / "training_args.bin")


BESIDE = {
    of_swift: "rope_scaling",
    of_llama_factory: "rope_scaling",
    of_hydra: "rope_theta",
    of_a_program: "rms_norm_eps",
    of_trl: "rope_theta",
}


def lora(step: Path) -> None:
    """A step of the Trainer with an adapter alone, which has no config.json."""
    tiny.adapter(step, tiny.factors(), "base")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (step / name).unlink(missing_ok=True)


def told(result: Any) -> list[str]:
    return [note.text for note in (*result.checkpoint.notes, *result.outputs[0].notes) if note.code == "recorded-settings"]


@pytest.mark.parametrize("noted", BESIDE, ids=lambda noted: noted.__name__)
def test_a_file_of_the_step_or_its_run_is_read(noted: Callable[[Path, Path], None], tmp_path: Path) -> None:
    run, step = tmp_path / "run", tmp_path / "run" / "checkpoint-10"
    lora(step)
    base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.config())
    assert not told(ckpt_cli.merge(run, tmp_path / "before", base=base))
    noted(run, step)
    (text,) = told(ckpt_cli.merge(run, tmp_path / "out", base=base))
    assert BESIDE[noted] in text
    # A config.json that training saved goes before its arguments, but not before another config of the model.
    (step / "config.json").write_text(json.dumps(tiny.config()))
    assert bool(told(ckpt_cli.merge(run, tmp_path / "own", base=base))) == (noted is of_a_program)


SAVED = {
    "of Lightning": {"state_dict": None, "pytorch-lightning_version": "2.5.0", "hyper_parameters": {"rope_theta": 5e5, "lr": 1e-4}},
    "of argparse": {"model": None, "args": argparse.Namespace(rope_theta=5e5, lr=1e-4)},
    "of a class": {"model": None, "model_args": Arguments()},
    "nested": {"model": None, "config": {"model": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}}},
}


@pytest.mark.parametrize("content", SAVED.values(), ids=SAVED)
def test_a_checkpoint_says_so_itself(content: dict[str, Any], tmp_path: Path) -> None:
    base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.config())
    torch.save({key: tiny.weights(1) if value is None else value for key, value in content.items()}, tmp_path / "last.pt")
    (text,) = told(ckpt_cli.merge(tmp_path / "last.pt", tmp_path / "out", base=base))
    assert "rope_theta 500000.0 (10000.0 in config.json)" in text
    same = tiny.folder(tmp_path / "same", tiny.weights(), tiny.config(rope_theta=5e5))
    assert not told(ckpt_cli.merge(tmp_path / "last.pt", tmp_path / "right", base=same))


@pytest.mark.filterwarnings("ignore")
def test_objects_of_a_dcp_folder_say_so(tmp_path: Path) -> None:
    base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.config())
    noted = {"lr": 1e-4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "teacher": {"rope_theta": 5e5}}
    dcp.save({"model": tiny.weights(1), "args": noted, "step": 3}, checkpoint_id=tmp_path / "run" / "step_3", no_dist=True)
    (text,) = told(ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base))
    assert "(at args)" in text
    assert "rope_scaling {'rope_type': 'linear', 'factor': 4.0} (none" in text
    assert "rope_theta" not in text


@pytest.mark.parametrize("given", ["", "checkpoints", "checkpoints/epoch=0-step=10.ckpt"])
def test_hyperparameters_beside_the_folder_of_checkpoints_are_read(given: str, tmp_path: Path) -> None:
    base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.config())
    version = tmp_path / "lightning_logs" / "version_0"
    (version / "checkpoints").mkdir(parents=True)
    weights = {f"model.{name}": value for name, value in tiny.weights(1).items()}
    content = {"state_dict": weights, "global_step": 10, "pytorch-lightning_version": "2.5.0"}
    torch.save(content, version / "checkpoints" / "epoch=0-step=10.ckpt")
    (version / "hparams.yaml").write_text("lr: 0.0001\nrope_theta: 500000.0\n")
    (text,) = told(ckpt_cli.merge(version / given, tmp_path / "out", base=base))
    assert "hparams.yaml" in text


def test_an_average_tells_it_too(tmp_path: Path) -> None:
    base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.config())
    for step in (1, 2):
        shutil.rmtree(tiny.verl(tmp_path / "run", tiny.weights(step), step=step) / "huggingface")
    (tmp_path / "run" / "config.yaml").write_text("model:\n  rope_theta: 500000\n")
    assert told(ckpt_cli.average(tmp_path / "run", tmp_path / "out", last=2, base=base))


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"rope_scaling": None, "rope_theta": None, "sliding_window": "none"}),
    ({}, {"rope_theta": "1e4", "rms_norm_eps": "1e-06", "hidden_act": "silu"}),
    ({"rope_scaling": {**YARN, "rope_type": "yarn"}}, {"rope_scaling": "yarn", "max_length": 4096}),
    ({"rope_parameters": {**YARN, "rope_theta": 1e4}}, {"rope_scaling": YARN}),
    ({}, {"teacher": {"rope_theta": 1e6}, "reward_model": {"config": {"rope_theta": 1e6}}}),
    ({}, {"hidden_size": 4096, "rope_theta": 1e6, "vision": {"num_attention_heads": 16}}),
    ({}, {"stage_1": {"rope_theta": 1e6}, "stage_2": {"rope_theta": 1e4}}),
    ({}, {"attention_dropout": 0.3, "seed": 7, "num_labels": 4, "torch_dtype": "float16", "use_cache": False}),
    ({"use_sliding_window": False, "sliding_window": None}, {"sliding_window": 4096, "use_sliding_window": False}),
    ({"image_size": 224}, {"image_size": 448}),
    ({"rope_scaling": None}, {"rope_scaling": True, "rope_parameters": 2.0}),
    ({"rope_scaling": None}, {"rope_scaling": '{"type": "yarn"}'}),
    ({"qk_head_dim": 192}, {"hidden_size": 16, "num_attention_heads": 4, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64}),
    ({"eos_token_id": 1, "id2label": {"0": "no"}}, {"eos_token_id": 7, "id2label": {0: "no"}, "problem_type": None}),
]


@pytest.mark.parametrize(("changes", "noted"), SAME)
def test_what_agrees_or_is_about_something_else_is_no_warning(changes: dict[str, Any], noted: dict[str, Any]) -> None:
    config = {key: value for key, value in tiny.config(**changes).items() if key != "rope_theta" or "rope_parameters" not in changes}
    assert contradicted(config, noted) == []


TIMM: dict[str, Any] = {"architecture": "vit_tiny", "pretrained_cfg": {"mean": [0.4, 0.4, 0.4], "std": [0.2, 0.2, 0.2], "crop_pct": 0.9}}
OTHER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"model": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}}, "rope_scaling"),
    ({"rope_scaling": YARN}, {"rope_scaling": {**YARN, "factor": 8.0}}, "rope_scaling"),
    ({"rope_scaling": YARN}, {"rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_theta": None}, {"rope_scaling": "linear", "rope_theta": 5e5}, "rope_scaling"),
    ({"text_config": {"rope_theta": 1e6}}, {"rope_theta": 5e5}, "rope_theta"),
    (TIMM, {"model": "timm/vit_tiny.in21k", "mean": [0.5, 0.5, 0.5], "crop_pct": None, "num_classes": None, "scale": [0.1, 1.0]}, "mean"),
    ({}, {"override_config": {"num_attention_heads": 2}}, "num_attention_heads"),
    ({"image_size": 224}, {"hidden_size": 16, "num_hidden_layers": 2, "image_size": 448}, "image_size"),
    ({}, {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({}, {"task_type": "seq_cls", "problem_type": "multi_label_classification"}, "problem_type"),
    ({}, {"hparams": {"id2label": {0: "no", 1: "yes"}}}, "id2label"),
    ({"eos_token_id": 1}, {"model": {"hidden_size": 16, "num_hidden_layers": 2, "eos_token_id": 7}}, "eos_token_id"),
]


@pytest.mark.parametrize(("changes", "noted", "key"), OTHER)
def test_an_entry_of_the_model_counts_at_every_level(changes: dict[str, Any], noted: dict[str, Any], key: str) -> None:
    assert [entry.key for entry in contradicted(tiny.config(**changes), noted)] == [key]


TEXT = """\
a:   # of the user
  b: {type: linear, factor: 4.0}   # said so
  c: [1, 2]
  d:
  - x
  e: |
    long
  f: &one
    g: 1
  h: !!python/object:some.Class
    i: 1
  j: "k"
l: 1e-5
m:
"""


def test_yaml_is_read_as_far_as_it_is_plain() -> None:
    assert read_yaml(f"---\n{TEXT}", lambda _: "?") == {
        "a": {"b": {"type": "linear", "factor": 4.0}, "c": [1, 2], "d": ["x"], "e": "?", "f": "?", "h": "?", "j": "k"},
        "l": 1e-5,
        "m": None,
    }
    assert read_yaml("- a\n- b\n", lambda _: None) == {} == read_yaml("", lambda _: None)


def composer(end: str, template: str | None = None) -> dict[str, Any]:
    """What Composer saves: every file of the tokenizer by its name, with its content."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "chat_template": template}
    held = {"tokenizer_config": {"file_extension": ".json", "content": settings}}
    return {"state": {"model": tiny.weights(1), "integrations": {"huggingface": {"model": {}, "tokenizer": held}}}, "rng": []}


@pytest.mark.parametrize(
    ("end", "template", "word"), [("t1", None, ""), ("t7", None, "t7 (t1 here)"), ("t1", "{{ x }}", "another chat template")]
)
def test_the_tokenizer_in_a_checkpoint_is_compared_with_that_of_the_base(end: str, template: str | None, word: str, tmp_path: Path) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t1", "chat_template": "{{ y }}"}
    base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.config(), {"tokenizer_config.json": settings})
    torch.save(composer(end, template), tmp_path / "ep1-ba10.pt")
    result = ckpt_cli.merge(tmp_path / "ep1-ba10.pt", tmp_path / "out", base=base)
    texts = [note.text for note in result.checkpoint.notes if note.code == "kept-tokenizer"]
    assert len(texts) == bool(word)
    assert all(word in text for text in texts)
    alone = ckpt_cli.merge(tmp_path / "ep1-ba10.pt", tmp_path / "alone")
    assert [note.code for note in alone.checkpoint.notes].count("kept-tokenizer") == 1
