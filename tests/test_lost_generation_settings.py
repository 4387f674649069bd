"""Settings for generation that only the config.json of a base has, which transformers 5 takes out of the config of a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.hub.entries.generation import DEFAULTS, lost_settings
from tests import tiny

CODE = "generation-settings"
SETTINGS = {"num_beams": 3, "max_length": 30, "forced_bos_token_id": 33, "bad_words_ids": [[59]]}


def told(result: Any) -> str:
    found = [note for note in result.outputs[0].notes if note.code == CODE]
    assert all(note.level == "warning" for note in found)
    return " ".join(note.text for note in found)


def base_of(folder: Path, files: dict[str, Any] | None = None, **changes: Any) -> Path:
    return tiny.folder(folder, tiny.weights(), tiny.config(**changes), files)


def test_a_merge_names_them_and_says_where_they_are(tmp_path: Path) -> None:
    tiny.verl(tmp_path / "run", tiny.weights(1))
    base = base_of(tmp_path / "base", **SETTINGS)
    text = told(ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base))
    for each in ("num_beams 3", "max_length 30", "forced_bos_token_id 33", "bad_words_ids [[59]]"):
        assert each in text
    assert f"copy them from {base / 'config.json'} into config.json of the merged folder" in text
    checked = ckpt_cli.verify(tmp_path / "out", base=base)
    assert [item.severity for item in checked.findings if item.code == CODE] == ["warning"]
    config = json.loads((tmp_path / "out" / "config.json").read_text()) | SETTINGS
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    again = ckpt_cli.verify(tmp_path / "out", base=base)
    assert CODE not in {item.code for item in again.findings}
    assert [item.code for item in again.findings if item.severity == "error"] == []


def test_an_average_too(tmp_path: Path) -> None:
    for step in (1, 2):
        tiny.verl(tmp_path / "run", tiny.weights(step), step=step)
    base = base_of(tmp_path / "base", num_beams=4)
    assert "num_beams 4" in told(ckpt_cli.average(tmp_path / "run", tmp_path / "out", everything=True, base=base))


LOST = {"num_beams": 3}
GENERATES = {"architectures": ["T5ForConditionalGeneration"]}
OTHER_KIND = {"architectures": ["BartForSequenceClassification"]}
MADE = {"_from_model_config": True, "eos_token_id": 1}


@pytest.mark.parametrize(
    ("base", "config", "generation", "expected"),
    [
        (LOST, {}, None, "num_beams 3"),
        ({"decoder": LOST}, {}, None, "num_beams 3"),  # of a model of encoder and decoder
        ({"force_bos_token_to_be_generated": True, "bos_token_id": 0}, {}, None, "forced_bos_token_id 0"),
        (LOST, {"architectures": ["MarianMTModel"]}, None, "num_beams 3"),
        (LOST, {"architectures": ["VisionEncoderDecoderModel"]}, None, "num_beams 3"),
        (LOST, {}, MADE, "into generation_config.json"),  # made of a config that had lost them
        (LOST, LOST, None, None),
        (LOST, {"num_beams": 2}, None, None),  # changed on purpose
        (LOST, {"decoder": LOST}, None, None),
        (LOST, {}, MADE | LOST, None),
        (LOST, {}, {"eos_token_id": 1}, None),  # a file of the run's own
        (LOST, OTHER_KIND, None, None),
        ({"num_beams": 1, "max_length": 20, "length_penalty": 1, "bad_words_ids": None}, {}, None, None),
        ({"num_layers": 3}, {}, None, None),
    ],
)
def test_what_counts(
    tmp_path: Path, base: dict[str, Any], config: dict[str, Any], generation: dict[str, Any] | None, expected: str | None
) -> None:
    files = {"config.json": tmp_path / "config.json"}
    if generation is not None:
        files["generation_config.json"] = tmp_path / "generation_config.json"
        files["generation_config.json"].write_text(json.dumps(generation))
    there = {"config.json": tmp_path / "base.json"}
    text = lost_settings(base, there, config=GENERATES | config, files=files, where="here")
    assert (expected in str(text)) if expected is not None else text is None
    assert lost_settings(base, there | {"generation_config.json": tmp_path}, config=GENERATES, files=files, where="here") is None


def test_defaults_are_those_of_transformers() -> None:
    configuration = pytest.importorskip("transformers.generation.configuration_utils").GenerationConfig
    theirs = getattr(configuration, "_get_default_generation_params", dict)()
    assert {key: DEFAULTS[key] for key in theirs if key in DEFAULTS} == {key: theirs[key] for key in theirs if key in DEFAULTS}
    unknown = {key for key in theirs if key not in DEFAULTS and "assistant" not in key and "lookbehind" not in key}
    assert unknown <= {"use_cache", "output_scores", "return_dict_in_generate"}
