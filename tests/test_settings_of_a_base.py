"""A base whose shapes fit and whose config.json computes something else with them."""

from __future__ import annotations

import copy
import json
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from ckpt_cli.hub.settings import differences, different_settings
from tests import tiny
from tests.architectures import MODELS, build

OTHERS: list[tuple[str, Any]] = [
    ("rope_theta", 1e6),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
    ("rms_norm_eps", 1e-3),
    ("hidden_act", "gelu"),
    ("tie_word_embeddings", True),
    ("sliding_window", 32),
]
OTHER_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def notes(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in result.outputs[0].notes}


class TestAnotherSetting:
    @pytest.mark.parametrize(("key", "value"), OTHERS, ids=[key for key, _ in OTHERS])
    @pytest.mark.parametrize("options", [{}, {"match_base": True}, {"dtype": "base"}], ids=["assets", "match", "dtype"])
    def test_is_a_warning_with_both_values(self, key: str, value: Any, options: dict[str, Any], tmp_path: Path) -> None:
        tiny.verl(tmp_path / "run", tiny.weights(1), tiny.config(sliding_window=16))
        base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.config(**{"sliding_window": 16, key: value}))
        text = notes(ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base, **options))["base-settings"]
        assert key in text
        assert str(tiny.config(sliding_window=16).get(key, "none")) in text
        assert str(value) in text

    def test_is_said_of_a_base_without_weights_too(self, tmp_path: Path) -> None:
        tiny.verl(tmp_path / "run", tiny.weights(1))
        base = tiny.folder(tmp_path / "base", None, tiny.config(rope_theta=1e6))
        assert (
            "rope_theta is 10000.0, in the base 1000000.0"
            in notes(ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base))["base-settings"]
        )

    def test_is_said_by_verify_and_average(self, tmp_path: Path) -> None:
        for step in (1, 2):
            tiny.verl(tmp_path / "run", tiny.weights(step), step=step)
        base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.config(rope_theta=1e6))
        checked = ckpt_cli.verify(tmp_path / "run", base=base)
        assert [item.severity for item in checked.findings if item.code == "base-settings"] == ["warning"]
        averaged = ckpt_cli.average(tmp_path / "run", tmp_path / "out", everything=True, base=base)
        assert "rope_theta" in notes(averaged)["base-settings"]

    def test_of_the_config_that_is_written_is_none(self, tmp_path: Path) -> None:
        """Without a config of its own the run gets that of the base."""
        home = tiny.verl(tmp_path / "run", tiny.weights(1))
        (home / "huggingface" / "config.json").unlink()
        base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.config(rope_theta=1e6))
        assert "base-settings" not in notes(ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base))


class TestOtherHeads:
    def test_are_an_error_where_weights_of_the_base_are_written(self, tmp_path: Path) -> None:
        run = {name: tensor for name, tensor in tiny.weights(1).items() if ".layers.1." not in name}
        tiny.verl(tmp_path / "run", run)
        base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.config(**OTHER_HEADS))
        for options in ({"carry_from_base": "model.layers.1.*"}, {"match_base": True, "fill_missing_from_base": True}):
            with pytest.raises(Inconsistent, match="num_attention_heads is 4, in the base 8"):
                ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base, **options)  # type: ignore[arg-type]

    def test_are_an_error_for_adapters_with_a_config_of_their_own(self, tmp_path: Path) -> None:
        base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.config(**OTHER_HEADS))
        adapter = tiny.folder(tiny.adapter(tmp_path / "adapter", tiny.factors(), base), None)
        with pytest.raises(Inconsistent, match="heads"):
            ckpt_cli.merge(adapter, tmp_path / "out", base=base)

    def test_are_a_warning_where_only_the_form_is_that_of_the_base(self, tmp_path: Path) -> None:
        tiny.verl(tmp_path / "run", tiny.weights(1))
        base = tiny.folder(tmp_path / "base", tiny.weights(), tiny.config(**OTHER_HEADS))
        text = notes(ckpt_cli.merge(tmp_path / "run", tmp_path / "out", base=base, match_base=True))["base-settings"]
        assert "num_key_value_heads is 2, in the base 4" in text

    def test_of_two_checkpoints_are_named_with_values_in_an_average(self, tmp_path: Path) -> None:
        first, second = (
            tiny.folder(tmp_path / "a", tiny.weights(1)),
            tiny.folder(tmp_path / "b", tiny.weights(2), tiny.config(**OTHER_HEADS)),
        )
        assert "num_attention_heads (4, 8)" in notes(ckpt_cli.average([first, second], tmp_path / "out"))["configs-differ"]


