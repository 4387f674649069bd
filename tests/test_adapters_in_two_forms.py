"""The adapter of one step in FSDP's form and in PEFT's, side by side: the same values are no alarm, and others are told as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckpt_cli
from tests.tensors import Tensors

PREFIX = "base_model.model."


def factors(value: float = 1.0) -> Tensors:
    return {"m.lora_A.weight": torch.full((2, 6), value), "m.lora_B.weight": torch.full((4, 2), value)}


def step(folder: Path, held: Tensors, beside: Tensors, *, form: str = "bin") -> Path:
    """A step with ``held`` as FSDP names it, and ``beside`` it an adapter as PEFT writes it; and the base of both."""
    at = folder / "run" / "checkpoint-20"
    at.mkdir(parents=True)
    (at / "trainer_state.json").write_text(json.dumps({"global_step": 20, "log_history": []}))
    (at / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["m"]}))
    named = {f"{PREFIX}{name.replace('.weight', '.default.weight') if 'lora_' in name else name}": tensor for name, tensor in held.items()}
    if form == "bin":
        torch.save(named, at / "pytorch_model_fsdp.bin")
    else:
        dcp.save({"model": named}, checkpoint_id=str(at / "pytorch_model_fsdp_0"))
    save_file({f"{PREFIX}{name}": tensor for name, tensor in beside.items()}, at / "adapter_model.safetensors")
    (folder / "base").mkdir()
    save_file({"m.weight": torch.ones(4, 6)}, folder / "base" / "model.safetensors")
    return at


def told(path: Path, out: Path, **options: Any) -> dict[str, str]:
    done = ckpt_cli.merge(path, out, **options)
    notes = (*done.checkpoint.notes, *done.outputs[0].notes)
    return {note.text: note.level for note in notes if "adapter_model" in note.text or "fsdp" in note.text}


@pytest.mark.parametrize("form", ["bin", "dcp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_adapter_is_no_alarm(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    at = step(tmp_path, factors(), {name: tensor.to(dtype) for name, tensor in factors().items()}, form=form)
    said = told(at, tmp_path / "out", base=tmp_path / "base")
    assert {*said.values()} == {"info"}
    assert any("adapter_model.safetensors: the same adapter as in model" in text for text in said)


def test_neither_is_it_beside_the_whole_model(tmp_path: Path) -> None:
    at = step(tmp_path, {"m.base_layer.weight": torch.ones(4, 6), **factors()}, factors())
    assert [*told(at, tmp_path / "out").values()] == ["info"]


def test_nor_with_a_module_that_was_trained_as_a_whole(tmp_path: Path) -> None:
    """FSDP's form marks it, PEFT's does not."""
    whole = torch.ones(3, 6)
    at = step(tmp_path, {**factors(), "head.modules_to_save.default.weight": whole}, {**factors(), "head.weight": whole})
    assert [*told(at, tmp_path / "out", lora="export").values()] == ["info"]


@pytest.mark.parametrize(
    ("beside", "named"),
    [
        (factors(2.0), "m.lora_A.weight"),
        ({name.replace("m.", "n."): tensor for name, tensor in factors().items()}, "n.lora_A.weight"),
        ({**factors(), "head.weight": torch.ones(3, 3)}, "head.weight"),
        ({name: torch.ones(2, 2) for name in factors()}, "m.lora_A.weight"),
    ],
    ids=["values", "modules", "more", "shapes"],
)
def test_another_adapter_is_a_warning_that_says_in_what(tmp_path: Path, beside: Tensors, named: str) -> None:
    at = step(tmp_path, factors(), beside)
    ((text, level),) = told(at, tmp_path / "out", base=tmp_path / "base").items()
    assert level == "warning"
    assert "holds its adapter with other values of" in text
    assert named in text


def test_the_file_of_peft_alone(tmp_path: Path) -> None:
    """Passed by itself, it has that of FSDP beside it."""
    at = step(tmp_path, factors(), factors())
    assert "warning" not in told(at / "adapter_model.safetensors", tmp_path / "out", base=tmp_path / "base").values()


def test_weights_that_are_no_adapter_are_a_warning_as_ever(tmp_path: Path) -> None:
    at = step(tmp_path, factors(), {"head.weight": torch.ones(3, 3)})
    assert any(
        "not part of them" in text and level == "warning" for text, level in told(at, tmp_path / "out", base=tmp_path / "base").items()
    )
