"""A rotary embedding is told by what transformers makes of config.json, however its version writes it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.hub.settings import differences, different_settings
from tests import tiny

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6, "vocab_size": 64}
YARN = {"rope_type": "yarn", "factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}

FLAT: list[dict[str, Any]] = [
    {"rope_theta": 1e4},
    {"rope_theta": 1e4, "rope_scaling": None},
    {"rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "bfloat16", "dtype": "float32"},
    {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16"},
    {"rope_theta": 1e4, "rope_scaling": {"type": "default", "rope_type": "linear", "factor": 2.0}},
    {"rope_theta": 1e4, "rope_scaling": YARN},
    {"rope_theta": 1e4, "rope_scaling": {**YARN, "original_max_position_embeddings": 32}},
    {"rope_theta": 1e4, "rope_scaling": {**YARN, "original_max_position_embeddings": 64}},
    {"rope_theta": 1e4, "rope_scaling": YARN, "original_max_position_embeddings": 32},
    {"rope_theta": 1e4, "rope_scaling": {**YARN, "original_max_position_embeddings": 64}, "original_max_position_embeddings": 32},
    {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 10000, "type": "default"}, "dtype": "float32"},
    {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 1e4, **LINEAR}},
    {"rope_parameters": {"rope_theta": 1e4, **YARN, "original_max_position_embeddings": 32}},
    {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "rope_theta": 1e6},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e6},
    {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_theta": 1e4, "rope_scaling": YARN},
    {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "rope_theta": 1e4, "rope_scaling": LINEAR},
    {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "rope_scaling": {"rope_theta": 1e4, **YARN}},
    {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "rope_theta": 1e4, "rope_scaling": {}},
    {"rope_parameters": {"rope_theta": 1e4, **YARN}, "rope_theta": 1e4, "rope_scaling": None},
]
PARTIAL: list[dict[str, Any]] = [
    {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_scaling": LINEAR},
    {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "partial_rotary_factor": 0.25},
    {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5},
    {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"partial_rotary_factor": 0.25, **LINEAR}},
]
WINDOWS: list[dict[str, Any]] = [
    {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    {"rope_theta": 1e6, "rope_local_base_freq": 1e3},
    {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR},
    {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "type": "default"}, "sliding_attention": {"rope_theta": 1e4}}},
    {"rope_parameters": {"full_attention": {"rope_theta": 1e6, **LINEAR}, "sliding_attention": {"rope_theta": 1e4}}},
    {"rope_parameters": {"full_attention": {"rope_theta": 1e6, **LINEAR}, "sliding_attention": {"rope_theta": 1e3}}},
    {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, "rope_scaling": LINEAR},
    {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}, "rope_theta": 1e6, "rope_local_base_freq": 1e3},
]
GRIDS = {"llama": FLAT, "glm": PARTIAL, "gemma3_text": WINDOWS}


def rotary(model_type: str, entries: dict[str, Any], folder: Path) -> Any:
    """What transformers loads, without what it keeps of older names."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(entries | {"model_type": model_type}))
    loaded = auto.AutoConfig.from_pretrained(folder)
    loaded.standardize_rope_params()  # as the model does when it computes frequencies
    rope = loaded.rope_parameters
    layers = rope if isinstance(rope.get("full_attention"), dict) else {"": rope}
    return {kind: {key: value for key, value in entries.items() if key != "type"} for kind, entries in layers.items()}


@pytest.mark.parametrize("nested", [False, True], ids=["whole", "text_config"])
@pytest.mark.parametrize("model_type", GRIDS)
def test_settings_differ_exactly_where_transformers_loads_others(model_type: str, nested: bool, tmp_path: Path) -> None:
    configs = [{**SIZES, "max_position_embeddings": 64, **entries} for entries in GRIDS[model_type]]
    loaded = [rotary(model_type, config, tmp_path / f"{number}") for number, config in enumerate(configs)]
    assert sum(one == other for one, other in itertools.combinations(loaded, 2)) >= 3
    for (mine, mine_loaded), (other, other_loaded) in itertools.product(zip(configs, loaded, strict=True), repeat=2):
        pair = ({"text_config": mine}, {"text_config": other} if mine is not other else other) if nested else (mine, other)
        told = [entry.key for entry in different_settings(*pair)]
        assert bool(told) == (mine_loaded != other_loaded), (mine, other, told)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ({"rotary_pct": 0.25, "rotary_emb_base": 10000}, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
        ({"rope_scaling": YARN}, {"rope_scaling": {**YARN, "beta_fast": 32, "beta_slow": 1.0, "truncate": True}}),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0]}}, {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}),
        (
            {"global_rope_theta": 1.6e5, "local_rope_theta": 1e4},
            {"rope_parameters": {"full_attention": {"rope_theta": 1.6e5}, "sliding_attention": {"rope_theta": 1e4}}},
        ),
    ],
)
def test_names_of_single_families_and_what_a_kind_leaves_unsaid(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert different_settings(mine, other) == different_settings(other, mine) == []


def test_another_entry_than_a_kind_leaves_unsaid_is_told() -> None:
    assert [entry.key for entry in differences({"rope_scaling": YARN}, {"rope_scaling": {**YARN, "beta_fast": 8}})] == ["rope_scaling"]


class TestScalingThatAUserAdded:
    """beside the entry of transformers 5, as model cards tell to extend the context."""

    @pytest.fixture
    def pair(self, tmp_path: Path) -> tuple[Path, Path]:
        usual = {key: value for key, value in tiny.classless().items() if key != "rope_theta"}
        usual["rope_parameters"] = {"rope_theta": 1e4, "rope_type": "default"}
        plain = tiny.folder(tmp_path / "plain", tiny.weights(1), usual)
        return plain, tiny.folder(tmp_path / "longer", tiny.weights(2), {**usual, "rope_scaling": YARN})

    def test_is_told_by_diff(self, pair: tuple[Path, Path]) -> None:
        (text,) = [note.text for note in ckpt_cli.diff(*pair).notes if note.code == "other-settings"]
        assert "rope_scaling is {'rope_type': 'yarn'" in text

    def test_is_told_in_an_average_and_of_a_base(self, pair: tuple[Path, Path], tmp_path: Path) -> None:
        plain, longer = pair
        averaged = ckpt_cli.average(list(pair), tmp_path / "mean").outputs[0].notes
        assert [note.text for note in averaged if note.code == "configs-differ" and "rope_scaling" in note.text]
        merged = ckpt_cli.merge(longer, tmp_path / "out", base=plain).outputs[0].notes
        assert [note.text for note in merged if note.code == "base-settings" and "rope_scaling" in note.text]
