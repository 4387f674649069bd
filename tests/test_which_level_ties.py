"""Whether a head is tied is what its class says: the flag of the outer config, of the language model, or of the class itself."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckpt_cli
from ckpt_cli.hub.classes import transformers_child
from ckpt_cli.hub.classes.tying import ties_embeddings
from tests.architectures import answered_here
from tests.tensors import load

HEAD = "lm_head.weight"
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
TEXT = {
    **SIZES,
    "vocab_size": 24,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
}
TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16, "num_position_embeddings": 4}
SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
COMPOSED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", {**TOWER, "deepstack_visual_indexes": []}),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", TOWER),
    "gemma3": ("Gemma3ForConditionalGeneration", SIGLIP),
}


@pytest.fixture(autouse=True)
def asked_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(transformers_child, "_run_child", answered_here)


def flagged(config: dict[str, Any], outer: bool | None, inner: bool | None) -> dict[str, Any]:
    for level, flag in ((config, outer), (config["text_config"], inner)):
        level.pop("tie_word_embeddings", None)
        if flag is not None:
            level["tie_word_embeddings"] = flag
    return config


def model_of(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    kind = getattr(transformers, config["architectures"][0])
    return kind(transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config))


def composed(model_type: str, outer: bool | None, inner: bool | None) -> dict[str, Any]:
    kind, tower = COMPOSED[model_type]
    return flagged(
        {"model_type": model_type, "architectures": [kind], "text_config": dict(TEXT), "vision_config": dict(tower)}, outer, inner
    )


def run_of(folder: Path, config: dict[str, Any], *, same: bool = True) -> tuple[Path, Path]:
    """A run whose head equals its embedding, if ``same``, and the folder that transformers makes of it."""
    model = model_of(config)
    if same:
        model.get_output_embeddings().weight.data.copy_(model.get_input_embeddings().weight.data)
    model.save_pretrained(folder / "saved")
    (folder / "run").mkdir()
    torch.save({"model": model.state_dict()}, folder / "run" / "model.pt")
    (folder / "run" / "config.json").write_text(json.dumps(config))
    return folder / "run", folder / "saved"


FLAGS = [(False, True), (None, True), (True, False), (False, False)]


@pytest.mark.parametrize("model_type", COMPOSED)
@pytest.mark.parametrize(("outer", "inner"), FLAGS)
def test_the_tensors_are_those_that_transformers_saves(tmp_path: Path, model_type: str, outer: bool | None, inner: bool | None) -> None:
    run, saved = run_of(tmp_path, composed(model_type, outer, inner))
    ckpt_cli.merge(run, tmp_path / "out")
    assert load(tmp_path / "out").keys() == load(saved).keys()
    assert ckpt_cli.verify(tmp_path / "out", against=run).exit_code == 0


def test_an_average_keeps_the_head_too(tmp_path: Path) -> None:
    run, saved = run_of(tmp_path, composed("qwen3_vl", False, True))
    ckpt_cli.average([run, run], tmp_path / "out")
    assert load(tmp_path / "out").keys() == load(saved).keys()


def test_a_head_of_its_own_is_no_contradiction(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, composed("qwen3_vl", False, True), same=False)
    result = ckpt_cli.merge(run, tmp_path / "out").outputs[0]
    assert HEAD in load(tmp_path / "out")
    assert "tied-heads-differ" not in {note.code for note in result.notes}


@pytest.mark.parametrize("flag", [True, False, None])
def test_an_encoder_decoder_ties_what_its_class_ties(tmp_path: Path, flag: bool | None) -> None:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 24}
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **sizes}
    if flag is not None:
        config["tie_word_embeddings"] = flag
    run, saved = run_of(tmp_path, config)
    ckpt_cli.merge(run, tmp_path / "out")
    # Version 4 obeys a no, which version 5 does not: a head that is left out would be a new one there.
    assert load(tmp_path / "out").keys() == load(saved).keys() | ({HEAD} if flag is False else set())


CLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
PARTS = {
    "qwen3_vl": ("qwen3_vl_text", "qwen3_vl_vision"),
    "qwen2_5_vl": ("qwen2_5_vl_text", "qwen2_5_vl_vision"),
    "gemma3": ("gemma3_text", "siglip_vision_model"),
    "llava": ("llama", "clip_vision_model"),
    "mistral3": ("mistral", "pixtral"),
    "internvl": ("qwen2", "internvl_vision"),
}
"""The types of the parts for which the shipped rules were made."""

CLASSES = {
    "llava": "LlavaForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
}


@pytest.mark.parametrize("model_type", PARTS)
def test_without_transformers_the_shipped_rules_say_what_the_class_does(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    kind, tower = COMPOSED.get(model_type, (CLASSES.get(model_type, ""), CLIP))
    kept = []
    for outer, inner in itertools.product((None, False, True), repeat=2):
        config = flagged(
            {"model_type": model_type, "architectures": [kind], "text_config": dict(TEXT), "vision_config": dict(tower)}, outer, inner
        )
        for part, of in zip(("text_config", "vision_config"), PARTS[model_type], strict=True):
            config[part]["model_type"] = of
        model = model_of(json.loads(json.dumps(config)))
        kept.append((config, outer, inner, model.get_output_embeddings().weight is model.get_input_embeddings().weight))
    for module in ("expected_tensors", "rules", "transformers_child"):
        monkeypatch.setattr(f"ckpt_cli.hub.classes.{module}.installed_version", lambda: None)
    assert [(outer, inner, ties_embeddings(config)) for config, outer, inner, _ in kept] == [(o, i, tied) for _, o, i, tied in kept]
