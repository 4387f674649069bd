"""An adapter that is written alone is the trained model only on a base that has all other weights of the checkpoint, which is compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_cli
from ckpt_cli.errors import Inconsistent
from tests.cli import ckpt_fork as ckpt
from tests.tensors import load
from tests.test_lora import CASES, adapted, trained
from tests.test_saved_while_merged import base_of

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")),
    pytest.mark.usefixtures("quiet_transformers", "asked_here"),
]

FORMATS = ["rank files", "DCP", "torch file"]
CODES = {"left-behind", "left-to-base"}


def changed(model: Any, way: str) -> Any:
    """A model with adapters whose other weights are not the base's: trained beside them, or begun from others."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            beside = "norm" in name or "embed_tokens" in name
            if (way == "trained beside" and beside) or (way == "another start" and "base_layer.weight" in name):
                parameter.add_(torch.randn_like(parameter) * parameter.std().clamp(min=0.02) * 0.05)
    return model


def saved(model: Any, folder: Path, form: str, ema: Mapping[str, torch.Tensor] | None = None) -> Path:
    """What training leaves in a format, with the configs of the model and of the adapter beside it."""
    if form == "rank files" and ema is None:
        return trained(model, folder)
    run = folder / "checkpoint-20"
    run.mkdir(parents=True)
    groups = {"model": model.state_dict(), **({"ema": dict(ema)} if ema is not None else {})}
    if form == "rank files":
        for group, state in groups.items():
            held = run / f"pytorch_{'' if group == 'model' else 'ema_'}model_fsdp_0"
            held.mkdir()
            for rank in range(2):
                torch.save(state, held / f"model_world_size_2_rank_{rank}.pt")
    elif form == "DCP":
        dcp.save(groups, checkpoint_id=run, no_dist=True)
    else:
        torch.save({**groups, "step": 20}, run / "checkpoint.pt")
    config = model.get_base_model().config
    config.architectures = [type(model.get_base_model()).__name__]
    config.save_pretrained(run)
    model.peft_config["default"].save_pretrained(run)
    return run


def factors(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() * 0.9 for name, each in model.named_parameters() if "lora_" in name}


def told(notes: Any) -> dict[str, str]:
    return {note.code: note.text for note in notes if note.code in CODES}


@pytest.mark.parametrize("form", FORMATS)
class TestWeightsOfTheCheckpoint:
    @pytest.mark.parametrize(
        ("way", "named"),
        [
            ("trained beside", ["model.embed_tokens.weight", "input_layernorm", "model.norm.weight"]),
            ("another start", ["q_proj", "o_proj"]),
        ],
    )
    def test_that_are_in_no_export_and_not_in_the_base_are_told(self, way: str, named: list[str], form: str, tmp_path: Path) -> None:
        base, model = base_of("plain", tmp_path / "base"), changed(adapted(*CASES["plain"]), way)
        run = saved(model, tmp_path / "run", form)
        text = told(ckpt_cli.merge(run, tmp_path / "out", base=base, lora="export").outputs[0].notes)["left-behind"]
        assert all(name in text for name in named)
        assert "pass --lora both to write it too" in text
        again = ckpt_cli.verify(tmp_path / "out", against=run, full=True)
        assert told(again.notes)["left-behind"] == text.replace(str(base), str(base.resolve()))
        both = ckpt_cli.merge(run, tmp_path / "both", base=base, lora="both")
        assert "left-behind" not in told(both.outputs[0].notes)
        assert "the fused model that is written beside it is" in told(both.outputs[1].notes)["left-behind"]
        expected = model.merge_and_unload().state_dict()
        assert all(torch.allclose(value, expected[name], atol=1e-5) for name, value in load(tmp_path / "both").items())
        result = ckpt("verify", tmp_path / "out", "--full", "--against", run)
        assert "warning: of " in result.out + result.err

    def test_are_compared_with_the_base_that_the_adapter_names(self, form: str, tmp_path: Path) -> None:
        base, model = base_of("plain", tmp_path / "base"), changed(adapted(*CASES["plain"]), "trained beside")
        model.peft_config["default"].base_model_name_or_path = str(base)
        run = saved(model, tmp_path / "run", form)
        text = told(ckpt_cli.merge(run, tmp_path / "out", lora="export").outputs[0].notes)["left-behind"]
        assert f"not those of {base}" in text
        assert "left-behind" in told(ckpt_cli.verify(tmp_path / "out", against=run).notes)

    def test_are_told_as_not_compared_where_no_base_is_known(self, form: str, tmp_path: Path) -> None:
        run = saved(adapted(*CASES["plain"]), tmp_path / "run", form)
        (output,) = ckpt_cli.merge(run, tmp_path / "out", lora="export").outputs
        assert told(output.notes).keys() == {"left-to-base"}
        (note,) = [note for note in output.notes if note.code == "left-to-base"]
        assert note.level == "info"
        assert "not compared with it (--base DIR compares them)" in note.text
        base = base_of("plain", tmp_path / "base")
        assert not told(ckpt_cli.merge(run, tmp_path / "out", base=base, lora="export", overwrite=True).outputs[0].notes)


