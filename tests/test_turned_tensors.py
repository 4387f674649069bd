"""Tensors that transformers 4 and 5 store with two dimensions exchanged, of which loaders see by the shape which way round they are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import CkptError
from ckpt_cli.hub.classes.rules import Conversion, HubRules, Renaming, rules_for
from ckpt_cli.hub.classes.shapes.turned import turned_names
from tests.architectures import answered_here
from tests.tensors import differences, load

KIND = "Qwen3VLMoeForConditionalGeneration"
STACKS = ("experts.gate_up_proj", "experts.down_proj")
GATE, DOWN = (f"model.language_model.layers.0.mlp.{stack}" for stack in STACKS)
VERSIONS = {4: "4.57.1", 5: "5.0.0"}
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(autouse=True)
def asked_here(quiet_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_cli.hub.classes.transformers_child._run_child", answered_here)


def model_of(inner: int = 24, seed: int = 0) -> Any:
    """A small model with hidden size 32; an ``inner`` of 16 makes its gate and up square, one of 32 its down."""
    text = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": inner, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
    ids = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]}, **ids)
    config.architectures = [KIND]
    torch.manual_seed(seed)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def turned(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name: value.transpose(1, 2).contiguous() if name.endswith(STACKS) else value.clone() for name, value in tensors.items()}


def saved(folder: Path, model: Any, tensors: Tensors, version: int, *, said: int | None = None) -> Path:
    """The tensors of a model as transformers 4 or 5 saves them, beside a config by that version, or by another one that it ``said``."""
    folder.mkdir(parents=True)
    held = turned(tensors) if version == 4 else {name: value.clone() for name, value in tensors.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**json.loads(model.config.to_json_string()), "transformers_version": VERSIONS[said or version]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def trained_further(tensors: Tensors, seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: value + 0.01 * torch.randn_like(value) for name, value in tensors.items()}


def logits(folder: Path) -> torch.Tensor:
    model = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(folder).eval()
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(1, 17)[None]).logits
    return result


def codes(result: Any) -> dict[str, str]:
    parts = [*getattr(result, "outputs", ()), *([result] if hasattr(result, "notes") else [])]
    return {note.code: note.text for part in parts for note in part.notes}


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


@pytest.fixture(scope="module")
def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_the_rule_says_that_loaders_decide_by_the_shape() -> None:
    rules = rules_for({"architectures": [KIND], "model_type": "qwen3_vl_moe"})
    assert rules is not None
    assert {sorted(dims) == [1, 2] for _, dims in rules.turning} == {True}
    others = rules_for({"architectures": ["Ernie4_5_VLMoeForConditionalGeneration"], "model_type": "ernie4_5_vl_moe"})
    assert others is not None
    assert others.turning == ()


@pytest.mark.parametrize("version", [4, 5])
def test_both_ways_round_are_whole(tmp_path: Path, model: Any, weights: Tensors, version: int) -> None:
    source = saved(tmp_path / "in", model, weights, version)
    result = ckpt_cli.merge(source, tmp_path / "out")
    assert not {"other-shapes", "misread-square"} & codes(result).keys()
    assert differences(load(tmp_path / "out"), load(source)) == []
    found = ckpt_cli.verify(tmp_path / "out")
    assert found.exit_code == 0
    assert not {"wrong-shape", "cut-tensor", "misread-square"} & {item.code for item in found.findings}
    assert torch.equal(logits(tmp_path / "out"), logits(saved(tmp_path / "other", model, weights, 9 - version)))


@pytest.mark.parametrize("change", [lambda t: t[:2], lambda t: t[:, :, :-1], lambda t: t.transpose(0, 1).contiguous()])
def test_a_wrong_shape_stays_one(tmp_path: Path, model: Any, weights: Tensors, change: Callable[[Any], Any]) -> None:
    source = saved(tmp_path / "in", model, weights, 4)
    save_file({**load(source), GATE: change(load(source)[GATE]).contiguous()}, source / "model.safetensors", metadata={"format": "pt"})
    assert {"wrong-shape", "cut-tensor"} & {item.code for item in ckpt_cli.verify(source).findings if item.tensor == GATE}


@pytest.mark.parametrize("inner", [16, 32])
class TestSquare:
    """Its shape does not say which way round a tensor is: the other one of its module does."""

    def test_loaders_take_it_as_it_is(self, tmp_path: Path, inner: int) -> None:
        model = model_of(inner)
        held = {name: value.detach() for name, value in model.state_dict().items()}
        older, newer = (saved(tmp_path / str(version), model, held, version) for version in (4, 5))
        assert not torch.allclose(logits(older), logits(newer))
        square = STACKS[inner == 32]
        assert square in codes(ckpt_cli.merge(older, tmp_path / "out"))["misread-square"]
        assert "misread-square" in {item.code for item in ckpt_cli.verify(older).findings}
        assert "misread-square" not in codes(ckpt_cli.merge(newer, tmp_path / "out5"))
        assert "misread-square" not in {item.code for item in ckpt_cli.verify(newer).findings}

    def test_it_is_compared_with_the_same_elements(self, tmp_path: Path, inner: int) -> None:
        model = model_of(inner)
        held = {name: value.detach() for name, value in model.state_dict().items()}
        older, newer = (saved(tmp_path / str(version), model, held, version) for version in (4, 5))
        result = ckpt_cli.diff(older, newer)
        assert result.comparison.drifts == ()
        assert result.comparison.reshaped == ()
        assert "turned" in codes(result)

    @pytest.mark.parametrize("newest", [4, 5])
    def test_it_is_averaged_with_the_same_elements(self, tmp_path: Path, inner: int, newest: int) -> None:
        model = model_of(inner)
        held = {name: value.detach() for name, value in model.state_dict().items()}
        later = trained_further(held)
        first, second = saved(tmp_path / "a", model, held, 9 - newest), saved(tmp_path / "b", model, later, newest)
        result = ckpt_cli.average([first, second], output=tmp_path / "out")
        mean = {name: (value.double() + later[name].double()).div(2).float() for name, value in held.items()}
        assert differences(load(tmp_path / "out"), turned(mean) if newest == 4 else mean) == []
        assert "turned" in codes(result)
        assert ckpt_cli.verify(tmp_path / "out").exit_code == 0

    def test_it_is_brought_into_the_form_of_the_base(self, tmp_path: Path, inner: int) -> None:
        model = model_of(inner)
        held = {name: value.detach() for name, value in model.state_dict().items()}
        later = trained_further(held)
        ckpt_cli.merge(
            saved(tmp_path / "run", model, later, 5), tmp_path / "out", base=saved(tmp_path / "base", model, held, 4), match_base=True
        )
        assert differences(load(tmp_path / "out"), turned(later)) == []

    def test_it_fills_a_live_model(self, tmp_path: Path, inner: int) -> None:
        model = model_of(inner)
        held = {name: value.detach().clone() for name, value in model.state_dict().items()}
        live = model_of(inner, seed=5)
        ckpt_cli.load_into(live, saved(tmp_path / "older", model, held, 4))
        assert all(torch.equal(value, held[name]) for name, value in live.state_dict().items())

    def test_alone_nothing_tells_it_but_the_versions(self, tmp_path: Path, inner: int) -> None:
        model = model_of(inner)
        held = {name: value.detach() for name, value in model.state_dict().items()}
        square = f"*{STACKS[inner == 32]}"
        first, second = saved(tmp_path / "a", model, held, 4), saved(tmp_path / "b", model, held, 5)
        options = {"include": [square], "allow_missing": ["*"]}
        result = ckpt_cli.average([first, second], output=tmp_path / "out", **options)
        assert "unproved-turn" not in codes(result)
        assert all(torch.equal(value, held[name]) for name, value in load(tmp_path / "out").items())
        config = json.loads((first / "config.json").read_text())
        del config["transformers_version"]
        (first / "config.json").write_text(json.dumps(config))
        assert STACKS[inner == 32] in codes(ckpt_cli.average([first, second], output=tmp_path / "out2", **options))["unproved-turn"]


@pytest.mark.parametrize("version", [4, 5])
class TestOfABase:
    """The run is as one version saves it, the base as the other."""

    def sides(
        self, tmp_path: Path, model: Any, weights: Tensors, version: int, lacks: str = ""
    ) -> tuple[Path, Path, dict[str, torch.Tensor]]:
        later = trained_further(weights)
        run = saved(tmp_path / "run", model, {name: v for name, v in later.items() if not lacks or lacks not in name}, version)
        return run, saved(tmp_path / "base", model, weights, 9 - version), later

    def test_it_is_the_base(self, tmp_path: Path, model: Any, weights: Tensors, version: int) -> None:
        run, base, _ = self.sides(tmp_path, model, weights, version)
        result = ckpt_cli.merge(run, tmp_path / "out", base=base, compare=True)
        assert not {"other-base", "unlike-base"} & codes(result).keys()
        (component,) = result.outputs
        assert component.comparison is not None
        assert component.comparison.reshaped == ()
        assert {drift.name for drift in component.comparison.drifts} == weights.keys()
        assert max(drift.relative_l2 or 0 for drift in component.comparison.drifts if drift.name.endswith(STACKS)) < 0.8
        found = ckpt_cli.verify(tmp_path / "out", base=base)
        assert found.exit_code == 0
        assert "other-base" not in {item.code for item in found.findings}
        assert "turned" in codes(found)

    @pytest.mark.parametrize("part", ["layers.1.mlp.experts", "mlp.experts"])
    def test_what_is_taken_from_it_is_as_the_rest(self, tmp_path: Path, model: Any, weights: Tensors, version: int, part: str) -> None:
        run, base, later = self.sides(tmp_path, model, weights, version, part)
        result = ckpt_cli.merge(run, tmp_path / "out", base=base, carry_from_base=[f"*{part}*"])
        wanted = {name: weights[name] if part in name else value for name, value in later.items()}
        assert differences(load(tmp_path / "out"), turned(wanted) if version == 4 else wanted) == []
        assert "turned" in codes(result)
        assert torch.equal(logits(tmp_path / "out"), logits(saved(tmp_path / "oracle", model, wanted, 5)))

    def test_what_fills_the_form_of_it_is_its_own(self, tmp_path: Path, model: Any, weights: Tensors, version: int) -> None:
        run, base, later = self.sides(tmp_path, model, weights, version, "layers.1.mlp.experts")
        ckpt_cli.merge(run, tmp_path / "out", base=base, match_base=True, fill_missing_from_base=True)
        wanted = {name: weights[name] if "layers.1.mlp.experts" in name else value for name, value in later.items()}
        assert differences(load(tmp_path / "out"), wanted if version == 4 else turned(wanted)) == []

    def test_another_model_is_none(self, tmp_path: Path, model: Any, weights: Tensors, version: int) -> None:
        other = model_of(40)
        base = saved(tmp_path / "base", other, dict(other.state_dict()), 9 - version)
        with pytest.raises(CkptError):
            ckpt_cli.merge(saved(tmp_path / "run", model, weights, version), tmp_path / "out", base=base, match_base=True)


class TestTurnedNames:
    RULES = HubRules(
        "X",
        "a test",
        (
            Conversion(
                Renaming(re.compile(r"(?P<g0>w[ab])"), ("w",), ("w",), None),
                ({"name": "Transpose", "dim0": 1, "dim1": 0, "check_dims": True},),
            ),
        ),
        (),
        (),
        (),
        {},
        "",
    )

    @pytest.mark.parametrize(
        ("others", "mine", "apart", "names", "unproved"),
        [
            ({"m.wa": (2, 3)}, {"m.wa": (2, 3)}, True, set(), ()),
            ({"m.wa": (2, 3)}, {"m.wa": (3, 2)}, False, {"m.wa"}, ()),
            ({"m.wa": (2, 4)}, {"m.wa": (3, 2)}, True, set(), ()),
            ({"m.wa": (2, 3), "m.wb": (2, 2)}, {"m.wa": (3, 2), "m.wb": (2, 2)}, None, {"m.wa", "m.wb"}, ()),
            ({"m.wa": (2, 3), "m.wb": (2, 2)}, {"m.wa": (2, 3), "m.wb": (2, 2)}, True, set(), ()),
            ({"m.wa": (2, 3), "n.wb": (2, 2)}, {"m.wa": (3, 2), "n.wb": (2, 2)}, None, {"m.wa", "n.wb"}, ()),
            ({"m.wb": (2, 2)}, {"m.wb": (2, 2)}, None, set(), ("m.wb",)),
            ({"m.wb": (2, 2)}, {"m.wb": (2, 2)}, True, {"m.wb"}, ()),
            ({"m.wb": (2, 2)}, {"m.wb": (2, 2)}, False, set(), ()),
            ({"m.c": (2, 3)}, {"m.c": (3, 2)}, True, set(), ()),
            ({"m.wa": (2,)}, {"m.wa": (2,)}, True, set(), ()),
        ],
    )
    def test_what_tells(self, others: Any, mine: Any, apart: bool | None, names: set[str], unproved: tuple[str, ...]) -> None:
        found = turned_names(others, mine, self.RULES, apart)
        assert (set(found.names), found.unproved) == (names, unproved)


@pytest.mark.parametrize("changed", [False, True])
def test_a_model_folder_inside_holds_the_same_weights_either_way_round(tmp_path: Path, model: Any, weights: Tensors, changed: bool) -> None:
    run = tmp_path / "run"
    held = trained_further(weights) if changed else weights
    saved(run / "huggingface", model, held, 4)
    torch.save({name: value.clone() for name, value in weights.items()}, run / "model_world_size_1_rank_0.pt")
    told = {note.code: note.text for note in ckpt_cli.merge(run, tmp_path / "out").checkpoint.notes}
    assert ("other-model" in told) == changed
    assert ("holds the same weights" in told.get("other-weights", "")) == (not changed)
    assert "other shapes" not in str(told)
