"""Adapters of the same shapes that a live model uses otherwise than the training did: another scale, or other weights below them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import Unsupported
from tests.architectures import MODELS, build

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")]
IDS = torch.arange(6)[None]


def adapted(seed: int, *, wrapped: bool = True, **settings: Any) -> Any:
    """A model with adapters of other values for every seed on a base that is always the same."""
    torch.manual_seed(0)
    base = build(*MODELS["llama"])
    config = peft.LoraConfig(**{"target_modules": ["q_proj", "v_proj"], "r": 2, "lora_alpha": 4, **settings})
    model = peft.get_peft_model(base, config) if wrapped else peft.inject_adapter_in_model(config, base)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter))
    return model.eval()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Path]:
    model = adapted(1)
    model.save_pretrained(tmp_path / "adapter")
    model.peft_config["default"].save_pretrained(tmp_path / "full")
    torch.save(model.state_dict(), tmp_path / "full" / "pytorch_model.bin")
    return model, tmp_path


def told(result: Any) -> list[str]:
    return [note.text for note in result.notes if note.code == "other-settings" and note.level == "warning"]


@pytest.mark.parametrize(("file", "options"), [("adapter", {"strict": False}), ("full", {})], ids=["adapter", "whole"])
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, None),
        ({"lora_alpha": 32}, "by 16 instead of 2 in 4 modules"),
        ({"use_rslora": True}, "by 2.82843 instead of 2 in 4 modules"),
        ({"alpha_pattern": {"q_proj": 10}}, "by 5 instead of 2 in 2 modules: model.layers.0.self_attn.q_proj"),
        ({"lora_alpha": 40, "alpha_pattern": {"[qv]_proj": 4}}, None),
    ],
    ids=["same", "alpha", "rslora", "pattern", "same by a pattern"],
)
def test_another_scale_is_a_warning(file: str, options: Any, settings: Any, said: str | None, saved: tuple[Any, Path]) -> None:
    model = adapted(2, **settings)
    texts = told(ckpt_cli.load_into(model, saved[1] / file, **options))
    assert [said in text for text in texts] == ([] if said is None else [True])
    assert torch.allclose(model(IDS).logits, saved[0](IDS).logits, atol=1e-5) is (said is None)


def test_a_model_with_injected_adapters_is_compared_too(saved: tuple[Any, Path]) -> None:
    for alpha, count in ((4, 0), (8, 1)):
        model = adapted(2, wrapped=False, lora_alpha=alpha)
        assert len(told(ckpt_cli.load_into(model, saved[1] / "full"))) == count


def test_the_given_alpha_is_compared(saved: tuple[Any, Path]) -> None:
    (text,) = told(ckpt_cli.load_into(adapted(2), saved[1] / "adapter", strict=False, lora_alpha=8))
    assert "--lora-alpha says, by 2 instead of 4" in text


def test_an_alpha_that_nothing_says_is_not_compared_and_that_is_said(saved: tuple[Any, Path]) -> None:
    (saved[1] / "full" / "adapter_config.json").unlink()
    notes = ckpt_cli.load_into(adapted(2, lora_alpha=32), saved[1] / "full").notes
    assert [(note.level, note.text.partition(": ")[2]) for note in notes if note.code == "adapter-scale"] == [
        ("info", "the alpha of these LoRA adapters is unknown")
    ]


def test_adapters_that_changed_the_weights_below_them(saved: tuple[Any, Path]) -> None:
    """They fit a model that was made in the same way, and no other; a base below such adapters is a warning."""
    source, folder = adapted(1, init_lora_weights="pissa"), saved[1]
    source.save_pretrained(folder / "pissa")
    with pytest.raises(Unsupported, match="initialised with pissa") as raised:
        ckpt_cli.load_into(adapted(2), folder / "pissa", strict=False)
    assert "init_lora_weights='pissa'" in (raised.value.expected or "")
    model = adapted(2, init_lora_weights="pissa")
    ckpt_cli.load_into(model, folder / "pissa", strict=False)
    assert torch.allclose(model(IDS).logits, source(IDS).logits, atol=1e-4)
    with pytest.raises(Unsupported, match="those of the checkpoint were not"):
        ckpt_cli.load_into(model, folder / "adapter", strict=False)
    torch.manual_seed(0)
    build(*MODELS["llama"]).save_pretrained(folder / "base")
    for way, count in (("pissa", 1), (True, 0)):
        loaded = ckpt_cli.load_into(adapted(2, init_lora_weights=way), folder / "base", allow_missing="*lora_*")
        assert len([note for note in loaded.notes if note.code == "adapter-base"]) == count
    torch.save(source.state_dict(), folder / "full" / "pytorch_model.bin")
    source.peft_config["default"].save_pretrained(folder / "full")
    model = adapted(2)
    ckpt_cli.load_into(model, folder / "full")
    assert torch.allclose(model(IDS).logits, source(IDS).logits, atol=1e-5)


def test_settings_that_are_no_plain_lora_are_not_compared(saved: tuple[Any, Path]) -> None:
    path = saved[1] / "full" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_qalora": True}))
    notes = ckpt_cli.load_into(adapted(2), saved[1] / "full").notes
    assert [note.level for note in notes if note.code == "adapter-scale"] == ["info"]
