"""Checkpoints, and an environment, of transformers 4: the same models are found whole, under the names of their files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.hub.classes import compile, expected_tensors, rules
from ckpt_cli.hub.classes.absent.tower_names import as_spelled
from ckpt_cli.hub.classes.known_names import ClassNames, class_names
from ckpt_cli.hub.layers.compared import layer_mismatches
from tests import tiny
from tests.architectures import answered_here
from tests.tensors import load

transformers = pytest.importorskip("transformers")

H = 16
TEXT = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": H,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}
TOWER = {"model_type": "clip_vision_model", "hidden_size": H, "intermediate_size": H, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": TEXT,
    "vision_config": {**TOWER, "image_size": 16, "patch_size": 8, "projection_dim": H},
}
"""The config of a LLaVA that is as small as it can be."""


@pytest.fixture(autouse=True)
def _answers(asked_here: None) -> None:
    pass


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """As this version has them in memory."""
    return {name: tuple(shape) for name, shape in answered_here("tensors", json.dumps(config))["native"].items()}


def deeper(name: str) -> str:
    start, found, rest = name.partition("vision_tower.")
    return f"{start}vision_tower.vision_model.{rest}" if found and not rest.startswith("vision_model.") else name


def saved(folder: Path, config: dict[str, Any], names: dict[str, str]) -> Path:
    """Weights of the class that a config names, each under the name that ``names`` maps it to."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({names[name]: torch.rand(shape) for name, shape in shapes_of(config).items()}, folder / "model.safetensors")
    return folder


def warned(items: Any) -> set[str]:
    return {item.code for item in items if getattr(item, "level", getattr(item, "severity", None)) in ("warning", "error")}


@pytest.mark.parametrize("asked", [True, False], ids=["with transformers", "without"])
def test_towers_that_lie_deeper_in_files_are_whole_and_keep_their_names(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {name: deeper(name) for name in shapes_of(LLAVA)}
    run = saved(tmp_path / "run", LLAVA, names)
    if not asked:
        for module in (expected_tensors, rules):
            monkeypatch.setattr(module, "installed_version", lambda: None)
    told = ckpt_cli.merge(run, tmp_path / "out").outputs[0]
    assert f"{len(names)} of {len(names)}" in told.naming
    assert not warned(told.notes) - {"lacks-asset"}
    assert {name for name in load(tmp_path / "out") if "vision_tower" in name} == {
        name.removeprefix("model.") for name in names.values() if "vision_tower" in name
    }
    assert not warned(ckpt_cli.verify(tmp_path / "out").findings) - {"lacks-processor", "lacks-tokenizer"}


def test_a_tensor_that_such_a_tower_lost_is_missing(tmp_path: Path) -> None:
    names = {name: deeper(name) for name in shapes_of(LLAVA)}
    run = saved(tmp_path / "run", LLAVA, names)
    state = load(run)
    lost = next(name for name in state if "vision_model.encoder" in name)
    save_file({name: tensor for name, tensor in state.items() if name != lost}, run / "model.safetensors")
    found = [item.tensor for item in ckpt_cli.verify(run).findings if item.code == "missing-tensor"]
    assert found == [lost]


@pytest.mark.parametrize(
    ("names", "model_type", "spelled"),
    [
        (["vision_model.encoder.x"], "siglip_vision_model", "vision_model.encoder.x"),
        (["vision_model.encoder.x"], "vit", "encoder.x"),
        (["encoder.x"], "clip_vision_model", "encoder.x"),
    ],
    ids=["a tower alone", "a module of the user's own", "as today"],
)
def test_a_tower_alone(names: list[str], model_type: str, spelled: str) -> None:
    known = ClassNames("", "", frozenset({"encoder.x"}), frozenset({"encoder.x"}), (), ())
    assert as_spelled(known, names, model_type).native == {spelled}


@pytest.mark.parametrize("kind", ["qwen2_vl/Qwen2VLForConditionalGeneration", "qwen2_5_vl/Qwen2_5_VLForConditionalGeneration"])
@pytest.mark.parametrize("of_part", ["the model's", "", "today's", "another's"])
def test_parts_that_had_the_type_of_the_model_are_known(kind: str, of_part: str) -> None:
    model_type, name = kind.split("/")
    part = {"the model's": model_type, "": "", "today's": f"{model_type}_vision", "another's": "siglip_vision_model"}[of_part]
    config = {"model_type": model_type, "architectures": [name], "vision_config": {"model_type": part}}
    assert class_names(config) is not None
    assert (rules._entry(config) is not None) == (of_part != "another's")


def test_one_count_for_the_encoder_and_the_decoder_is_no_lack() -> None:
    """As Whisper's config of transformers 4 has it."""
    config = {"model_type": "whisper", "architectures": ["W"], "num_hidden_layers": 2, "encoder_layers": 2, "decoder_layers": 2}
    shapes = {f"model.{side}.layers.{i}.{leaf}.weight": (4, 4) for side in ("encoder", "decoder") for i in (0, 1) for leaf in "abcdef"}
    assert not list(layer_mismatches(config, shapes, predicted=False))


@pytest.mark.parametrize("tied", [True, False])
def test_version_4_gives_the_same_answer(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers are made without the conversions of version 5."""
    config = tiny.config(tie_word_embeddings=tied)
    today = compile.tensors_of(config)
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    before = compile.tensors_of(config)
    for key in ("native", "hub", "tied", "prefix"):
        assert before[key] == today[key]
    assert len(before["tied"]) == int(tied)


def test_version_4_saves_models_of_vision_under_their_older_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_cli.hub.classes.installed import of_version_4

    class Llava:
        _checkpoint_conversion_mapping: ClassVar = {
            "^language_model.model": "model.language_model",
            "^vision_tower(?!\\.x)": "model.vision_tower",
        }

    monkeypatch.setattr("transformers.modeling_utils.VLMS", ["llava"], raising=False)
    state = {"model.language_model.a": 1, "model.vision_tower.b": 2, "lm_head.c": 3}
    assert of_version_4.names_on_hub(Llava(), state) == {"language_model.model.a": 1, "vision_tower.b": 2, "lm_head.c": 3}
    monkeypatch.setattr("transformers.modeling_utils.VLMS", ["other"])
    assert of_version_4.names_on_hub(Llava(), state) == state


def test_a_config_of_version_5_is_not_asked_of_version_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_tensors, "installed_version", lambda: "4.57.6")
    why = expected_tensors.expected_tensors({**tiny.config(), "transformers_version": "5.24.0"})
    assert why == "config.json was written by transformers 5.24.0, and 4.57.6 is installed"
    assert not isinstance(expected_tensors.expected_tensors({**tiny.config(), "transformers_version": "4.57.6"}), str)
