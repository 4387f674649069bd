"""Quantised weights whose config.json has no quantization_config: codes and scales are copied, and never cast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_cli
from ckpt_cli.errors import Unsupported, UsageError
from tests.tensors import Tensors, differences, load
from tests.tiny import config, folder, unknown, weights


def packed() -> Tensors:
    """As bitsandbytes stores weights of 4 bits: bytes in a column, and what unpacks them below the name of the weight."""
    held: Tensors = {}
    for name, tensor in weights().items():
        if not name.endswith("_proj.weight"):
            held[name] = tensor
            continue
        held[name] = torch.arange(tensor.numel() // 2).to(torch.uint8).reshape(-1, 1)
        held[f"{name}.absmax"] = torch.arange(4, dtype=torch.uint8)
        held[f"{name}.nested_absmax"] = torch.randn(2)
        held[f"{name}.quant_map"] = torch.randn(16)
        held[f"{name}.quant_state.bitsandbytes__nf4"] = torch.arange(40, dtype=torch.uint8)
    return held


def eight() -> Tensors:
    """As bitsandbytes stores weights of 8 bits."""
    held: Tensors = {}
    for name, tensor in weights().items():
        is_codes = name.endswith("_proj.weight")
        held[name] = tensor.mul(100).to(torch.int8) if is_codes else tensor
        if is_codes:
            held[name.replace("weight", "SCB")] = torch.randn(len(tensor))
    return held


def packed_columns() -> Tensors:
    """As GPTQ stores weights: eight codes in an integer, scales and zeros in the same module."""
    held: Tensors = {}
    for name, tensor in weights().items():
        if not name.endswith("_proj.weight"):
            held[name] = tensor
            continue
        module = name.removesuffix("weight")
        held[f"{module}qweight"] = torch.arange(tensor.numel() // 8, dtype=torch.int32).reshape(-1, len(tensor))
        held[f"{module}qzeros"] = torch.arange(4, dtype=torch.int32).reshape(1, -1)
        held[f"{module}scales"] = torch.randn(1, len(tensor)).half()
        held[f"{module}g_idx"] = torch.zeros(tensor.shape[1], dtype=torch.int32)
    return held


def of_quanto() -> Tensors:
    """As optimum-quanto stores weights: codes and scales below the name of the weight, and scales of what goes in and out."""
    held: Tensors = {}
    for name, tensor in weights().items():
        if not name.endswith("_proj.weight"):
            held[name] = tensor
            continue
        module = name.removesuffix("weight")
        held[f"{name}._data"] = tensor.mul(100).to(torch.int8)
        held[f"{name}._scale"] = torch.randn(len(tensor), 1)
        held |= {f"{module}{side}_scale": torch.ones(()) for side in ("input", "output")}
    return held


def of_hqq() -> Tensors:
    """As HQQ stores weights: packed bytes, scales and zeros, and numbers that say how they are packed."""
    held: Tensors = {}
    for name, tensor in weights().items():
        if not name.endswith("_proj.weight"):
            held[name] = tensor
            continue
        module = name.removesuffix("weight")
        held[f"{module}W_q"] = torch.arange(tensor.numel() // 2).to(torch.uint8)
        held |= {f"{module}{part}": torch.randn(4, 1).half() for part in ("scale", "zero")}
        held |= {f"{module}nbits": torch.tensor(4), f"{module}shape": torch.tensor(tensor.shape)}
    return held


KINDS = [packed, eight, packed_columns, of_quanto, of_hqq]
CONFIGS: list[dict[str, Any] | None] = [config(), unknown(), None]


def notes(result: Any) -> dict[str, str]:
    return {note.code: note.text for note in result.outputs[0].notes}


@pytest.mark.parametrize("of", CONFIGS, ids=["known", "unknown", "without"])
@pytest.mark.parametrize("kind", KINDS)
def test_are_not_cast(tmp_path: Path, kind: Callable[[], Tensors], of: dict[str, Any] | None) -> None:
    """Scales that are rounded to 16 bits are other scales."""
    source = folder(tmp_path / "source", kind(), of, bare=of is None)
    with pytest.raises(Unsupported, match="quantised weights cannot be cast to bf16") as caught:
        ckpt_cli.merge(source, tmp_path / "out", dtype="bf16")
    assert "_proj" in caught.value.message
    assert "absmax" not in caught.value.message
    with pytest.raises(UsageError, match="quantised"):
        ckpt_cli.open(source, dtype="fp16")


@pytest.mark.parametrize("of", CONFIGS, ids=["known", "unknown", "without"])
def test_packed_codes_are_copied_with_a_warning(tmp_path: Path, of: dict[str, Any] | None) -> None:
    """Their shapes are not those of the class, which makes config.json no other model's; merge and verify say the same."""
    source = folder(tmp_path / "source", packed(), of, bare=of is None)
    result = ckpt_cli.merge(source, tmp_path / "out")
    assert differences(load(tmp_path / "out"), load(source)) == []
    lack = "there is no config.json with a quantization_config" if of is None else "config.json has no quantization_config"
    assert f"codes of 4 bits, which bitsandbytes packed, and {lack}, without which no loader unpacks them" in notes(result)["odd-dtype"]
    found = {item.code: item.message for item in ckpt_cli.verify(source).findings}
    assert found["odd-dtype"] == notes(result)["odd-dtype"]
    assert not {"wrong-shape", "cut-tensor"} & found.keys()


@pytest.mark.parametrize(("kind", "leaf"), [(packed_columns, "qweight"), (of_quanto, "weight._data"), (of_hqq, "W_q")])
def test_codes_of_any_library_are_copied_with_a_warning(tmp_path: Path, kind: Callable[[], Tensors], leaf: str) -> None:
    """Code of the model's own is not asked, and neither it nor a loader decodes them; merge and verify say the same."""
    own = unknown(auto_map={"AutoModelForCausalLM": "own.Own"})
    source = folder(tmp_path / "source", kind(), own, {"own.py": "import torch"})
    result = ckpt_cli.merge(source, tmp_path / "out")
    assert differences(load(tmp_path / "out"), load(source)) == []
    said = notes(result)["odd-dtype"]
    assert f"_proj.{leaf}" in said
    assert "config.json has no quantization_config, without which loaders ignore the scales" in said
    assert "odd-dtype" in {item.code for item in ckpt_cli.verify(source).findings}


def test_declared_ones_are_no_reason_for_a_warning(tmp_path: Path) -> None:
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    source = folder(tmp_path / "source", packed(), config(quantization_config=said))
    assert "odd-dtype" not in notes(ckpt_cli.merge(source, tmp_path / "out"))


def test_counters_beside_a_scale_are_no_codes(tmp_path: Path) -> None:
    """Buffers of small integers, in modules that have a parameter called scale."""
    more = {"norm.scale": torch.randn(4), "norm.position_ids": torch.arange(4, dtype=torch.int32)}
    more |= {"norm.num_batches_tracked": torch.tensor(3, dtype=torch.int32), "norm.mask": torch.ones(4, dtype=torch.uint8)}
    source = folder(tmp_path / "source", {**weights(), **more}, unknown())
    result = ckpt_cli.merge(source, tmp_path / "out", dtype="bf16")
    assert result.outputs[0].cast == len(weights()) + 1
    assert "odd-dtype" not in notes(result)
