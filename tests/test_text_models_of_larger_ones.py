"""A text model that was trained out of a larger one, with that as its base: what was trained is never taken from there instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt_cli
from ckpt_cli.errors import Inconsistent, MissingTensors
from ckpt_cli.hub.classes.absent.moved_names import moved_names, renaming_rules
from ckpt_cli.hub.classes.absent.other_names import under_other_names
from ckpt_cli.hub.classes.fit import Fit


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    text |= {"head_dim": 8, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
    }
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision))
    folder = tmp_path_factory.mktemp("larger") / "base"
    model.save_pretrained(folder)
    return folder, model


def trained(larger: tuple[Path, Any], run: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A step of the text model under the names of a causal one, with other values than the base."""
    model = larger[1]
    text = {f"model.{name}": tensor + 1 for name, tensor in model.model.language_model.state_dict().items()}
    tensors = {**text, "lm_head.weight": model.lm_head.weight.detach() + 1}
    (run / "checkpoint-10").mkdir(parents=True)
    torch.save(tensors, run / "checkpoint-10" / "pytorch_model.bin")
    return run, tensors


class TestTheHint:
    """It said to take model.language_model.* from the base, where it was not trained."""

    def test_gives_what_was_trained_its_names_and_takes_the_rest(self, larger: tuple[Path, Any], tmp_path: Path) -> None:
        run, tensors = trained(larger, tmp_path / "run")
        with pytest.raises(MissingTensors) as refused:
            ckpt_cli.merge(run, tmp_path / "out", base=larger[0])
        hint = str(refused.value.hint)
        rules, globs = (re.findall(rf"{option} '([^']+)'", hint) for option in ("--key-map", "--carry-from-base"))
        assert (rules, globs) == (["model=model.language_model"], ["model.visual.*"])
        ckpt_cli.merge(run, tmp_path / "out", base=larger[0], key_map=rules, carry_from_base=globs)
        written = load_file(tmp_path / "out" / "model.safetensors")
        for name, tensor in tensors.items():
            assert torch.equal(written[name.replace("model.", "model.language_model.", 1)], tensor)

    def test_that_is_not_followed_ends_in_no_untrained_weights(self, larger: tuple[Path, Any], tmp_path: Path) -> None:
        run, _ = trained(larger, tmp_path / "run")
        with pytest.raises(Inconsistent, match="nothing can be taken from it by name"):
            ckpt_cli.merge(run, tmp_path / "out", base=larger[0], carry_from_base="model.*")

    def test_says_nothing_of_a_base_where_no_rule_is_known(self) -> None:
        """What ends alike and has the shape of what is missing may be that."""
        missing = {"tower.0.norm.weight": (4,), "text.stack.0.norm.weight": (8,), "text.stack.0.q.bias": (8,)}
        names = {"blocks.0.norm.weight": (8,), "blocks.0.q.bias": (8,), "blocks.0.k.bias": (8,)}
        fit = Fit("T", "here", "hub", 0, 3, missing=missing, extra=tuple(names))
        found = under_other_names(fit, missing, names, names)
        assert found.there == {"text.stack.0.norm.weight", "text.stack.0.q.bias"}
        assert found.hint.endswith("if they are meant, rename them with --key-map")
        assert "blocks.0.k" not in found.hint


class TestAnotherFront:
    def test_is_no_other_layer(self) -> None:
        there = {"model.layers.5.mlp.up.weight": (2,), "model.layers.5.mlp.down.weight": (2,)}
        assert moved_names({name.replace("5", "0"): shape for name, shape in there.items()}, there) == {}

    def test_is_that_of_all_that_begin_alike(self) -> None:
        wanted = {"m.text.layers.0.q.weight": (2,), "m.text.layers.0.k.weight": (3,)}
        there = {"m.layers.0.q.weight": (2,), "m.layers.0.k.weight": (3,)}
        moved = moved_names(wanted, there)
        assert moved == dict(zip(wanted, there, strict=True))
        assert renaming_rules(moved, [*there, "head.weight"]) == ["m=m.text"]
        assert moved_names(wanted, {**there, "m.layers.0.v.weight": (2,)}) == {}