@pytest.mark.parametrize("form", FORMATS)
class TestAnAverageOfFactors:
    def test_is_not_fused_into_another_base_than_the_model_beside_it_has(self, form: str, tmp_path: Path) -> None:
        base, model = base_of("plain", tmp_path / "base"), changed(adapted(*CASES["plain"]), "another start")
        run = saved(model, tmp_path / "run", form, factors(model))
        with pytest.raises(Inconsistent, match="not the model that ema was trained on") as caught:
            ckpt_cli.merge(run, tmp_path / "out", base=base, type="ema", lora_alpha=10)
        assert not (tmp_path / "out").exists()
        assert "--lora export, without --base" in caught.value.advice
        ckpt_cli.merge(run, tmp_path / "adapter", type="ema", lora="export", lora_alpha=10)
        ckpt_cli.merge(tmp_path / "adapter", tmp_path / "all_the_same", base=base)
        right = tmp_path / "right"
        plain = adapted(*CASES["plain"])
        plain.load_state_dict(model.state_dict())
        shutil.copytree(base, right)
        plain.unload().save_pretrained(right)
        assert not told(ckpt_cli.merge(run, tmp_path / "out", base=right, type="ema", lora_alpha=10).outputs[0].notes)
        model.load_state_dict(factors(model), strict=False)
        expected = model.merge_and_unload().state_dict()
        assert all(torch.allclose(value, expected[name], atol=1e-5) for name, value in load(tmp_path / "out").items())

    def test_lacks_what_was_trained_beside_it(self, form: str, tmp_path: Path) -> None:
        base, model = base_of("plain", tmp_path / "base"), changed(adapted(*CASES["plain"]), "trained beside")
        run = saved(model, tmp_path / "run", form, factors(model))
        for lora in (None, "export"):
            result = ckpt_cli.merge(run, tmp_path / f"{lora}", base=base, type="ema", lora=lora, lora_alpha=10)
            assert "model.norm.weight" in told(result.outputs[0].notes)["left-behind"]
            assert "left-behind" in told(ckpt_cli.verify(tmp_path / f"{lora}", against=run, type="ema", lora_alpha=10).notes)

    def test_on_the_right_base_raises_no_alarm(self, form: str, tmp_path: Path) -> None:
        base, model = base_of("plain", tmp_path / "base"), adapted(*CASES["plain"])
        average = factors(model)
        plain = saved(model, tmp_path / "run", form, average)
        model.merge_adapter()
        merged = saved(model, tmp_path / "merged", form, average)
        for run in (plain, merged):
            result = ckpt_cli.merge(run, tmp_path / run.parent.name / "out", base=base, type="ema", lora_alpha=10)
            assert not {note.code for note in (*result.checkpoint.notes, *result.outputs[0].notes)} & {*CODES, "lacks-tensors"}


