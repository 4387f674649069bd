"""FSDP1 and a class with fused experts: what two ranks trained is written expert by expert, as ``save_pretrained`` writes it."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ckpt_cli
from tests.architectures import MODELS, build
from tests.ranks import run_ranks
from tests.tensors import Tensors, differences, load

pytestmark = pytest.mark.slow

RANKS = 2
EXPERTS = 3
"""No multiple of the ranks: the first rank has two experts of every stack, the second one."""

KINDS = ("sharded", "mesh")
"""FSDP1 saves ShardedTensors, or DTensors if it was given a mesh."""

STEPS = (2, 4)


def model_of_experts() -> Any:
    kind, model_type, options = MODELS["qwen3_moe"]
    return build(kind, model_type, {**options, "num_experts": EXPERTS})


def train_and_save(rank: int, folder: Path) -> None:
    """One rank of a training of each kind: rank files of weights and optimizer, and from the first rank what they should become."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        for kind in KINDS:
            whole = model_of_experts()
            mesh = {"device_mesh": init_device_mesh("cpu", (RANKS,))} if kind == "mesh" else {}
            policy = ModuleWrapPolicy({type(whole.model.layers[0])})
            model = FullyShardedDataParallel(whole, auto_wrap_policy=policy, device_id=torch.device("cpu"), **mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
            torch.manual_seed(rank)
            for step in range(1, max(STEPS) + 1):
                tokens = torch.randint(60, (2, 7))
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step in STEPS:
                    save(rank, folder / kind / f"global_step_{step}", folder / f"{kind}-{step}", model, optimizer)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def save(rank: int, run: Path, oracle: Path, model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    run.mkdir(parents=True, exist_ok=True)
    suffix = f"world_size_{RANKS}_rank_{rank}.pt"
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        torch.save(model.state_dict(), run / f"model_{suffix}")
    torch.save(optimizer.state_dict(), run / f"optim_{suffix}")
    moments = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)):
        state = model.state_dict()
    if rank == 0:
        trained = model_of_experts()
        trained.load_state_dict(state)
        trained.save_pretrained(oracle)
        torch.save(moments, oracle / "optimizer.pt")
        (run / "huggingface").mkdir()
        (run / "huggingface" / "config.json").write_bytes((oracle / "config.json").read_bytes())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flat-experts")
    run_ranks(train_and_save, folder, ranks=RANKS)
    return folder


def oracle(runs: Path, kind: str, step: int) -> Tensors:
    return load(runs / f"{kind}-{step}" / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", STEPS)
def test_a_merge_equals_what_transformers_saves(runs: Path, tmp_path: Path, kind: str, step: int) -> None:
    ckpt_cli.merge(runs / kind, tmp_path / "out", step=step)
    merged = load(tmp_path / "out" / "model.safetensors")
    assert f"model.layers.0.mlp.experts.{EXPERTS - 1}.down_proj.weight" in merged
    assert differences(merged, oracle(runs, kind, step)) == []
    assert ckpt_cli.verify(tmp_path / "out", against=runs / kind / f"global_step_{step}").exit_code == 0


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_training_are_the_fused_stacks(runs: Path, tmp_path: Path, kind: str) -> None:
    ckpt_cli.merge(runs / kind, tmp_path / "out", names="native")
    native = load(tmp_path / "out" / "model.safetensors")
    experts = oracle(runs, kind, STEPS[-1])
    for layer in (0, 1):
        names = [f"model.layers.{layer}.mlp.experts.{index}.down_proj.weight" for index in range(EXPERTS)]
        assert torch.equal(native[f"model.layers.{layer}.mlp.experts.down_proj"], torch.stack([experts[name] for name in names]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_of_one_expert_is_read_under_its_name_on_the_hub(runs: Path, kind: str) -> None:
    name = f"model.layers.1.mlp.experts.{EXPERTS - 1}.gate_proj.weight"
    with ckpt_cli.open(runs / kind) as opened:
        assert torch.equal(opened[name][3:9, ::2].torch(), oracle(runs, kind, STEPS[-1])[name][3:9, ::2])


@pytest.mark.parametrize("kind", KINDS)
def test_an_average_is_that_of_the_experts(runs: Path, tmp_path: Path, kind: str) -> None:
    ckpt_cli.average(runs / kind, output=tmp_path / "out", steps=STEPS)
    first, second = (oracle(runs, kind, step) for step in STEPS)
    wanted = {name: ((first[name].double() + second[name].double()) / 2).float() for name in first}
    assert differences(load(tmp_path / "out" / "model.safetensors"), wanted) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_flat_optimizer_has_the_moments_of_the_fused_stacks(runs: Path, tmp_path: Path, kind: str) -> None:
    ckpt_cli.extract_state(runs / kind, tmp_path / "state", optimizer=True)
    content = json.loads((tmp_path / "state" / "optimizer.json").read_text())
    found = load(tmp_path / "state" / "optimizer.safetensors")
    wanted = torch.load(runs / f"{kind}-{STEPS[-1]}" / "optimizer.pt", weights_only=False)["state"]
    moments = {f"{name}.{slot}": value for name, slots in wanted.items() for slot, value in slots.items() if value.dim()}
    assert differences({key: found[entry["tensor"]] for key, entry in entries(content) if key in moments}, moments) == []


def entries(content: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(f"{name}.{slot}", entry) for name, slots in content["state"].items() for slot, entry in slots.items()]
