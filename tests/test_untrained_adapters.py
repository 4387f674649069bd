"""Adapters that change nothing are told: a fused model is then the base, whatever a training cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import ckpt_cli
from ckpt_cli.errors import Inconsistent
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


def cut_to(folder: Path, ranks: int, rank: int = 0, only: str = "") -> Path:
    """An adapter whose lora_B has the rows of one rank alone, and zeros for those of the others, as an ungathered save left it."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "lora_B" in name and only in name:
            kept = tensor.chunk(ranks)[rank].clone()
            tensor.zero_().chunk(ranks)[rank].copy_(kept)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("lora", ["fuse", "export"])
@pytest.mark.parametrize(
    ("ranks", "rank", "only", "warned"), [(2, 0, "", True), (8, 0, "", True), (2, 1, "", True), (2, 0, "q_proj", False), (1, 0, "", False)]
)
def test_factors_of_one_rank_alone_are_told(lora: Any, ranks: int, rank: int, only: str, warned: bool, base: Path, tmp_path: Path) -> None:
    run = adapter(tmp_path / "adapter", base, "layers", target_modules=["q_proj", "v_proj", "down_proj"])
    result = ckpt_cli.merge(cut_to(run, ranks, rank, only), tmp_path / "out", base=base, lora=lora)
    codes = {note.code for note in result.outputs[0].notes if note.level == "warning"}
    assert ("partial-adapter-rows" in codes) is warned
    assert "untrained-adapter" not in codes


def test_a_factor_that_is_zero_in_full_does_not_hide_it(base: Path, tmp_path: Path) -> None:
    run = adapter(tmp_path / "adapter", base, "layers.0", target_modules=["q_proj", "v_proj"])
    result = ckpt_cli.merge(cut_to(run, 4), tmp_path / "out", base=base)
    assert "partial-adapter-rows" in {note.code for note in result.outputs[0].notes}


def test_flat_factors_of_one_rank_have_a_hint(base: Path, tmp_path: Path) -> None:
    file = adapter(tmp_path / "adapter", base, "layers", target_modules=["q_proj"]) / "adapter_model.safetensors"
    save_file({name: tensor.flatten() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(Inconsistent, match="is not a matrix") as caught:
        ckpt_cli.merge(file.parent, tmp_path / "out", base=base)
    assert "all ranks" in str(caught.value.hint)
