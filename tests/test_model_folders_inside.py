"""Weights and configs that a checkpoint has twice: which were taken is said, and whether the others differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from tests import tiny
from tests.architectures import MODELS, build
from tests.cli import ckpt_fork as ckpt
from tests.tensors import Tensors, differences, load


def told(result: Any, code: str = "other-model") -> list[str]:
    return [note.text for note in result.checkpoint.notes if note.code == code and note.level == "warning"]


def changed(name: str, tensor: torch.Tensor | None) -> Tensors:
    weights = tiny.weights(1)
    del weights[name]
    return weights if tensor is None else {**weights, name: tensor}


OTHERS = [
    (tiny.weights(2), "other values"),
    ({**tiny.weights(1), "model.norm.weight": torch.zeros(16)}, "other values (model.norm.weight)"),
    (changed("model.norm.weight", None), "without model.norm.weight"),
    ({**tiny.weights(1), "v_head.weight": torch.ones(1, 16)}, "also with v_head.weight"),
    (changed("lm_head.weight", torch.ones(72, 16)), "other shapes of lm_head.weight"),
    (changed("model.norm.weight", torch.ones(16, dtype=torch.int32)), "other dtypes of model.norm.weight"),
]


class TestOtherWeights:
    @pytest.mark.parametrize(("weights", "text"), OTHERS, ids=[text for _, text in OTHERS])
    @pytest.mark.parametrize("folder", ["huggingface", "merged"])
    def test_in_a_folder_inside_are_a_warning(self, folder: str, weights: Tensors, text: str, tmp_path: Path) -> None:
        home = tiny.verl(tmp_path / "run", tiny.weights(1))
        tiny.folder(home / folder, weights)
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        (note,) = told(result)
        assert f"model_world_size_1_rank_0.pt was read for actor; {folder}/" in note
        assert text in note
        assert differences(load(tmp_path / "out"), tiny.weights(1)) == []

    def test_are_told_by_every_command(self, tmp_path: Path) -> None:
        for step in (1, 2):
            home = tiny.verl(tmp_path / "run", tiny.weights(step), step=step)
            tiny.folder(home / "huggingface", tiny.weights(9))
        for command in ("detect", "inspect", "verify"):
            assert "huggingface/ holds the same tensors with other values" in ckpt(command, tmp_path / "run").err
        assert "huggingface/ holds" in ckpt("average", tmp_path / "run", "--all", "-o", tmp_path / "out").err

    def test_that_cannot_be_read_are_a_warning(self, tmp_path: Path) -> None:
        home = tiny.verl(tmp_path / "run", tiny.weights(1))
        (home / "huggingface" / "model.safetensors").write_bytes(b"\x10")
        assert "cannot be read" in told(ckpt_cli.merge(tmp_path / "run", tmp_path / "out"))[0]


class TestTheSameWeights:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_are_information(self, dtype: torch.dtype, tmp_path: Path) -> None:
        home = tiny.verl(tmp_path / "run", tiny.weights(1))
        tiny.folder(home / "huggingface", {name: tensor.to(dtype) for name, tensor in tiny.weights(1).items()})
        result = ckpt_cli.merge(tmp_path / "run", tmp_path / "out")
        assert told(result) == []
        assert any("the same weights" in note.text and note.level == "info" for note in result.checkpoint.notes)

    def test_without_the_tied_head_are_the_same(self, tmp_path: Path) -> None:
        weights = tiny.weights(1, tied=True)
        home = tiny.verl(
            tmp_path / "run", {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, tiny.config(tie_word_embeddings=True)
        )
        tiny.folder(home / "huggingface", weights, tiny.config(tie_word_embeddings=True))
        assert told(ckpt_cli.merge(tmp_path / "run", tmp_path / "out")) == []

    def test_under_the_names_of_the_hub_are_the_same(self, tmp_path: Path) -> None:
        """transformers stacks the experts in memory, and writes them one by one."""
        model = build(*MODELS[next(name for name in MODELS if "moe" in name)])
        home = tiny.verl(tmp_path / "run", {name: tensor.clone() for name, tensor in model.state_dict().items()})
        shutil.rmtree(home / "huggingface")
        model.save_pretrained(home / "huggingface")
        assert told(ckpt_cli.merge(tmp_path / "run", tmp_path / "out")) == []

    def test_another_kind_of_model_inside_is_none(self, tmp_path: Path) -> None:
        """sentence-transformers keeps dense layers in folders of their own."""
        path = tiny.folder(tmp_path / "model", tiny.weights(1))
        tiny.folder(path / "2_Dense", {"linear.weight": torch.ones(2, 2)}, {"in_features": 2})
        assert told(ckpt_cli.merge(path, tmp_path / "out")) == []


class TestOtherConfigs:
    def test_are_named_with_what_differs(self, tmp_path: Path) -> None:
        home = tiny.verl(tmp_path / "run", tiny.weights(1))
        (home / "config.json").write_text(json.dumps(tiny.config(rope_theta=1e6)))
        (home.parent / "config.json").write_text(json.dumps(tiny.config(rms_norm_eps=1e-5)))
        notes = told(ckpt_cli.merge(tmp_path / "run", tmp_path / "out"), "other-config")
        taken = "config.json was taken from global_step_1/actor/huggingface/"
        assert notes == [
            f"{taken}; that of global_step_1/actor/ differs: rope_theta (10000.0, 1000000.0)",
            f"{taken}; that of global_step_1/ differs: rms_norm_eps (1e-06, 1e-05)",
        ]
        assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_theta"] == 10000.0
        for command in ("detect", "inspect", "verify"):
            assert notes[0] in ckpt(command, tmp_path / "run").err

    def test_that_cannot_be_read_are_named(self, tmp_path: Path) -> None:
        home = tiny.verl(tmp_path / "run", tiny.weights(1))
        (home / "config.json").write_text("{")
        assert (
            "global_step_1/actor/ differs: the config is not valid JSON"
            in told(ckpt_cli.merge(tmp_path / "run", tmp_path / "out"), "other-config")[0]
        )

    def test_with_another_dtype_or_version_are_the_same(self, tmp_path: Path) -> None:
        home = tiny.verl(tmp_path / "run", tiny.weights(1))
        (home / "config.json").write_text(json.dumps(tiny.config(torch_dtype="bfloat16", transformers_version="4.40.0", use_cache=False)))
        assert told(ckpt_cli.merge(tmp_path / "run", tmp_path / "out"), "other-config") == []

    @pytest.mark.parametrize("where", ["actor", ""], ids=["in the component", "in the step"])
    def test_on_another_node_that_do_not_decide_are_named(self, where: str, tmp_path: Path) -> None:
        for rank, node in enumerate("ab"):
            for role in ("actor", "critic"):
                home = tiny.verl(tmp_path / node / "run", tiny.weights(rank), tiny.classless(), role=role)
                (home / "model_world_size_1_rank_0.pt").rename(home / f"model_world_size_2_rank_{rank}.pt")
        path = tmp_path / "b" / "run" / "global_step_1" / where / "config.json"
        path.write_text(json.dumps(tiny.classless(rope_theta=1e6)))
        options: dict[str, Any] = {"also": tmp_path / "b" / "run", "allow_unequal_replicas": True}
        (text,) = told(ckpt_cli.merge(tmp_path / "a" / "run", tmp_path / "actor", **options), "other-config")
        assert text.endswith("differs: rope_theta (10000.0, 1000000.0)")
        assert told(ckpt_cli.merge(tmp_path / "a" / "run", tmp_path / "critic", type="critic", **options), "other-config") == []

    def test_of_another_model_of_the_step_are_none(self, tmp_path: Path) -> None:
        tiny.verl(tmp_path / "run", tiny.weights(1))
        critic = {name: tensor for name, tensor in tiny.weights(2).items() if "lm_head" not in name}
        tiny.verl(tmp_path / "run", {**critic, "score.weight": torch.ones(1, 16)}, tiny.config(architectures=["Other"]), role="critic")
        (tmp_path / "run" / "global_step_1" / "config.json").write_text(json.dumps(tiny.config()))
        for role in ("actor", "critic"):
            assert told(ckpt_cli.merge(tmp_path / "run", tmp_path / role, type=role), "other-config") == []
