"""Counts in config.json that are no whole numbers are told wherever they stand; what a class may leave open is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from ckpt_cli.hub.classes.config_counts import mismatches
from tests import tiny
from tests.architectures import MODELS, answered_here, build


@pytest.fixture(autouse=True)
def asked_here(quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers answers in this process, which has it already."""
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


@pytest.fixture(params=["with transformers", "alone"])
def anyhow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "alone":
        for module in ("expected_tensors", "rules", "transformers_child"):
            monkeypatch.setattr(f"ckpt_cli.hub.classes.{module}.installed_version", lambda: None)
    return str(request.param)


def saved(folder: Path, name: str, place: tuple[str, ...], value: object) -> Path:
    kind, model_type, options = MODELS[name]
    build(kind, model_type, options).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    level = content
    for key in place[:-1]:
        level = level[key]
    assert place[-1] in level
    level[place[-1]] = value
    (folder / "config.json").write_text(json.dumps(content))
    return folder


COUNTS: list[tuple[str, tuple[str, ...]]] = [
    ("qwen2", ("num_hidden_layers",)),
    ("qwen2", ("num_attention_heads",)),
    ("qwen2", ("vocab_size",)),
    ("qwen2", ("hidden_size",)),
    ("mixtral", ("num_local_experts",)),
    ("deepseek_v3", ("n_routed_experts",)),
    ("gpt2", ("n_layer",)),
    ("t5", ("d_model",)),
    ("bart", ("encoder_layers",)),
    ("qwen2_5_vl", ("text_config", "num_hidden_layers")),
    ("qwen2_5_vl", ("vision_config", "depth")),
    ("clip", ("vision_config", "hidden_size")),
]


@pytest.mark.parametrize(("name", "place"), COUNTS, ids=lambda value: value if isinstance(value, str) else ".".join(value))
@pytest.mark.parametrize("value", ["2", 2.0, True, -2], ids=str)
def test_a_count_that_is_no_whole_number(tmp_path: Path, anyhow: str, name: str, place: tuple[str, ...], value: Any) -> None:
    """transformers refuses such a config, or builds less than the model."""
    run = saved(tmp_path / "run", name, place, value)
    result = ckpt_cli.verify(run)
    said = [item.message for item in result.findings if item.code == "odd-count"]
    assert said == [f"config.json says {'.'.join(place)} {json.dumps(value)}, where a whole number is needed"]
    assert result.exit_code == 1


@pytest.mark.parametrize("value", ["2", 2.0, True, -2, None], ids=str)
def test_is_refused_by_merge(tmp_path: Path, anyhow: str, value: object) -> None:
    """No loader makes the trained model of it: `verify` calls it an error."""
    run = saved(tmp_path / "run", "qwen2", ("num_hidden_layers",), value)
    with pytest.raises(Inconsistent) as caught:
        ckpt_cli.merge(run, tmp_path / "out")
    assert caught.value.message == f"config.json says num_hidden_layers {json.dumps(value)}, where a whole number is needed"
    assert (caught.value.path, caught.value.hint) == (str(run / "config.json"), "correct config.json")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("of", [tiny.unknown(num_hidden_layers=2.0), tiny.config(num_hidden_layers=2.0, auto_map={"AutoModel": "m.M"})])
def test_of_a_class_of_its_own_is_a_warning_of_both(tmp_path: Path, of: dict[str, Any]) -> None:
    """What its code makes of the count is not known."""
    run = tiny.folder(tmp_path / "run", tiny.weights(), of)
    told = [note.level for note in ckpt_cli.merge(run, tmp_path / "out").outputs[0].notes if note.code == "unusual-count"]
    found = [item.severity for item in ckpt_cli.verify(tmp_path / "out").findings if item.code == "unusual-count"]
    assert told == found == ["warning"]


@pytest.mark.parametrize(
    "config",
    [
        {"num_key_value_heads": None, "head_dim": None},
        {"vocab_size": None, "num_hidden_layers": 2},
        {"hidden_size": None, "text_config": {"hidden_size": 4}},
        {"hidden_size": None, "auto_map": {"AutoModel": "modeling.Model"}},
        {"max_position_embeddings": 1200.0},
        {"max_position_embeddings": -1},
        {"num_attention_heads": [1, 2, 4], "intermediate_size": [8, 8]},
        {"mamba_dt_rank": "auto", "mlp_ratio": 4.0, "hidden_act": "silu", "initializer_range": 0.02},
        {"quantization_config": {"bits": "4"}},
        {"intermediate_size_ratio": 2.5, "hidden_size_multiplier": 1.5},
    ],
    ids=str,
)
def test_what_may_be_open_or_no_count(config: dict[str, Any]) -> None:
    assert not {"odd-count", "unusual-count"} & {item.code for item in mismatches(config, {}, known=False)}


def test_no_default_config_of_transformers_has_one() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    told = []
    for model_type in list(CONFIG_MAPPING.keys())[::5]:
        try:
            content = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
        except Exception:  # noqa: BLE001 - some have no defaults
            continue
        told += [(model_type, item.text) for item in mismatches(content, {}, known=False) if item.code.endswith("-count")]
    assert told == []
