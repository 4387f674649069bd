"""Adapters of fused experts in an exported folder are scaled as the run says: their rank and name are told by the run's weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch

import ckpt_cli
from tests.architectures import MODELS, build

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")),
    pytest.mark.usefixtures("quiet_transformers", "asked_here"),
]


def test_by_patterns_of_parameters(tmp_path: Path) -> None:
    model = build(*MODELS["qwen3_moe"])
    model.config.architectures = [type(model).__name__]
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    patterns = {"rank_pattern": {"experts.gate_up_proj": 3}, "alpha_pattern": {"experts.down_proj": 6}}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, target_modules=[], target_parameters=parameters, **patterns))
    wrapped.save_pretrained(tmp_path / "adapter")
    model.config.save_pretrained(tmp_path / "run")
    torch.save(wrapped.state_dict(), tmp_path / "run" / "pytorch_model.bin")
    shutil.copy(tmp_path / "adapter" / "adapter_config.json", tmp_path / "run")
    ckpt_cli.merge(tmp_path / "run", tmp_path / "out", lora="export")
    checked = ckpt_cli.verify(tmp_path / "out", against=tmp_path / "run")
    assert not [item for item in checked.findings if item.code == "different-scale"]
    path = tmp_path / "out" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "alpha_pattern": {}}))
    found = [
        item.message for item in ckpt_cli.verify(tmp_path / "out", against=tmp_path / "run").findings if item.code == "different-scale"
    ]
    assert set(found) == {"2, but the run says 3"}
