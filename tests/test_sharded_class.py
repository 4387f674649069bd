"""FSDP2 makes a class of the model's own, and what saves a config then writes that name: FSDPQwen2ForCausalLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckpt_cli
from ckpt_cli.errors import MissingTensors
from ckpt_cli.hub.config import architecture
from tests import tiny


def run_of(path: Path, tensors: tiny.Tensors, **changes: Any) -> Path:
    return tiny.verl(path / "run", tensors, tiny.config(architectures=["FSDPQwen2ForCausalLM"], **changes)).parent.parent


@pytest.mark.parametrize(
    ("named", "kind"),
    [
        ("FSDPQwen2ForCausalLM", "Qwen2ForCausalLM"),
        ("Qwen2ForCausalLM", "Qwen2ForCausalLM"),
        ("ReplicateQwen2ForCausalLM", "Qwen2ForCausalLM"),
        ("FSDP", "FSDP"),
        ("FSDPmodel", "FSDPmodel"),
    ],
)
def test_what_a_config_names(named: str, kind: str) -> None:
    assert architecture({"architectures": [named]}) == kind


def test_torch_names_it_so() -> None:
    """The prefix is that of torch."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        module = torch.nn.Linear(2, 2)
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        assert type(module).__name__ == "FSDPLinear"
    finally:
        dist.destroy_process_group()


def test_names_are_compared_with_those_of_the_model_and_the_output_names_that(tmp_path: Path) -> None:
    done = ckpt_cli.merge(run_of(tmp_path, tiny.weights()), tmp_path / "out")
    (output,) = done.outputs
    assert "27 of 27 tensors of Qwen2ForCausalLM" in output.naming
    assert {note.code for note in output.notes} >= {"class-repaired"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert ckpt_cli.verify(tmp_path / "out").exit_code == 0


def test_a_tensor_that_is_lost_is_refused(tmp_path: Path) -> None:
    tensors = tiny.weights()
    del tensors["model.norm.weight"]
    with pytest.raises(MissingTensors):
        ckpt_cli.merge(run_of(tmp_path, tensors), tmp_path / "out")


def test_so_is_it_in_an_average(tmp_path: Path) -> None:
    run = run_of(tmp_path, tiny.weights())
    tiny.verl(run, tiny.weights(), tiny.config(architectures=["FSDPQwen2ForCausalLM"]), step=2)
    ckpt_cli.average(run, tmp_path / "out", everything=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tiny.weights().keys()


def test_a_critic_is_one_of_tokens(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in tiny.weights().items() if name != "lm_head.weight"}
    tensors |= {"score.weight": torch.ones(1, 16), "score.bias": torch.ones(1)}
    ckpt_cli.merge(run_of(tmp_path, tensors), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["Qwen2ForTokenClassification"]