class TestTheSameSetting:
    """What versions of transformers write differently."""

    @pytest.mark.parametrize(
        ("mine", "base"),
        [
            ({"rope_theta": 1e4}, {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}}),
            ({"rope_theta": 1e4, "rope_scaling": None}, {"rope_theta": 1e4}),
            (
                {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
                {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}},
            ),
            (
                {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}},
                {"rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [1, 1]}},
            ),
            ({"use_sliding_window": False, "sliding_window": 4096}, {"use_sliding_window": False, "sliding_window": None}),
            ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, {"rope_scaling": {"rope_theta": 1e4, "type": "default"}}),
            (
                {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
                {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}},
            ),
            ({"sliding_window": 4096, "max_window_layers": 28}, {"use_sliding_window": False, "sliding_window": None}),
            ({"head_dim": None}, {"head_dim": 4}),
            ({"hidden_act": "silu"}, {"hidden_act": "swish"}),
            ({"rms_norm_eps": 1e-6}, {}),
            (
                {"dropout": 0.1, "vocab_size": 5, "max_position_embeddings": 8},
                {"dropout": 0.0, "vocab_size": 6, "max_position_embeddings": 9},
            ),
        ],
    )
    def test_is_no_difference(self, mine: dict[str, Any], base: dict[str, Any]) -> None:
        assert different_settings(mine, base) == []
        assert different_settings(base, mine) == []

    def test_lies_in_a_part_of_either(self) -> None:
        """A language model, and the same inside a larger model."""
        inner = {"rope_theta": 1e4}
        assert different_settings({"text_config": inner}, inner) == []
        assert [each.key for each in different_settings({"text_config": inner}, {"rope_theta": 1e6})] == ["rope_theta"]
        pair = different_settings({"vision_config": {"hidden_act": "gelu"}}, {"vision_config": {"hidden_act": "silu"}})
        assert [each.key for each in pair] == ["vision_config.hidden_act"]


class TestOneTable:
    """A merge with a base, an average, and a step with two configs compare configs in one way."""

    @pytest.mark.parametrize(("key", "value"), OTHERS, ids=[key for key, _ in OTHERS])
    def test_lists_a_setting_in_an_average_and_of_two_configs_too(self, key: str, value: Any, tmp_path: Path) -> None:
        usual = tiny.classless(sliding_window=16)
        for step, changes in ((1, {}), (2, {key: value})):
            tiny.verl(tmp_path / "run", tiny.weights(step), {**usual, **changes}, step=step)
        averaged = ckpt_cli.average(tmp_path / "run", tmp_path / "mean", everything=True)
        assert f"step 1 and step 2 differ: {key}" in notes(averaged)["configs-differ"]
        (tmp_path / "run" / "global_step_2" / "config.json").write_text(json.dumps(usual))
        told = {note.code: note.text for note in ckpt_cli.merge(tmp_path / "run", tmp_path / "out").checkpoint.notes}
        assert f"differs: {key}" in told["other-config"]

    def test_takes_what_versions_of_transformers_write_for_the_same(self, tmp_path: Path) -> None:
        newer = {key: value for key, value in tiny.classless().items() if key != "rope_theta"}
        newer["rope_parameters"] = {"rope_theta": 10000, "rope_type": "default"}
        for step, config in ((1, tiny.classless(rope_scaling=None)), (2, newer)):
            tiny.verl(tmp_path / "run", tiny.weights(step), config, step=step)
        assert "configs-differ" not in notes(ckpt_cli.average(tmp_path / "run", tmp_path / "mean", everything=True))

    def test_names_settings_before_other_entries(self) -> None:
        mine, other = {"bos_token_id": 1, "rope_theta": 1e4, "text": 1}, {"bos_token_id": 2, "rope_theta": 1e6, "text": 1, "new": [1]}
        assert [entry.pair for entry in differences(mine, other)] == ["rope_theta (10000.0, 1000000.0)", "bos_token_id (1, 2)", "new"]

    def test_compares_the_checkpoints_that_have_a_config(self, tmp_path: Path) -> None:
        """The newest has none: the config of another one is written."""
        paths = [tiny.folder(tmp_path / f"{i}", tiny.weights(i), tiny.classless(rope_theta=10.0**i)) for i in (4, 6)]
        paths.append(tiny.folder(tmp_path / "bare", tiny.weights(7), bare=True))
        assert "rope_theta (10000.0, 1000000.0)" in notes(ckpt_cli.average(paths, tmp_path / "mean"))["configs-differ"]


class TestTwoThatAreCompared:
    """by `diff`, or by loading one into the other."""

    @pytest.mark.parametrize(("key", "value"), OTHERS[:2], ids=[key for key, _ in OTHERS[:2]])
    def test_diff_says_what_equal_weights_do_not_show(self, key: str, value: Any, tmp_path: Path) -> None:
        paths = [
            tiny.folder(tmp_path / name, tiny.weights(1), tiny.classless(**changes)) for name, changes in (("a", {}), ("b", {key: value}))
        ]
        result = ckpt_cli.diff(*paths)
        assert result.identical
        (note,) = [note for note in result.notes if note.code == "other-settings"]
        assert note.level == "warning"
        assert f"{key} is " in note.text
        assert ckpt_cli.diff(paths[0], shutil.copytree(paths[0], tmp_path / "copy")).notes == ()

    @pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
    def test_a_live_model_that_computes_something_else(self, wrapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ckpt_cli.hub.classes.expected_tensors.installed_version", lambda: None)  # the class is not asked for
        kind, model_type, options = MODELS["llama"]
        build(kind, model_type, options).save_pretrained(tmp_path / "model")
        for changes, told in (({}, []), ({"rms_norm_eps": 0.5}, ["rms_norm_eps is 1e-06, in the model 0.5"])):
            model = build(kind, model_type, {**options, **changes})
            result = ckpt_cli.load_into(torch.nn.Sequential(OrderedDict(module=model)) if wrapped else model, tmp_path / "model")
            texts = [note.text for note in result.notes if note.code == "other-settings"]
            assert [text.partition("used: ")[2] for text in texts] == told

    def test_what_transformers_holds_and_writes_is_the_same(self) -> None:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        for _, model_type, options in MODELS.values():
            config = CONFIG_MAPPING[model_type](**copy.deepcopy(dict(options)))
            assert different_settings(json.loads(config.to_json_string()), config.to_dict()) == [], model_type
            assert different_settings(options, config.to_dict()) == [], model_type
