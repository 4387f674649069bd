"""Adapters trained on a quantised base (QLoRA): config.json says so, and the base that they are fused into is in 16 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, Unsupported

BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
PLAIN = {"format": "pt"}


def base(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(parents=True)
    weights = {"model.q_proj.weight": torch.randn(8, 8).bfloat16(), "model.norm.weight": torch.randn(8).bfloat16(), **tensors}
    save_file(weights, folder / "model.safetensors", PLAIN)
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "torch_dtype": "bfloat16"}))
    return folder


def adapter(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    lead = "base_model.model.model.q_proj"
    factors = {f"{lead}.lora_A.weight": torch.randn(2, 8), f"{lead}.lora_B.weight": torch.randn(8, 2)}
    save_file(factors, folder / "adapter_model.safetensors", PLAIN)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}))
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "torch_dtype": "bfloat16", "note": "ü", **config}))
    return folder


@pytest.mark.parametrize("said", [{"quantization_config": BNB}, {"quantization": {"bits": 4}, "quantization_config": {"bits": 4}}])
def test_a_plain_base_is_fused_and_the_output_says_that_it_is_plain(said: dict[str, Any], tmp_path: Path) -> None:
    lora, plain = adapter(tmp_path / "run" / "checkpoint-5", **said), base(tmp_path / "base")
    (output,) = ckpt_cli.merge(lora, tmp_path / "out", base=plain).outputs
    assert [note.code for note in output.notes if note.code == "no-scales"] == ["no-scales"]
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config == {"model_type": "own", "torch_dtype": "bfloat16", "note": "ü"}
    assert load_file(tmp_path / "out" / "model.safetensors")["model.q_proj.weight"].dtype == torch.bfloat16
    assert ckpt_cli.verify(tmp_path / "out", against=lora).exit_code == 0
    assert ckpt_cli.merge(lora, tmp_path / "wide", base=plain, dtype="fp32").outputs[0].lora is not None


def test_codes_are_refused_as_before(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "run" / "checkpoint-5", quantization_config=BNB)
    codes = {"model.q_proj.weight": torch.zeros(32, 1, dtype=torch.uint8), "model.q_proj.weight.absmax": torch.ones(1)}
    with pytest.raises(CkptError):
        ckpt_cli.merge(lora, tmp_path / "out", base=base(tmp_path / "base", **codes))
    said = base(tmp_path / "said")
    (said / "config.json").write_text(json.dumps({"model_type": "own", "quantization_config": BNB}))
    with pytest.raises(Unsupported, match="quantised"):
        ckpt_cli.merge(lora, tmp_path / "out", base=said)
    halves = {"model.q_proj.weight": torch.zeros(8, 8, dtype=torch.float8_e4m3fn), "model.q_proj.weight_scale": torch.ones(1)}
    with pytest.raises(Unsupported, match="quantised"):
        ckpt_cli.merge(lora, tmp_path / "out", base=base(tmp_path / "float8", **halves))


def test_in_place_the_config_that_is_there_would_stay(tmp_path: Path) -> None:
    lora, plain = adapter(tmp_path / "run" / "checkpoint-5", quantization_config=BNB), base(tmp_path / "base")
    torch.save({f"{name}": tensor for name, tensor in load_file(lora / "adapter_model.safetensors").items()}, lora / "pytorch_model.bin")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (lora / name).unlink()
    with pytest.raises(CkptError, match="config"):
        ckpt_cli.merge(lora, in_place=True, base=plain, lora_alpha=4)