@pytest.mark.parametrize("case", CASES)
def test_a_healthy_export_is_quiet(case: str, tmp_path: Path) -> None:
    base, model = base_of(case, tmp_path / "base"), adapted(*CASES[case])
    run = trained(model, tmp_path / "run")
    assert not told(ckpt_cli.merge(run, tmp_path / "out", base=base, lora="export").outputs[0].notes)


@pytest.mark.parametrize("saved_in", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("trained_in", [torch.bfloat16, torch.float16])
def test_rounding_is_no_difference(trained_in: torch.dtype, saved_in: torch.dtype, tmp_path: Path) -> None:
    base, model = base_of("plain", tmp_path / "base"), adapted(*CASES["plain"]).to(trained_in).to(saved_in)
    run = trained(model, tmp_path / "run")
    assert not told(ckpt_cli.merge(run, tmp_path / "out", base=base, lora="export").outputs[0].notes)


def test_a_small_step_of_training_is_one(tmp_path: Path) -> None:
    """Less than a step of 16 bits, in one row of the embedding."""
    base, model = base_of("plain", tmp_path / "base"), adapted(*CASES["plain"])
    with torch.no_grad():
        model.get_input_embeddings().weight[7] *= 1.001
    run = trained(model, tmp_path / "run")
    text = told(ckpt_cli.merge(run, tmp_path / "out", base=base, lora="export").outputs[0].notes)["left-behind"]
    assert "1 is not those of" in text
    assert "(model.embed_tokens.weight)" in text


def test_a_state_that_was_saved_while_merged_is_exported_in_silence(tmp_path: Path) -> None:
    base, model = base_of("plain", tmp_path / "base"), adapted(*CASES["plain"])
    model.merge_adapter()
    run = trained(model, tmp_path / "run")
    assert not told(ckpt_cli.merge(run, tmp_path / "out", base=base, lora="export").outputs[0].notes)


def test_resized_embeddings_and_new_heads_are_told(tmp_path: Path) -> None:
    base, model = base_of("plain", tmp_path / "base"), adapted(*CASES["plain"])
    rows = model.get_input_embeddings().weight.shape[0]
    model.get_base_model().resize_token_embeddings(rows + 8)
    model.get_base_model().register_module("v_head", torch.nn.Linear(model.config.hidden_size, 1))
    run = trained(model, tmp_path / "run")
    text = told(ckpt_cli.merge(run, tmp_path / "out", base=base, lora="export").outputs[0].notes)["left-behind"]
    assert "of another shape there (" in text
    assert "model.embed_tokens.weight" in text
    assert "2 are not there at all (v_head.bias, v_head.weight)" in text


def test_a_base_initialised_by_the_adapters_is_no_difference(tmp_path: Path) -> None:
    """PEFT makes it anew when it loads them."""
    base = base_of("plain", tmp_path / "base")
    model = adapted("qwen2", {"target_modules": ["q_proj"], "init_lora_weights": "pissa"})
    run = trained(model, tmp_path / "run")
    assert json.loads((run / "lora_adapter" / "adapter_config.json").read_text())["init_lora_weights"] == "pissa"
    assert not told(ckpt_cli.merge(run, tmp_path / "out", base=base, lora="export").outputs[0].notes)


def test_peft_computes_the_same_where_nothing_is_told(tmp_path: Path) -> None:
    base, model = base_of("plain", tmp_path / "base"), adapted(*CASES["plain"])
    ckpt_cli.merge(trained(model, tmp_path / "run"), tmp_path / "out", base=base, lora="export")
    loaded = peft.PeftModel.from_pretrained(type(model.get_base_model()).from_pretrained(base), tmp_path / "out").merge_and_unload()
    expected = model.merge_and_unload().state_dict()
    assert all(torch.allclose(value, expected[name], atol=1e-5) for name, value in loaded.state_dict().items())
