"""What the files beside the weights of one step say otherwise than those of its neighbours: edited, or of another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from tests import tiny

CODE = "step-settings"
STEPS = (100, 200, 300)
OTHER_IDS = {f"t{i}": 59 - i for i in range(60)}


def run_of(path: Path, steps: tuple[int, ...] = STEPS) -> Path:
    """Steps whose configs count, as those of diffusers' averages do."""
    for step in steps:
        of = tiny.config(optimization_step=step, cur_decay_value=step / 1000, epoch=step // 100, global_step=step)
        tiny.folder(path / f"checkpoint-{step}", tiny.weights(step), of, {"trainer_state.json": {"global_step": step}})
    return path


def edited(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def told(result: Any) -> list[str]:
    notes = [*getattr(result, "notes", ()), *(result.checkpoint.notes if hasattr(result, "checkpoint") else ())]
    return [note.text for note in notes if note.code == CODE]


class TestAStep:
    @pytest.mark.parametrize(
        ("file", "changes", "named"),
        [
            ("config.json", {"rope_theta": 5e5}, "rope_theta"),
            ("config.json", {"rms_norm_eps": 1e-3}, "rms_norm_eps"),
            ("config.json", {"num_attention_heads": 2, "num_key_value_heads": 1}, "num_attention_heads"),
            (
                "tokenizer.json",
                {"model": {**tiny.TOKENIZER["tokenizer.json"]["model"], "vocab": OTHER_IDS}},
                "tokenizer.json (ids of tokens)",
            ),
            ("tokenizer_config.json", {"chat_template": "{{ messages }}"}, "chat template"),
        ],
    )
    def test_that_says_something_else_is_told_in_merge_and_verify(
        self, file: str, changes: dict[str, Any], named: str, tmp_path: Path
    ) -> None:
        run = run_of(tmp_path / "run")
        step = run / "checkpoint-300"
        edited(step / file, **changes)
        for result in (ckpt_cli.merge(run, tmp_path / "out"), ckpt_cli.merge(step, tmp_path / "out2"), ckpt_cli.verify(step)):
            (text,) = told(result)
            assert named in text
            assert "checkpoint-200 says otherwise" in text

    @pytest.mark.parametrize(
        ("file", "changes"),
        [
            ("config.json", {"use_cache": False, "transformers_version": "5.0", "attention_dropout": 0.1, "max_position_embeddings": 64}),
            ("config.json", {"added_by_a_version": 1}),
            ("tokenizer_config.json", {"model_max_length": 64, "padding_side": "left"}),
            ("trainer_state.json", {"global_step": 300, "log_history": [{"step": 300, "loss": 1.0}]}),
        ],
    )
    def test_that_a_trainer_wrote_otherwise_is_none(self, file: str, changes: dict[str, Any], tmp_path: Path) -> None:
        run = run_of(tmp_path / "run")
        edited(run / "checkpoint-300" / file, **changes)
        assert told(ckpt_cli.merge(run, tmp_path / "out")) == []
        assert told(ckpt_cli.verify(run / "checkpoint-300")) == []

    def test_of_a_later_part_of_a_training_is_none(self, tmp_path: Path) -> None:
        """What one neighbour says too was changed for a part of the training."""
        run = run_of(tmp_path / "run")
        for step in (200, 300):
            edited(run / f"checkpoint-{step}" / "config.json", rope_theta=5e5)
        assert told(ckpt_cli.verify(run / "checkpoint-200")) == []

    def test_is_told_once_in_an_average(self, tmp_path: Path) -> None:
        run = run_of(tmp_path / "run", (100, 200))
        edited(run / "checkpoint-200" / "config.json", rope_theta=5e5)
        result = ckpt_cli.average([run / "checkpoint-100", run / "checkpoint-200"], tmp_path / "out")
        codes = [note.code for note in (*result.notes, *result.outputs[0].notes)]
        assert codes.count("configs-differ") == 1
        assert CODE not in codes

    def test_that_lost_its_config_is_told_if_that_of_a_base_says_something_else(self, tmp_path: Path) -> None:
        run = run_of(tmp_path / "run")
        (run / "checkpoint-300" / "config.json").unlink()
        same, other = (
            tiny.folder(tmp_path / f"base{i}", tiny.weights(), tiny.config(**said)) for i, said in enumerate(({}, {"rope_theta": 5e5}))
        )
        assert told(ckpt_cli.merge(run, tmp_path / "out", base=same)) == []
        (text,) = told(ckpt_cli.merge(run, tmp_path / "out2", base=other))
        assert "rope_theta" in text

    def test_with_a_config_of_the_run_is_none(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        for step in (1, 2):
            tiny.verl(run, tiny.weights(step), step=step)
        assert told(ckpt_cli.merge(run, tmp_path / "out")) == []
        edited(run / "global_step_2" / "actor" / "huggingface" / "config.json", rope_theta=5e5)
        assert len(told(ckpt_cli.merge(run, tmp_path / "out2"))) == 1


class TestAdapters:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        tiny.folder(tmp_path / "base", tiny.weights())
        for step in (100, 200):
            tiny.adapter(tmp_path / "run" / f"checkpoint-{step}", tiny.factors(step), tmp_path / "base")
        return tmp_path / "run"

    @pytest.mark.parametrize(
        "changes", [{"lora_alpha": 64}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}, {"fan_in_fan_out": True}]
    )
    def test_of_another_scale_are_told(self, run: Path, changes: dict[str, Any], tmp_path: Path) -> None:
        edited(run / "checkpoint-200" / "adapter_config.json", **changes)
        (text,) = told(ckpt_cli.merge(run, tmp_path / "out", base=tmp_path / "base"))
        assert f"adapter_config.json ({next(iter(changes))} (" in text

    @pytest.mark.parametrize(
        "changes", [{}, {"use_rslora": False, "alpha_pattern": {}}, {"inference_mode": True}, {"base_model_name_or_path": "/moved/base"}]
    )
    def test_of_the_same_scale_are_not(self, run: Path, changes: dict[str, Any], tmp_path: Path) -> None:
        edited(run / "checkpoint-200" / "adapter_config.json", **changes)
        assert told(ckpt_cli.merge(run, tmp_path / "out", base=tmp_path / "base")) == []
