"""Files of diffusers' LoRA: alpha and the rest of PEFT's config are in the header, under ``lora_adapter_metadata``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import CkptError, Undecidable

R, ALPHA = 4, 16
PLAIN = {"format": "pt"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "pipe" / "transformer"
    folder.mkdir(parents=True)
    tensors = {"to_q.weight": torch.randn(8, 8), "to_k.weight": torch.randn(8, 8)}
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors", PLAIN)
    (folder / "config.json").write_text(json.dumps({"_class_name": "Own"}))
    return folder


def adapter(folder: Path, lead: str = "transformer.", name: str = "pytorch_lora_weights.safetensors", **said: Any) -> Path:
    """A file as ``save_lora_weights`` of a pipeline writes it, or, without a ``lead``, ``save_lora_adapter`` of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    factors = {}
    for module in ("to_q", "to_k"):
        factors |= {f"{lead}{module}.lora_A.weight": torch.randn(R, 8), f"{lead}{module}.lora_B.weight": torch.randn(8, R)}
    config = {f"{lead}{key}": value for key, value in {"r": R, "target_modules": ["to_k", "to_q"], "peft_type": "LORA", **said}.items()}
    save_file(factors, folder / name, {**PLAIN, "lora_adapter_metadata": json.dumps(config)} if said else PLAIN)
    return folder


def by_hand(base: Path, lora: Path, lead: str, scale: float) -> dict[str, torch.Tensor]:
    weights, factors = load_file(next(base.glob("*.safetensors"))), load_file(next(lora.glob("*.safetensors")))
    return {
        name: (
            weight.double()
            + scale * factors[f"{lead}{name[:-7]}.lora_B.weight"].double() @ factors[f"{lead}{name[:-7]}.lora_A.weight"].double()
        )
        for name, weight in weights.items()
    }


@pytest.mark.parametrize("lead", ["transformer.", ""])
@pytest.mark.parametrize(("said", "scale"), [({}, ALPHA / R), ({"use_rslora": True}, ALPHA / math.sqrt(R))])
def test_the_scale_is_that_of_the_header(lead: str, said: dict[str, Any], scale: float, base: Path, tmp_path: Path) -> None:
    lora = adapter(tmp_path / "run" / "checkpoint-5", lead, lora_alpha=ALPHA, **said)
    (output,) = ckpt_cli.merge(lora, tmp_path / "fused", base=base).outputs
    assert output.lora is not None
    assert output.lora.scales == (scale,)
    assert not {note.code for note in output.notes} & {"lora-plain", "header-metadata"}
    for name, wanted in by_hand(base, lora, lead, scale).items():
        torch.testing.assert_close(load_file(tmp_path / "fused" / "model.safetensors")[name].double(), wanted)
    with safe_open(tmp_path / "fused" / "model.safetensors", "pt") as file:
        assert "lora_adapter_metadata" not in file.metadata()
    assert ckpt_cli.verify(tmp_path / "fused", against=lora).exit_code == 0


def test_an_export_has_the_config_of_the_header(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "run", lora_alpha=ALPHA, use_rslora=True)
    ckpt_cli.merge(lora, tmp_path / "out", lora="export")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["lora_alpha"], config["use_rslora"], config["target_modules"]) == (ALPHA, True, ["to_k", "to_q"])
    assert "base_model.model.to_q.lora_A.weight" in load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert ckpt_cli.verify(tmp_path / "out", against=lora).exit_code == 0


def test_another_alpha_than_that_of_the_header_is_a_warning(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "run", lora_alpha=ALPHA)
    (output,) = ckpt_cli.merge(lora, tmp_path / "out", lora="export", lora_alpha=8).outputs
    assert any(note.code == "lora-alpha" and "pytorch_lora_weights.safetensors says alpha 16" in note.text for note in output.notes)


def test_what_no_header_says_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Undecidable, match="for which diffusers takes alpha = r"):
        ckpt_cli.merge(adapter(tmp_path / "run"), tmp_path / "out")


def test_a_header_about_several_models_is_of_none(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "run", lora_alpha=ALPHA)
    file = lora / "pytorch_lora_weights.safetensors"
    config = {"transformer.lora_alpha": 16, "text_encoder.lora_alpha": 4}
    save_file(load_file(file), file, {**PLAIN, "lora_adapter_metadata": json.dumps(config)})
    with pytest.raises(Undecidable, match=r"those of 2 models \(transformer 16, text_encoder 4\)"):
        ckpt_cli.merge(lora, tmp_path / "out")
    (output,) = ckpt_cli.merge(lora, tmp_path / "out", lora_alpha=8).outputs
    assert any("those of 2 models" in note.text for note in output.notes if note.code == "lora-alpha")


def test_another_rank_than_the_header_says_is_refused(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "run", lora_alpha=ALPHA, r=2 * R)
    with pytest.raises(CkptError, match=r"rank 4, but the header of pytorch_lora_weights.safetensors says 8"):
        ckpt_cli.merge(lora, tmp_path / "out")


def test_the_header_of_another_file_does_not_count(base: Path, tmp_path: Path) -> None:
    lora = adapter(tmp_path / "run", "", lora_alpha=ALPHA)
    adapter(lora, "", "other.safetensors")
    with pytest.raises(Undecidable, match="alpha of these LoRA adapters is unknown"):
        ckpt_cli.merge(lora / "other.safetensors", tmp_path / "out", base=base)


def test_a_header_that_is_no_config_is_told(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "run", lora_alpha=ALPHA)
    file = lora / "pytorch_lora_weights.safetensors"
    save_file(load_file(file), file, {**PLAIN, "lora_adapter_metadata": "[]"})
    with pytest.raises(CkptError, match="is not a JSON object"):
        ckpt_cli.merge(lora, tmp_path / "out")
