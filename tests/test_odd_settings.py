"""Numbers of a config that are NaN, or infinite where they decide what is computed, are told wherever they stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.hub.classes.config_counts import mismatches, odd_settings
from ckpt_cli.hub.settings import different_settings
from tests.architectures import MODELS, answered_here, build

NAN, INFINITE = float("nan"), float("inf")
Place = tuple[str, ...]

ODD: list[tuple[dict[str, Any], list[str]]] = [
    ({"rms_norm_eps": NAN}, ["rms_norm_eps NaN"]),
    ({"rope_theta": INFINITE}, ["rope_theta Infinity"]),
    ({"rope_theta": -INFINITE}, ["rope_theta -Infinity"]),
    ({"text_config": {"rms_norm_eps": NAN}, "vision_config": {"layer_norm_eps": INFINITE}}, ["text_config.rms_norm_eps NaN"] * 2),
    ({"rope_parameters": {"full_attention": {"rope_theta": INFINITE}}}, ["rope_parameters.full_attention.rope_theta Infinity"]),
    ({"rope_scaling": {"factor": INFINITE, "short_factor": [1.0, NAN, NAN]}}, ["rope_scaling.factor Infinity"] * 2),
    ({"final_logit_softcapping": INFINITE}, ["final_logit_softcapping Infinity"]),
    ({"attention_multiplier": NAN}, ["attention_multiplier NaN"]),
    ({"whatever": [[NAN]]}, ["whatever NaN"]),
    ({"max_position_embeddings": NAN}, ["max_position_embeddings NaN"]),
    ({"rms_norm_eps": {"__float__": "NaN"}}, ["rms_norm_eps NaN"]),
    ({"moe": {"num_experts": NAN}}, ["moe.num_experts NaN"]),
]


@pytest.mark.parametrize(("config", "said"), ODD, ids=str)
def test_are_told_at_every_depth(config: dict[str, Any], said: list[str]) -> None:
    told = list(odd_settings(config))
    assert len(told) == len(said)
    assert told[0] == f"{said[0]}, where a finite number is needed"


FINE: list[dict[str, Any]] = [
    {"time_step_limit": [0.0, INFINITE]},
    {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
    {"text_config": {"swiglu_limit": INFINITE}, "best_metric": -INFINITE},
    {"rms_norm_eps": 1e-6, "rope_theta": 1e30, "rope_scaling": None, "name": "NaN", "rope_type": "Infinity"},
    {"__float__": "NaN"},
]


@pytest.mark.parametrize("config", FINE, ids=str)
def test_limits_may_be_infinite(config: dict[str, Any]) -> None:
    assert list(odd_settings(config)) == []


def test_counts_are_told_once() -> None:
    told = [item.code for item in mismatches({"text_config": {"hidden_size": NAN}, "vocab_size": INFINITE}, {}, known=False)]
    assert told == ["unusual-count", "unusual-count"]


@pytest.mark.parametrize("model_type", ["mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "gemma3", "qwen3"])
def test_no_config_that_transformers_writes_has_one(model_type: str) -> None:
    """The first five of these have an infinite limit."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    content = json.loads(auto.CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    assert list(odd_settings(content)) == []


def test_the_same_in_two_configs_is_no_difference() -> None:
    assert different_settings({"rms_norm_eps": NAN}, {"rms_norm_eps": float("nan")}) == []


class TestAFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path, quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)
        kind, model_type, options = MODELS["qwen2"]
        build(kind, model_type, options).save_pretrained(tmp_path / "run")
        return tmp_path / "run"

    def test_with_nan_in_config_json_is_wrong_and_a_merge_warns(self, folder: Path, tmp_path: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, "rms_norm_eps": NAN}))
        (found,) = ckpt_cli.verify(folder).of_severity("error")
        assert (found.code, found.message) == ("odd-setting", "config.json says rms_norm_eps NaN, where a finite number is needed")
        (told,) = [note for note in ckpt_cli.merge(folder, tmp_path / "out").outputs[0].notes if note.code == "odd-setting"]
        assert told.level == "warning"
        assert told.text.startswith(found.message)

    @pytest.mark.parametrize(("name", "key"), [("generation_config.json", "temperature"), ("preprocessor_config.json", "rescale_factor")])
    def test_with_nan_in_another_config_is_wrong(self, folder: Path, name: str, key: str) -> None:
        (folder / name).write_text(json.dumps({key: NAN}))
        (found,) = [item for item in ckpt_cli.verify(folder).findings if item.code == "odd-setting"]
        assert (found.file, found.message) == (name, f"it says {key} NaN, where a finite number is needed")
