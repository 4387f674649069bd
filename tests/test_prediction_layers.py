"""Layers of multi-token prediction that are there must be whole, though no class of transformers has a place for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import MissingTensors
from ckpt_cli.hub.classes.config_counts import mismatches
from tests.architectures import answered_here
from tests.tensors import Tensors, differences, load
from tests.test_claims import notes, saved_by, trained

ATTENTION = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
DENSE = tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
EXPERTS = ("mlp.gate.weight", *(f"mlp.experts.{number}.{name}_proj.weight" for number in range(4) for name in ("gate", "up", "down")))
DEEPSEEK = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")
COUNTED = {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}


@pytest.fixture(autouse=True)
def asked_here(quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


def layer(name: str, *parts: Iterable[str]) -> list[str]:
    return [f"{name}.{leaf}" for part in parts for leaf in part]


def model(*rest: str, stack: str = "model.layers", attention: tuple[str, ...] = ATTENTION) -> list[str]:
    """Three ordinary layers, of which the first is dense, and what else is stored."""
    layers = [layer(f"{stack}.{n}", attention, NORMS, EXPERTS if n else DENSE) for n in range(3)]
    return [name for names in layers for name in names] + list(rest)


LINEAR = [name.replace("model.layers.1.self_attn.", "model.layers.1.linear_attn.") for name in model()]
QWEN = ("mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
ERNIE = ("model.mtp_linear_proj.0.weight", "model.mtp_emb_norm.0.weight", "model.mtp_hidden_norm.0.weight")
MIMO = ("input_proj.weight", "token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")
SPLIT = [*layer("backbone.layers.0", ("norm.weight", "mixer.in_proj.weight")), "backbone.layers.1.norm.weight"]
SPLIT += [*layer("backbone.layers.1", (f"mixer.{n}_proj.weight" for n in "qkvo")), "backbone.layers.2.norm.weight"]
SPLIT += [f"backbone.layers.2.mixer.experts.{n}.{name}.weight" for n in range(4) for name in ("up_proj", "down_proj")]
LAYOUTS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "DeepSeek, GLM": (COUNTED, model(), layer("model.layers.3", ATTENTION, NORMS, EXPERTS, DEEPSEEK)),
    "Ling": (COUNTED, model(), layer("model.layers.3", ATTENTION, NORMS, EXPERTS, DEEPSEEK[:3], ("final_layernorm.weight",))),
    "dense": (COUNTED, model(), layer("model.layers.3", ATTENTION, NORMS, DENSE, DEEPSEEK)),
    "inside of a model with images": (
        {"text_config": COUNTED, "vision_config": {"depth": 27}},
        [*model(stack="model.language_model.layers"), *(f"model.visual.blocks.{n}.attn.{p}.weight" for n in range(27) for p in "qkvo")],
        layer("model.language_model.layers.3", ATTENTION, NORMS, EXPERTS, DEEPSEEK),
    ),
    "Qwen3-Next, which does not count them": (
        {"model_type": "qwen3_next", "num_hidden_layers": 3},
        LINEAR,
        [*layer("mtp.layers.0", ATTENTION, NORMS, EXPERTS), *QWEN],
    ),
    "Qwen3.5": (
        {"model_type": "qwen3_5_moe", "text_config": {"num_hidden_layers": 3, "mtp_num_hidden_layers": 1}},
        LINEAR,
        [*layer("mtp.layers.0", ATTENTION, NORMS, EXPERTS), *QWEN],
    ),
    "MiMo": (COUNTED, model(), layer("model.mtp_layers.0", ATTENTION, NORMS, DENSE, MIMO)),
    "Ernie": (COUNTED, model(), [*layer("model.mtp_block.0", ATTENTION, NORMS, DENSE), *ERNIE]),
    "Nemotron": (
        COUNTED,
        SPLIT,
        [
            *layer("mtp.layers.0", ("norm.weight", *(f"mixer.{n}_proj.weight" for n in "qkvo")), DEEPSEEK[:3]),
            *(name.replace("backbone.layers.2", "mtp.layers.1") for name in SPLIT if ".2." in name),
            "mtp.layers.1.final_layernorm.weight",
        ],
    ),
}
BUILT_OTHERWISE = [
    *(f"model.mtp.layers.0.self_attn.{name}.weight" for name in ("q_a_proj", "q_b_proj", "o_proj")),
    *(
        f"model.mtp.layers.0.{name}.weight"
        for name in ("eh_proj", "enorm.m", "hnorm.m", "transformer_layer.mlp.up_proj", "input_layernorm")
    ),
    "model.mtp.norm.weight",
    "model.mtp.embed_tokens.weight",
]


def lacking(config: dict[str, Any], names: Iterable[str]) -> set[str]:
    found = mismatches(config, dict.fromkeys(names, ()), known=True)
    return {name for item in found if item.code == "missing-layers" for name in item.lacking}


@pytest.mark.parametrize("layout", LAYOUTS)
class TestALayer:
    def test_that_is_whole_lacks_nothing(self, layout: str) -> None:
        config, ordinary, own = LAYOUTS[layout]
        assert mismatches(config, dict.fromkeys([*ordinary, *own], ()), known=True) == []

    def test_that_lost_one_tensor_lacks_this(self, layout: str) -> None:
        config, ordinary, own = LAYOUTS[layout]
        for lost in own:
            if not lost.endswith(("final_layernorm.weight", "layers.1.norm.weight")) or "model.layers" in lost:
                found = lacking(config, [*ordinary, *(name for name in own if name != lost)])
                # What ends such a layer has several names.
                assert found == {lost.replace("final_layernorm", "shared_head.norm")}, lost

    def test_that_lost_an_expert_lacks_it(self, layout: str) -> None:
        config, ordinary, own = LAYOUTS[layout]
        lost = {name for name in own if ".experts.3." in name}
        assert lacking(config, [*ordinary, *(name for name in own if name not in lost)]) == lost

    def test_of_a_quantised_model_may_have_other_scales(self, layout: str) -> None:
        config, ordinary, own = LAYOUTS[layout]
        quantised = [*(f"{name.removesuffix('weight')}{end}" for name in ordinary for end in ("qweight", "scales")), *own]
        assert lacking({**config, "quantization_config": {"bits": 4}}, quantised) == set()
        assert lacking({**config, "quantization_config": {"bits": 4}}, [name for name in quantised if name != own[0]])


def test_a_layer_that_is_built_otherwise_is_not_judged_by_ordinary_ones() -> None:
    assert mismatches(COUNTED, dict.fromkeys([*model(), *BUILT_OTHERWISE], ()), known=True) == []
    experts = [f"model.mtp.layers.0.mlp.{name}" for name in ("router.weight", *(f"experts.{n}.w1.weight" for n in (0, 1, 3)))]
    assert lacking({**COUNTED, "num_experts": 4}, [*model(), *BUILT_OTHERWISE, *experts]) == {"model.mtp.layers.0.mlp.experts.2.w1.weight"}


def test_without_attention_or_all_but_one_tensor() -> None:
    config, ordinary, own = LAYOUTS["DeepSeek, GLM"]
    assert lacking(config, [*ordinary, *(name for name in own if "self_attn" not in name)]) == {name for name in own if "self_attn" in name}
    assert lacking(config, [*ordinary, own[-4]]) == set(own) - {own[-4]}


def test_fewer_layers_than_asked_for_are_told() -> None:
    config, ordinary, own = LAYOUTS["DeepSeek, GLM"]
    found = mismatches({**config, "num_nextn_predict_layers": 2}, dict.fromkeys([*ordinary, *own], ()), known=True)
    assert [item.code for item in found] == ["no-prediction-layers"]
    assert "2 layers of multi-token prediction (num_nextn_predict_layers), but only model.layers.3 is there" in found[0].text


SHAPES = {"eh_proj": (16, 32), "enorm": (16,), "hnorm": (16,), "shared_head.norm": (16,)}


def with_prediction(saved: Path, number: int = 2) -> tuple[Path, Tensors]:
    """A model of two layers with a third for multi-token prediction, like its last."""
    held = load(saved)
    last = {name.replace("model.layers.1.", f"model.layers.{number}."): tensor + 1 for name, tensor in held.items() if "layers.1." in name}
    last |= {f"model.layers.{number}.{name}.weight": torch.randn(shape) for name, shape in SHAPES.items()}
    save_file({**held, **last}, saved / "model.safetensors", metadata={"format": "pt"})
    return saved, last


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
class TestAModel:
    def test_that_is_whole_has_no_findings(self, tmp_path: Path, name: str) -> None:
        saved, _ = with_prediction(saved_by(tmp_path, name, num_nextn_predict_layers=1)[0])
        result = ckpt_cli.merge(saved, tmp_path / "out")
        assert differences(load(tmp_path / "out"), load(saved)) == []
        assert not {"extra-layers", "extra-tensors", "no-prediction-layers"} & notes(result).keys()
        assert "others" not in result.outputs[0].naming
        codes = {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}
        assert not {"extra-layer", "extra-tensor", "missing-layers", "no-prediction-layers"} & codes

    @pytest.mark.parametrize(
        "lost", [lambda name: ".experts.3." in name, lambda name: "self_attn" in name, lambda name: "eh_proj" not in name]
    )
    def test_that_lost_something_is_refused(self, tmp_path: Path, name: str, lost: Callable[[str], bool]) -> None:
        saved, last = with_prediction(saved_by(tmp_path, name, num_nextn_predict_layers=1)[0])
        whole = load(saved)
        save_file({name: tensor for name, tensor in whole.items() if not (name in last and lost(name))}, saved / "model.safetensors")
        with pytest.raises(MissingTensors, match=r"model\.layers\.2, of multi-token prediction, lacks") as caught:
            ckpt_cli.merge(saved, tmp_path / "out")
        assert caught.value.exit_code == 4
        assert {name for name in last if lost(name)} <= {detail.split(": ")[0] for detail in caught.value.details}
        assert "missing-layers" in {item.code for item in ckpt_cli.verify(saved).findings if item.severity == "error"}
        result = ckpt_cli.merge(saved, tmp_path / "out", allow_missing="model.layers.2.*")
        assert "missing-allowed" in notes(result)

    def test_gets_it_from_the_base(self, tmp_path: Path, name: str) -> None:
        saved, tensors = saved_by(tmp_path, name, num_nextn_predict_layers=1)
        base, _ = with_prediction(saved)
        result = ckpt_cli.merge(trained(tmp_path / "run", base, tensors), tmp_path / "out", base=base, carry_from_base="model.layers.2.*")
        assert differences(load(tmp_path / "out"), load(base)) == []
        assert "no-prediction-layers" not in notes(result)

    def test_may_leave_it_out_on_purpose(self, tmp_path: Path, name: str) -> None:
        saved, last = with_prediction(saved_by(tmp_path, name, num_nextn_predict_layers=1)[0])
        ckpt_cli.merge(saved, tmp_path / "out", exclude="model.layers.2.*")
        assert not last.keys() & load(tmp_path / "out").keys()
        assert ckpt_cli.verify(tmp_path / "out").exit_code == 0
