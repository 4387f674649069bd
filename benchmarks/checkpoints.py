"""Checkpoints of real layout for the benchmarks: random weights under the names of a Llama, written by torch.

    python benchmarks/checkpoints.py rank-files|dcp|zero-3|torch-dist|hub-shards|two-models FOLDER [--billions 1.1] [--ranks 4]

One process plays every rank, so that neither GPUs nor other machines are needed. `--width` makes smaller models for tests.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

TOKENIZER = Path(__file__).parent.parent / "examples" / "tiny-run" / "checkpoint-200"
HEADS = 16
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Model:
    """A Llama; by default with the sizes of TinyLlama, whose layers are as many as the parameters ask for."""

    layers: int
    width: int

    @property
    def inner(self) -> int:
        return self.width * 11 // 4

    @property
    def vocabulary(self) -> int:
        return self.width * 125 // 8

    @property
    def shapes(self) -> Shapes:
        """Names and shapes of its parameters."""
        width, inner = self.width, self.inner
        shapes: Shapes = {"model.embed_tokens.weight": (self.vocabulary, width)}
        for layer in range(self.layers):
            head = f"model.layers.{layer}"
            shapes |= {f"{head}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
            shapes |= {f"{head}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
            shapes[f"{head}.mlp.down_proj.weight"] = (width, inner)
            shapes |= {f"{head}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        return shapes | {"model.norm.weight": (width,), "lm_head.weight": (self.vocabulary, width)}


def model_of(billions: float, width: int) -> Model:
    """The model of about so many parameters."""
    one, two = (sum(math.prod(shape) for shape in Model(layers, width).shapes.values()) for layers in (1, 2))
    return Model(max(1, 1 + round((billions * 1e9 - one) / (two - one))), width)


def write_config(folder: Path, model: Model) -> None:
    """Config and tokenizer, which some peers need."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.width,
        "intermediate_size": model.inner,
        "num_hidden_layers": model.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": model.vocabulary,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def rank_files(folder: Path, model: Model, ranks: int) -> None:
    """FSDP2 as verl saves it: one file of DTensors per rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    actor = folder / "global_step_100" / "actor"
    write_config(actor / "huggingface", model)
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        state = {}
        for name, shape in model.shapes.items():
            rows = -(-shape[0] // ranks)
            here = max(0, min(rows, shape[0] - rank * rows))
            local = torch.randn(here, *shape[1:]) * 0.02
            strides = torch.empty(shape, device="meta").stride()
            state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=strides)
        torch.save(state, actor / f"model_world_size_{ranks}_rank_{rank}.pt")
        del state
        dist.destroy_process_group()


def dcp(folder: Path, model: Model, ranks: int) -> None:
    """torch.distributed.checkpoint as accelerate saves it, by one process."""
    import torch.distributed.checkpoint as checkpoint

    write_config(folder / "checkpoint-100", model)
    state = {"model": {name: torch.randn(shape) * 0.02 for name, shape in model.shapes.items()}}
    checkpoint.save(state, checkpoint_id=folder / "checkpoint-100" / "pytorch_model_fsdp_0", no_dist=True)


def zero_3(folder: Path, model: Model, ranks: int) -> None:
    """DeepSpeed's ZeRO stage 3 in bf16: fp32 weights and two moments, 12 bytes per parameter."""
    shapes = model.shapes
    tag = folder / "global_step100"
    write_config(folder, model)
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


