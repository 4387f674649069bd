"""Layers without those before them are a part of a model; what begins later than at 0 for another reason is let be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_cli
from ckpt_cli.hub.adapters.mlx import trained_layers
from ckpt_cli.hub.classes.config_counts import mismatches
from tests import tiny

CODE = "no-layers"
LEAVES = ("attn.qkv.weight", "attn.out.weight", "mlp.up.weight", "mlp.down.weight", "norm.weight")
MLX: dict[str, Any] = {"fine_tune_type": "full", "num_layers": 1, "model": "a/model", "lora_parameters": {"rank": 8}}


def stack(name: str, *numbers: int, leaves: tuple[str, ...] = LEAVES) -> dict[str, torch.Tensor]:
    return {f"{name}.{number}.{leaf}": torch.rand(64, 16) for number in numbers for leaf in leaves}


def told(tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> list[str]:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return [item.text for item in mismatches(config or {}, shapes, known=False) if item.code == CODE]


class TestLayersWithoutTheFirst:
    @pytest.mark.parametrize(
        "tensors",
        [
            stack("model.layers", 2, 3),
            stack("model.layers", 31),
            stack("transformer.h", 11),
            stack("trunk.resblocks", 6, 7),
            {**stack("encoder.layers", 0, 1), **stack("decoder.layers", 4, 5)},
        ],
        ids=["two", "one", "h", "of another name", "of one side"],
    )
    def test_are_told(self, tensors: dict[str, torch.Tensor]) -> None:
        assert len(told(tensors)) == 1

    @pytest.mark.parametrize(
        "tensors",
        [
            stack("model.layers", 0, 1),
            stack("model.layers", 1, 2),
            stack("net", 2),
            stack("projector", 2, 4, leaves=("weight", "bias")),
            stack("classifier", 2, 3, leaves=("weight", "bias")),
            stack("model.layers", 2, 3, leaves=("q.lora_A.weight", "q.lora_B.weight", "v.lora_A.weight", "v.lora_B.weight")),
            stack("model.layers", 2, 3, leaves=("q.lora_a", "q.lora_b", "v.lora_a", "v.lora_b")),
            {**stack("unet.blocks", 0, 1), **stack("unet.blocks.0.layers", 3, 4)},
        ],
        ids=["whole", "from 1", "a module behind others", "a projector", "a head", "LoRA", "LoRA of mlx-lm", "inner"],
    )
    def test_are_not_what_begins_later_for_another_reason(self, tensors: dict[str, torch.Tensor]) -> None:
        assert told(tensors) == []

    def test_are_compared_with_a_config_that_counts_layers(self) -> None:
        """Drafts and predicted layers have numbers behind those that are counted."""
        assert told(stack("model.layers", 2, 3), {"num_hidden_layers": 2}) == []

    def test_are_told_by_every_command(self, tmp_path: Path) -> None:
        source = tmp_path / "part.safetensors"
        save_file(stack("model.layers", 2, 3), source)
        merged = ckpt_cli.merge(source, tmp_path / "out")
        codes = [note.code for note in merged.checkpoint.notes] + [note.code for output in merged.outputs for note in output.notes]
        assert codes.count(CODE) == 1
        assert CODE in {note.code for note in ckpt_cli.detect(source).checkpoint.notes}
        assert CODE in {note.code for note in ckpt_cli.inspect(source).checkpoint.notes}
        assert CODE in {item.code for item in ckpt_cli.verify(tmp_path / "out").findings}


class TestWholeLayersOfMlx:
    def adapters(self, folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
        folder.mkdir()
        save_file(tensors, folder / "adapters.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({**MLX, **changes}))
        return folder

    def test_are_told_as_a_part_and_no_damage(self, tmp_path: Path) -> None:
        """All layers, too: the embedding is never there."""
        path = self.adapters(tmp_path / "adapters", stack("model.layers", 0, 1), num_layers=-1)
        merged = ckpt_cli.merge(path, tmp_path / "out")
        (text,) = [note.text for note in merged.checkpoint.notes if note.code == CODE]
        assert "mlx-lm" in text
        assert CODE in {note.code for note in ckpt_cli.detect(path).checkpoint.notes}
        assert CODE in {note.code for note in ckpt_cli.inspect(path).checkpoint.notes}
        checked = ckpt_cli.verify(path)
        assert checked.exit_code == 0
        assert [item.code for item in checked.findings].count(CODE) == 1
        averaged = ckpt_cli.average([path, path], tmp_path / "mean")
        assert CODE in {note.code for note in averaged.checkpoint.notes}

    def test_get_the_rest_from_the_base_as_the_hint_says(self, tmp_path: Path) -> None:
        weights = tiny.weights()
        base = tiny.folder(tmp_path / "base", weights, tiny.classless())
        trained = {name: tensor + 1 for name, tensor in weights.items() if ".layers.1." in name}
        path = self.adapters(tmp_path / "adapters", trained)
        merged = ckpt_cli.merge(path, tmp_path / "out", base=base, carry_from_base=["*"])
        assert CODE not in {note.code for note in merged.checkpoint.notes}
        written = ckpt_cli.load_state_dict(tmp_path / "out")
        assert written.keys() == weights.keys()
        assert all(torch.equal(tensor, trained.get(name, weights[name])) for name, tensor in written.items())

    @pytest.mark.parametrize(
        ("changes", "names"),
        [
            ({"peft_type": "LORA"}, ["model.layers.3.q.weight"]),
            ({"fine_tune_type": "lora"}, ["model.layers.3.q.weight"]),
            ({}, ["model.embed_tokens.weight", "model.layers.3.q.weight"]),
        ],
        ids=["PEFT", "LoRA", "a model"],
    )
    def test_are_nothing_else(self, tmp_path: Path, changes: dict[str, Any], names: list[str]) -> None:
        (tmp_path / "adapter_config.json").write_text(json.dumps({**MLX, **changes}))
        assert trained_layers([tmp_path], names) is None
