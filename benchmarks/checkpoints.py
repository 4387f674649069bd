"""Checkpoints of real layout for the benchmarks: random weights under the names of a Llama, written by torch.

    python benchmarks/checkpoints.py rank-files|dcp|zero-3 FOLDER [--billions 1.1] [--ranks 4]

One process plays every rank, so that neither GPUs nor other machines are needed.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import torch

TOKENIZER = Path(__file__).parent.parent / "examples" / "tiny-run" / "checkpoint-200"
WIDTH, VOCABULARY = 2048, 32000
Shapes = dict[str, tuple[int, ...]]


def shapes_of(layers: int) -> Shapes:
    """Names and shapes of a Llama's parameters."""
    inner = WIDTH * 8 // 3
    shapes: Shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for layer in range(layers):
        head = f"model.layers.{layer}"
        shapes |= {f"{head}.self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{head}.mlp.{name}_proj.weight": (inner, WIDTH) for name in ("gate", "up")}
        shapes[f"{head}.mlp.down_proj.weight"] = (WIDTH, inner)
        shapes |= {f"{head}.{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}


def write_config(folder: Path, layers: int) -> None:
    """Config and tokenizer, which some peers need."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH * 8 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def rank_files(folder: Path, layers: int, ranks: int) -> None:
    """FSDP2 as verl saves it: one file of DTensors per rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    actor = folder / "global_step_100" / "actor"
    write_config(actor / "huggingface", layers)
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        state = {}
        for name, shape in shapes_of(layers).items():
            rows = -(-shape[0] // ranks)
            here = max(0, min(rows, shape[0] - rank * rows))
            local = torch.randn(here, *shape[1:]) * 0.02
            strides = torch.empty(shape, device="meta").stride()
            state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=strides)
        torch.save(state, actor / f"model_world_size_{ranks}_rank_{rank}.pt")
        del state
        dist.destroy_process_group()


def dcp(folder: Path, layers: int, ranks: int) -> None:
    """torch.distributed.checkpoint as accelerate saves it, by one process."""
    import torch.distributed.checkpoint as checkpoint

    write_config(folder / "checkpoint-100", layers)
    state = {"model": {name: torch.randn(shape) * 0.02 for name, shape in shapes_of(layers).items()}}
    checkpoint.save(state, checkpoint_id=folder / "checkpoint-100" / "pytorch_model_fsdp_0", no_dist=True)


def zero_3(folder: Path, layers: int, ranks: int) -> None:
    """DeepSpeed's ZeRO stage 3 in bf16: fp32 weights and two moments, 12 bytes per parameter."""
    shapes = shapes_of(layers)
    tag = folder / "global_step100"
    write_config(folder, layers)
    tag.mkdir()
    (folder / "latest").write_text(tag.name)
    states = {
        "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes},
        "buffer_names": [],
        "param_shapes": [{name: torch.Size(shape) for name, shape in shapes.items()}],
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "shared_params": {},
        "optimizer": None,
        "lr_scheduler": None,
        "global_steps": 100,
        "skipped_steps": 0,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
        "ds_version": "0.19.8",
    }
    size = sum(-(-math.prod(shape) // ranks) for shape in shapes.values())
    for rank in range(ranks):
        torch.save(states, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        weights, first, second = (torch.randn(size) * 0.02 for _ in range(3))
        inner = {
            "state": {0: {"step": torch.tensor(100.0), "exp_avg": first, "exp_avg_sq": second}},
            "param_groups": [{"lr": 1e-4, "params": [0]}],
        }
        own = {"zero_stage": 3, "partition_count": ranks, "optimizer_state_dict": inner, "fp32_flat_groups": [weights]}
        torch.save({"optimizer_state_dict": own, "ds_version": "0.19.8"}, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


KINDS = {"rank-files": rank_files, "dcp": dcp, "zero-3": zero_3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--billions", type=float, default=1.1)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    layers = max(1, round((options.billions * 1e9 - 2 * VOCABULARY * WIDTH) / (12 * WIDTH * WIDTH)))
    options.folder.mkdir(parents=True)
    KINDS[options.kind](options.folder, layers, options.ranks)


if __name__ == "__main__":
    main()
