"""Weights beside an adapter that were trained with it: they are named, whatever they are called and however the adapter is passed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from tests.cli import ckpt_fork as ckpt

HEAD = {"v_head.summary.weight": torch.ones(1, 16), "v_head.summary.bias": torch.zeros(1)}
NAMES = (
    "value_head.safetensors",
    "vit.safetensors",
    "non_lora_trainables.bin",
    "additional_trainable.pt",
    "embed_tokens.pt",
    "lm_head.pth",
)


MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
ADAPTER = {f"{MODULE}.lora_A.weight": torch.ones(2, 16), f"{MODULE}.lora_B.weight": torch.ones(16, 2)}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(ADAPTER, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def write(path: Path, content: Any) -> None:
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)


def told(path: Path) -> dict[str, str]:
    """The texts about other weights by their level."""
    return {note.level: note.text for note in ckpt_cli.inspect(path).checkpoint.notes if note.code == "other-weights"}


@pytest.mark.parametrize("passed", ["folder", "file"])
@pytest.mark.parametrize("name", NAMES)
def test_are_named_whatever_was_passed(adapter: Path, name: str, passed: str) -> None:
    write(adapter / name, HEAD)
    path = adapter if passed == "folder" else adapter / "adapter_model.safetensors"
    assert f"warning: {name} beside the weights" in ckpt("merge", path, "--dry-run").err
    assert name in told(path)["warning"]


@pytest.mark.parametrize("name", ["value_head.bin", "additional_trainable.pt"])
def test_beside_an_adapter_of_torch(adapter: Path, name: str) -> None:
    file = adapter / "adapter_model.safetensors"
    torch.save(ADAPTER, adapter / "adapter_model.bin")
    file.unlink()
    write(adapter / name, HEAD)
    for path in (adapter, adapter / "adapter_model.bin"):
        assert name in told(path)["warning"]


@pytest.mark.parametrize(
    "content",
    [HEAD, {"state_dict": HEAD, "step": 3}, {"projector": HEAD}, torch.ones(3, 16), {"<cat>": torch.ones(16)}],
    ids=["names", "inside", "of a part", "one tensor", "a vector per token"],
)
def test_are_told_by_what_is_in_a_file(adapter: Path, content: Any) -> None:
    torch.save(content, adapter / "more.pt")
    assert "more.pt" in told(adapter)["warning"]


@pytest.mark.parametrize(
    "content",
    [
        {"input_ids": torch.ones(2, 3, dtype=torch.long)},
        {"epoch": 1, "samples": [1, 2, 3]},
        {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": []},
        torch.arange(5),
    ],
    ids=["tokens", "counters", "an optimizer", "one vector"],
)
def test_training_state_of_any_name_is_none(adapter: Path, content: Any) -> None:
    torch.save(content, adapter / "more.pt")
    (adapter / "noise.bin").write_bytes(bytes(range(256)))
    assert told(adapter) == {}
    assert told(adapter / "adapter_model.safetensors") == {}


def test_a_whole_model_beside_the_file_is_no_part_of_it(adapter: Path) -> None:
    torch.save({"model.embed_tokens.weight": torch.ones(4, 16), "model.norm.weight": torch.ones(16)}, adapter / "pytorch_model.bin")
    assert told(adapter / "adapter_model.safetensors").keys() == {"info"}


def test_heads_beside_the_file_were_trained_with_it(adapter: Path) -> None:
    torch.save(HEAD, adapter / "pytorch_model.bin")
    assert told(adapter / "adapter_model.safetensors").keys() == {"warning"}


def test_of_a_file_that_is_a_model_nothing_is_said(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    torch.save(HEAD, tmp_path / "additional_trainable.pt")
    assert told(tmp_path / "model.safetensors") == {}
    assert "additional_trainable.pt" in told(tmp_path)["warning"]
