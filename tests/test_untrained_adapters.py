"""Adapters that change nothing are told: a fused model is then the base, whatever a training cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ckpt_cli
from tests import tiny

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning")]


def adapter(folder: Path, base: Path, trained: str, **options: Any) -> Path:
    """An adapter whose factors are those of a new one, but for modules with ``trained`` in their name."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name and trained and trained in name:
                parameter.copy_(torch.randn_like(parameter))
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny.folder(tmp_path / "base", tiny.weights(), tiny.config())


def told(result: ckpt_cli.MergeResult) -> bool:
    return "untrained-adapter" in {note.code for note in result.outputs[0].notes if note.level == "warning"}


@pytest.mark.parametrize("lora", ["fuse", "export"])
@pytest.mark.parametrize(
    ("trained", "targets"), [("", ["q_proj", "v_proj"]), ("", ["embed_tokens"]), ("layers.1.self_attn.v_proj", ["q_proj", "v_proj"])]
)
def test_adapters_of_which_none_changes_anything_are_told(lora: Any, trained: str, targets: list[str], base: Path, tmp_path: Path) -> None:
    run = adapter(tmp_path / "adapter", base, trained, target_modules=targets)
    result = ckpt_cli.merge(run, tmp_path / "out", base=base, lora=lora)
    assert told(result) is not bool(trained)


def test_dora_changes_norms_and_is_not(base: Path, tmp_path: Path) -> None:
    run = adapter(tmp_path / "adapter", base, "", target_modules=["q_proj"], use_dora=True)
    assert not told(ckpt_cli.merge(run, tmp_path / "out", base=base))