def torch_dist(folder: Path, model: Model, ranks: int) -> None:
    """Megatron's torch_dist in bf16: stacked layers, cut by tensor parallelism. ``run`` is the save, ``hf`` what --base wants.

    As Megatron-LM 0.16 lays it out: a chunk is one layer of one rank, of gate and up one each; norms are saved once; padded vocabulary.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

    layers, width = model.layers, model.width
    padded = -(-model.vocabulary // (128 * ranks)) * 128 * ranks
    step = folder / "run" / "iter_0000100"
    write_config(folder / "hf", model)
    # Shape, the axis that ranks cut, and how many blocks each of them has of it (gate and up).
    rows: dict[str, tuple[tuple[int, ...], int | None, int]] = {
        "embedding.word_embeddings.weight": ((padded, width), 0, 1),
        "decoder.layers.self_attention.linear_qkv.weight": ((layers, 3 * width, width), 1, 1),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": ((layers, width), None, 1),
        "decoder.layers.self_attention.linear_proj.weight": ((layers, width, width), 2, 1),
        "decoder.layers.mlp.linear_fc1.weight": ((layers, 2 * model.inner, width), 1, 2),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": ((layers, width), None, 1),
        "decoder.layers.mlp.linear_fc2.weight": ((layers, width, model.inner), 2, 1),
        "decoder.final_layernorm.weight": ((width,), None, 1),
        "output_layer.weight": ((padded, width), 0, 1),
    }
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    state = {}
    for name, (shape, axis, blocks) in rows.items():
        parts = 1 if axis is None else ranks * blocks
        size = [length // parts if at == axis else length for at, length in enumerate(shape)]
        if ".layers." in name:
            size[0] = 1
        shards = []
        for layer, part in itertools.product(range(layers if ".layers." in name else 1), range(parts)):
            places = [part * length if at == axis else 0 for at, length in enumerate(size)]
            if ".layers." in name:
                places[0] = layer
            shards.append(Shard.from_tensor_and_offsets((torch.randn(size) * 0.02).bfloat16(), places, 0))
        state[name] = ShardedTensor._init_from_local_shards(shards, shape)  # noqa: SLF001
    checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(step, thread_count=2), no_dist=True)
    dist.destroy_process_group()
    arguments = argparse.Namespace(
        num_layers=layers,
        hidden_size=width,
        ffn_hidden_size=model.inner,
        num_attention_heads=HEADS,
        num_query_groups=HEADS,
        group_query_attention=True,
        kv_channels=width // HEADS,
        vocab_size=model.vocabulary,
        padded_vocab_size=padded,
        tensor_model_parallel_size=ranks,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        swiglu=True,
        normalization="RMSNorm",
        position_embedding_type="rope",
        rotary_base=10000,
        layernorm_epsilon=1e-6,
        untie_embeddings_and_output_weights=True,
        num_experts=None,
        q_lora_rank=None,
        iteration=100,
    )
    torch.save({"args": arguments, "checkpoint_version": 3.0, "iteration": 100}, step / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (step / "metadata.json").write_text(json.dumps(backend))
    (step.parent / "latest_checkpointed_iteration.txt").write_text("100")


def hub_shards(folder: Path, model: Model, ranks: int) -> None:
    """The HuggingFaceStorageWriter of torch: a safetensors file per rank, each with its rows of every tensor."""
    import torch.distributed.checkpoint.hf_storage
    import torch.distributed.tensor  # noqa: F401
    import torch.multiprocessing as processes

    write_config(folder, model)
    # Forks: each rank would import torch anew.
    processes.start_processes(_hub_shard, (ranks, str(folder), model, str(folder / "store")), ranks, start_method="fork")


def _hub_shard(rank: int, ranks: int, folder: str, model: Model, store: str) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=dist.FileStore(store, ranks))
    mesh = init_device_mesh("cpu", (ranks,))
    state = {}
    for name, shape in model.shapes.items():
        local = torch.randn(shape[0] // ranks, *shape[1:]) * 0.02
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    checkpoint.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
    dist.destroy_process_group()


def two_models(folder: Path, model: Model, ranks: int) -> None:
    """Two model folders, ``a`` and ``b``, and mergekit's recipe for their mean."""
    from safetensors.torch import save_file

    for name in "ab":
        write_config(folder / name, model)
        tensors = {key: torch.randn(shape) * 0.02 for key, shape in model.shapes.items()}
        save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})
    rows = [{"model": str((folder / name).resolve()), "parameters": {"weight": 0.5}} for name in "ab"]
    # JSON is YAML too.
    (folder / "linear.yaml").write_text(json.dumps({"merge_method": "linear", "dtype": "float32", "models": rows}))


KINDS = {
    "rank-files": rank_files,
    "dcp": dcp,
    "zero-3": zero_3,
    "torch-dist": torch_dist,
    "hub-shards": hub_shards,
    "two-models": two_models,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--billions", type=float, default=1.1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048, help="a multiple of 128")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    KINDS[options.kind](options.folder, model_of(options.billions, options.width), options.ranks)


if __name__ == "__main__":
    main()
