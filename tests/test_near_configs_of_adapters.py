"""Configs of adapters under names that PEFT does not read: alpha and rank stabilisation are in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.errors import Undecidable

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "use_rslora": True}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder, lead = tmp_path / "adapter", "base_model.model.model.q_proj"
    folder.mkdir()
    factors = {f"{lead}.lora_A.weight": torch.randn(2, 8), f"{lead}.lora_B.weight": torch.randn(8, 2)}
    save_file(factors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "name", ["adapter_config (1).json", "adapter_config.json.txt", "Adapter_config.json", "adapter-config.json", "adapter_config.json.part"]
)
def test_are_told_and_not_read(name: str, adapter: Path, tmp_path: Path) -> None:
    (adapter / name).write_text(json.dumps(CONFIG))
    with pytest.raises(Undecidable, match="PEFT reads no config under such a name"):
        ckpt_cli.merge(adapter, tmp_path / "out", lora="export")
    (output,) = ckpt_cli.merge(adapter, tmp_path / "out", lora="export", lora_alpha=4).outputs
    assert [note.text.partition(":")[0] for note in output.notes if note.code == "near-name"] == [name]
    assert [item.severity for item in ckpt_cli.verify(adapter).findings if item.code == "near-name"] == ["warning"]
    # The advice holds.
    (adapter / name).rename(adapter / "adapter_config.json")
    (output,) = ckpt_cli.merge(adapter, tmp_path / "again", lora="export").outputs
    assert not [note for note in output.notes if note.code in ("near-name", "lora-plain")]


@pytest.mark.parametrize("name", ["adapter_config.json.bak", "adapter_config.old.json", "training_config.json"])
def test_copies_put_aside_are_not(name: str, adapter: Path, tmp_path: Path) -> None:
    (adapter / name).write_text(json.dumps(CONFIG))
    (output,) = ckpt_cli.merge(adapter, tmp_path / "out", lora="export", lora_alpha=4).outputs
    assert not [note for note in output.notes if note.code == "near-name"]


def test_beside_a_config_they_are_not(adapter: Path, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_config (1).json"):
        (adapter / name).write_text(json.dumps(CONFIG))
    (output,) = ckpt_cli.merge(adapter, tmp_path / "out", lora="export").outputs
    assert not [note for note in output.notes if note.code == "near-name"]
