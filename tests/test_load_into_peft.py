"""Live models of PEFT are filled by name: with a base, with adapters alone, or with both as they were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel

import ckpt_cli
from ckpt_cli.errors import MissingTensors, Unsupported
from tests.architectures import MODELS, build

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")]


def adapted(seed: int) -> Any:
    torch.manual_seed(seed)
    model = peft.get_peft_model(build(*MODELS["llama"]), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_alpha=4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model.eval()


def equal(model: Any, other: Any, *, factors: bool) -> bool:
    held, there = model.state_dict(), other.state_dict()
    return all(torch.equal(held[name], there[name]) for name in held if ("lora_" in name) is factors)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Path]:
    """A model with adapters; its base, its adapter as PEFT saves it, and its whole state dict."""
    model = adapted(1)
    model.save_pretrained(tmp_path / "adapter")
    torch.save(model.state_dict(), tmp_path / "both.pt")
    plain = {name.replace(".base_layer", "").removeprefix("base_model.model."): value for name, value in model.state_dict().items()}
    torch.save({name: value for name, value in plain.items() if "lora_" not in name}, tmp_path / "base.pt")
    return model, tmp_path


def test_a_base_fills_what_lies_below_the_adapters(saved: tuple[Any, Path]) -> None:
    source, folder = saved
    model, before = adapted(2), adapted(2)
    with pytest.raises(MissingTensors, match=r"lora_A\.default") as raised:
        ckpt_cli.load_into(model, folder / "base.pt")
    assert "allow_missing='*lora_*'" in (raised.value.hint or "")
    assert equal(model, before, factors=False)
    ckpt_cli.load_into(model, folder / "base.pt", allow_missing="*lora_*")
    assert equal(model, source, factors=False)
    assert equal(model, before, factors=True)


def test_adapters_alone_fill_the_adapters(saved: tuple[Any, Path]) -> None:
    source, folder = saved
    model, before = adapted(2), adapted(2)
    with pytest.raises(MissingTensors) as raised:
        ckpt_cli.load_into(model, folder / "adapter")
    assert "strict=False" in (raised.value.hint or "")
    ckpt_cli.load_into(model, folder / "adapter", strict=False)
    assert equal(model, source, factors=True)
    assert equal(model, before, factors=False)
    loaded = PeftModel.from_pretrained(before.get_base_model(), folder / "adapter", adapter_name="again")
    ids = torch.arange(5)[None]
    loaded.set_adapter("again")
    assert torch.equal(model(ids).logits, loaded(ids).logits)


@pytest.mark.parametrize("names", ["native", "hub", None])
def test_both_are_filled_and_not_fused(saved: tuple[Any, Path], names: Any) -> None:
    source, folder = saved
    model = adapted(2)
    ckpt_cli.load_into(model, folder / "both.pt", names=names)
    assert equal(model, source, factors=True)
    assert equal(model, source, factors=False)


def test_several_adapters_are_refused(saved: tuple[Any, Path]) -> None:
    model = adapted(2)
    model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(Unsupported, match="several adapters"):
        ckpt_cli.load_into(model, saved[1] / "adapter")


def with_trained_modules(seed: int) -> Any:
    """A model whose head and one norm are trained as a whole beside the adapters: PEFT holds each of them twice."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=["lm_head", "model.norm"])
    model = peft.get_peft_model(build(*MODELS["llama"]), config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model.eval()


def test_modules_trained_as_a_whole_are_filled_from_an_adapter(tmp_path: Path) -> None:
    source, model, before = with_trained_modules(1), with_trained_modules(2), with_trained_modules(2)
    source.save_pretrained(tmp_path / "adapter")
    loaded = ckpt_cli.load_into(model, tmp_path / "adapter", strict=False)
    assert not loaded.unexpected
    there, untouched = source.state_dict(), before.state_dict()
    for name, value in model.state_dict().items():
        is_of_adapter = "lora_" in name or ".modules_to_save." in name
        assert torch.equal(value, (there if is_of_adapter else untouched)[name]), name


def test_a_base_fills_both_states_of_modules_that_are_trained_as_a_whole(tmp_path: Path) -> None:
    """As they are where PEFT wraps a model that was loaded before."""
    base = build(*MODELS["llama"])
    torch.save(base.state_dict(), tmp_path / "base.pt")
    model = with_trained_modules(2)
    ckpt_cli.load_into(model, tmp_path / "base.pt", allow_missing="*lora_*")
    for name in ("lm_head", "model.norm"):
        held = model.get_base_model().get_submodule(name)
        for state in (held.original_module, held.modules_to_save["default"]):
            assert torch.equal(state.weight, base.get_submodule(name).weight)


def test_both_states_are_filled_from_a_whole_state_dict(tmp_path: Path) -> None:
    source, model = with_trained_modules(1), with_trained_modules(2)
    torch.save(source.state_dict(), tmp_path / "both.pt")
    ckpt_cli.load_into(model, tmp_path / "both.pt")
    assert equal(model, source, factors=True)
    assert equal(model, source, factors=False)
