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


def quantised(codes_of: Callable[[str, torch.Tensor], Tensors]) -> Tensors:
    """A model of which ``codes_of`` stores each projection, by the name of its weight without ``weight`` and its values."""
    held: Tensors = {}
    for name, tensor in weights().items():
        held |= codes_of(name.removesuffix("weight"), tensor) if name.endswith("_proj.weight") else {name: tensor}
    return held


def packed() -> Tensors:
    """As bitsandbytes stores weights of 4 bits: bytes in a column, and what unpacks them below the name of the weight."""
    return quantised(
        lambda module, tensor: {
            f"{module}weight": torch.arange(tensor.numel() // 2).to(torch.uint8).reshape(-1, 1),
            f"{module}weight.absmax": torch.arange(4, dtype=torch.uint8),
            f"{module}weight.nested_absmax": torch.randn(2),
            f"{module}weight.quant_map": torch.randn(16),
            f"{module}weight.quant_state.bitsandbytes__nf4": torch.arange(40, dtype=torch.uint8),
        }
    )


def eight() -> Tensors:
    """As bitsandbytes stores weights of 8 bits."""
    return quantised(lambda module, tensor: {f"{module}weight": tensor.mul(100).to(torch.int8), f"{module}SCB": torch.randn(len(tensor))})


def packed_columns() -> Tensors:
    """As GPTQ stores weights: eight codes in an integer, scales and zeros in the same module."""
    return quantised(
        lambda module, tensor: {
            f"{module}qweight": torch.arange(tensor.numel() // 8, dtype=torch.int32).reshape(-1, len(tensor)),
            f"{module}qzeros": torch.arange(4, dtype=torch.int32).reshape(1, -1),
            f"{module}scales": torch.randn(1, len(tensor)).half(),
            f"{module}g_idx": torch.zeros(tensor.shape[1], dtype=torch.int32),
        }
    )


def of_quanto() -> Tensors:
    """As optimum-quanto stores weights: codes and scales below the name of the weight, and scales of what goes in and out."""
    return quantised(
        lambda module, tensor: {
            f"{module}weight._data": tensor.mul(100).to(torch.int8),
            f"{module}weight._scale": torch.randn(len(tensor), 1),
            f"{module}input_scale": torch.ones(()),
            f"{module}output_scale": torch.ones(()),
        }
    )


def of_hqq() -> Tensors:
    """As HQQ stores weights: packed bytes, scales and zeros, and numbers that say how they are packed."""
    return quantised(
        lambda module, tensor: {
            f"{module}W_q": torch.arange(tensor.numel() // 2).to(torch.uint8),
            f"{module}scale": torch.randn(4, 1).half(),
            f"{module}zero": torch.randn(4, 1).half(),
            f"{module}nbits": torch.tensor(4),
            f"{module}shape": torch.tensor(tensor.shape),
        }
    )


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


def packed_into(storage: torch.dtype) -> Callable[[], Tensors]:
    """As bitsandbytes stores weights of 4 bits with bnb_4bit_quant_storage, which FSDP needs: bytes that are called floats, some NaN."""

    def made() -> Tensors:
        held = packed()
        codes = [name for name in held if f"{name}.quant_map" in held]
        return held | {name: torch.full((len(held[name]),), 255, dtype=torch.uint8).view(storage).reshape(-1, 1) for name in codes}

    return made


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32], ids=str)
class TestCodesThatAreCalledFloats:
    @pytest.mark.parametrize("of", CONFIGS, ids=["known", "unknown", "without"])
    def test_are_not_cast_and_told(self, tmp_path: Path, storage: torch.dtype, of: dict[str, Any] | None) -> None:
        source = folder(tmp_path / "source", packed_into(storage)(), of, bare=of is None)
        with pytest.raises(Unsupported, match=r"quantised weights cannot be cast to fp16: .*_proj\.weight"):
            ckpt_cli.merge(source, tmp_path / "out", dtype="fp16")
        with pytest.raises(UsageError, match="quantised"):
            ckpt_cli.open(source, dtype="fp16")
        said = notes(ckpt_cli.merge(source, tmp_path / "out"))["odd-dtype"]
        assert "that holds no numbers: codes of 4 bits, which bitsandbytes packed" in said
        assert differences(load(tmp_path / "out"), load(source)) == []

    def test_have_no_values_to_judge_or_to_compare(self, tmp_path: Path, storage: torch.dtype) -> None:
        held = packed_into(storage)()
        name = next(name for name in held if f"{name}.quant_map" in held)
        others = {**held, name: torch.zeros_like(held[name])}
        first, second = (folder(tmp_path / each, tensors, unknown()) for each, tensors in {"a": held, "b": others}.items())
        assert "non-finite" not in {item.code for item in ckpt_cli.verify(first, full=True).findings}
        (drift,) = ckpt_cli.diff(first, second).comparison.drifts
        assert (drift.name, drift.kind, drift.max_abs) == (name, "integer", None)

    def test_are_not_averaged(self, tmp_path: Path, storage: torch.dtype) -> None:
        held = packed_into(storage)()
        name = next(name for name in held if f"{name}.quant_map" in held)
        others = {**held, name: torch.ones_like(held[name])}
        paths = [folder(tmp_path / each, tensors, unknown()) for each, tensors in {"a": held, "b": others}.items()]
        with pytest.raises(Unsupported, match="quantised weights are not averaged") as caught:
            ckpt_cli.average(paths, tmp_path / "out")
        assert caught.value.tensor == name


def test_codes_without_scales_under_adapters_are_neither_cast_nor_added_to(tmp_path: Path) -> None:
    """FSDP's states of a QLoRA: the sides of the factors tell that a column is a packed matrix."""
    state, module = {}, "base_model.model.model.layers.0.self_attn.q_proj"
    state[f"{module}.base_layer.weight"] = torch.ones(64, 1, dtype=torch.bfloat16)
    state[f"{module}.lora_A.default.weight"], state[f"{module}.lora_B.default.weight"] = torch.ones(4, 16), torch.ones(16, 4)
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(Unsupported, match="quantised weights cannot be cast"):
        ckpt_cli.merge(tmp_path / "state.pt", tmp_path / "out", lora="keep", dtype="fp32")
    with pytest.raises(Unsupported, match="packed codes of 4 bits"):
        ckpt_cli.merge(tmp_path / "state.pt", tmp_path / "out", lora_alpha=8)
    state[f"{module}.base_layer.weight"] = torch.ones(16, 16)
    torch.save(state, tmp_path / "state.pt")
    ckpt_cli.merge(tmp_path / "state.pt", tmp_path / "out", lora="keep", dtype="bf16")


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_distances_between_codes_of_other_scales_are_told(tmp_path: Path, scale: float) -> None:
    first = {"q.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "q.weight_scale": torch.ones(4, 1)}
    second = {"q.weight": (torch.ones(4, 4) * 2).to(torch.float8_e4m3fn), "q.weight_scale": torch.ones(4, 1) * scale}
    paths = [folder(tmp_path / each, tensors, None, bare=True) for each, tensors in {"a": first, "b": second}.items()]
    said = {note.code: note.text for note in ckpt_cli.diff(*paths).notes}
    assert ("codes-compared" in said) is (scale != 1)
    assert scale == 1 or said["codes-compared"].startswith("q.weight: codes are compared")


def test_scales_of_nunchaku_are_not_cast(tmp_path: Path) -> None:
    held = {"q.qweight": torch.ones(4, 2, dtype=torch.int8), "q.wscales": torch.ones(1, 4), "norm.weight": torch.ones(4)}
    with pytest.raises(Unsupported, match=r"q\.qweight are codes"):
        ckpt_cli.merge(folder(tmp_path / "source", held, None, bare=True), tmp_path / "out", dtype="bf16")
