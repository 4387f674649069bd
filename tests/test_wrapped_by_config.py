"""Models whose class adds adapters by a rank in config.json, as InternVL does: what is written, and what the rank says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_cli
from ckpt_cli.errors import CkptError

LINEAR = "model.layers.0.mlp.up_proj"
RANK = 4


def internvl(folder: Path, *, adapted: bool = True, rank: int = RANK, **entries: Any) -> Path:
    """A checkpoint as internvl_chat_finetune.py writes it: all weights, those of the language model wrapped."""
    generator = torch.Generator().manual_seed(0)
    lead = "language_model.base_model.model." if adapted else "language_model."
    tensors = {
        f"{lead}{LINEAR}{'.base_layer' if adapted else ''}.weight": torch.randn(8, 8, generator=generator),
        f"{lead}lm_head.weight": torch.randn(6, 8, generator=generator),
        "mlp1.1.weight": torch.randn(8, 8, generator=generator),
    }
    if adapted:
        tensors[f"{lead}{LINEAR}.lora_A.default.weight"] = torch.randn(rank, 8, generator=generator)
        tensors[f"{lead}{LINEAR}.lora_B.default.weight"] = torch.randn(8, rank, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "use_llm_lora": RANK, "use_backbone_lora": 0}
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32", **entries}))
    return folder


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def test_fused_adapters_are_not_added_again(tmp_path: Path) -> None:
    step = internvl(tmp_path / "checkpoint-10")
    result = ckpt_cli.merge(step, tmp_path / "out")
    assert (config_of(tmp_path / "out")["use_llm_lora"], config_of(tmp_path / "out")["use_backbone_lora"]) == (0, 0)
    (told,) = [note for note in result.outputs[0].notes if note.code == "class-repaired"]
    assert told.level == "info"
    assert "use_llm_lora 4" in told.text
    assert {note.code for note in result.outputs[0].notes}.isdisjoint({"lora-plain", "lora-alpha"})
    stored, fused = load_file(step / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    lead = f"language_model.base_model.model.{LINEAR}"
    factors = [stored[f"{lead}.lora_{which}.default.weight"] for which in "BA"]
    # The scale of InternVL, whose alpha is twice the rank.
    torch.testing.assert_close(fused[f"language_model.{LINEAR}.weight"], stored[f"{lead}.base_layer.weight"] + 2 * factors[0] @ factors[1])
    assert "error" not in {found.severity for found in ckpt_cli.verify(tmp_path / "out", against=step).findings}


def test_weights_that_were_fused_before_have_none(tmp_path: Path) -> None:
    ckpt_cli.merge(internvl(tmp_path / "checkpoint-10", adapted=False), tmp_path / "out")
    assert config_of(tmp_path / "out")["use_llm_lora"] == 0


def test_kept_adapters_are_said(tmp_path: Path) -> None:
    ckpt_cli.merge(internvl(tmp_path / "checkpoint-10"), tmp_path / "out", lora="keep")
    assert config_of(tmp_path / "out")["use_llm_lora"] == RANK


@pytest.mark.parametrize("entries", [{"use_llm_lora": True}, {"model_type": "other_chat"}, {"use_backbone_lora": 8}])
def test_what_says_no_alpha_is_no_reason_to_guess_one(entries: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CkptError, match="alpha of these LoRA adapters is unknown"):
        ckpt_cli.merge(internvl(tmp_path / "checkpoint-10", **entries), tmp_path / "out")


def test_another_rank_than_the_config_says_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CkptError, match=r"rank 2, but config\.json says 4"):
        ckpt_cli.merge(internvl(tmp_path / "checkpoint-10", rank=2), tmp_path / "out")
    assert ckpt_cli.merge(internvl(tmp_path / "checkpoint-20", rank=2), tmp_path / "out", lora_alpha=4.0).outputs
