"""Writing what Megatron-LM writes: legacy files of ranks, cut from whole tensors as its parallel modules hold them."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.tensors import Tensors

COLUMN = ("linear_qkv.weight", "linear_qkv.bias", "word_embeddings.weight", "output_layer.weight")
ROW = ("linear_proj.weight", "linear_fc2.weight")


def arguments(**more: Any) -> argparse.Namespace:
    """Those of the tiny models in `data/megatron`: two groups of two heads of eight elements, hidden size 24."""
    plain: dict[str, Any] = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers": 2,
        "hidden_size": 24,
        "ffn_hidden_size": 20,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "group_query_attention": True,
        "kv_channels": 8,
        "vocab_size": 53,
        "padded_vocab_size": 64,
        "max_position_embeddings": 64,
        "layernorm_epsilon": 1e-5,
        "rotary_base": 10000,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "swiglu": True,
        "untie_embeddings_and_output_weights": True,
        "num_experts": None,
        "iteration": 7,
    }
    return argparse.Namespace(**{**plain, **more})


def share(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What a rank of tensor parallelism holds of a tensor."""
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)]).clone()
    if name.endswith(COLUMN):
        return tensor.chunk(ranks)[rank].clone()
    return tensor.chunk(ranks, dim=1)[rank].clone() if name.endswith(ROW) else tensor.clone()


def packed(experts: Sequence[torch.Tensor], number: int) -> torch.Tensor:
    """The tensor of GroupedMLP for a rank's experts: ``weight1`` is [h, n * f] with the memory of [n, h, f], ``weight2`` [n * f, h]."""
    turned = torch.stack([expert.t().contiguous() for expert in experts])
    return turned.view(turned.shape[1], -1) if number == 1 else turned.reshape(-1, turned.shape[2])


def write_legacy(
    run: Path,
    weights: Tensors,
    args: argparse.Namespace,
    stages: Sequence[Sequence[int]],
    *,
    grouped: bool = False,
    extra: Mapping[str, Any] | None = None,
    iteration: int = 7,
    converted: bool = False,
) -> Path:
    """A step of a run. ``stages``: per stage, how many layers each of its chunks has; ``converted``: one process, rank 0, wrote it."""
    chunks = max(map(len, stages))
    tp, ep = args.tensor_model_parallel_size, args.expert_model_parallel_size
    args.pipeline_model_parallel_size = len(stages)
    args.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
    step = run / f"iter_{iteration:07d}"
    firsts: dict[tuple[int, int], int] = {}
    count = 0
    for chunk, stage in itertools.product(range(chunks), range(len(stages))):
        firsts[stage, chunk] = count
        count += stages[stage][chunk]
    for rank, stage, expert in itertools.product(range(tp), range(len(stages)), range(ep)):
        name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if len(stages) > 1 else "") + (f"_{expert:03d}" if ep > 1 else "")
        number = 0 if converted else rank + tp * (expert + ep * stage)
        own = argparse.Namespace(**{**vars(args), "rank": number, "local_rank": number, "world_size": tp * ep * len(stages)})
        content: dict[str, Any] = {"args": own, "checkpoint_version": 3.0, "iteration": iteration, **(extra or {})}
        for chunk in range(chunks):
            first, layers = firsts[stage, chunk], stages[stage][chunk]
            places = (stage == 0 and chunk == 0, stage == len(stages) - 1 and chunk == chunks - 1)
            part = _of_chunk(weights, first, layers, places)
            if places[1] and not places[0] and not args.untie_embeddings_and_output_weights:
                part["output_layer.weight"] = weights["embedding.word_embeddings.weight"]
            held = {key: share(key, tensor, rank, tp) for key, tensor in _of_experts(part, expert, ep, args.num_experts).items()}
            content["model" if chunks == 1 else f"model{chunk}"] = _grouped(held) if grouped else held
        (step / name).mkdir(parents=True)
        torch.save(content, step / name / "model_optim_rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return step


def _of_chunk(weights: Tensors, first: int, layers: int, places: tuple[bool, bool]) -> Tensors:
    held: Tensors = {}
    for name, tensor in weights.items():
        if name.startswith("decoder.layers."):
            number, rest = name.removeprefix("decoder.layers.").split(".", 1)
            if first <= int(number) < first + layers:
                held[f"decoder.layers.{int(number) - first}.{rest}"] = tensor
        elif places[0 if name.startswith("embedding.") else 1]:
            held[name] = tensor
    return held


def _of_experts(held: Tensors, rank: int, ranks: int, experts: int | None) -> Tensors:
    each = (experts or 0) // ranks
    result: Tensors = {}
    for name, tensor in held.items():
        fields = re.fullmatch(r"(.*\.local_experts\.)(\d+)(\..*)", name)
        if fields is None:
            result[name] = tensor
        elif rank * each <= int(fields[2]) < (rank + 1) * each:
            result[f"{fields[1]}{int(fields[2]) - rank * each}{fields[3]}"] = tensor
    return result


def _grouped(held: Tensors) -> Tensors:
    gathered: dict[str, dict[int, torch.Tensor]] = {}
    result: Tensors = {}
    for name, tensor in held.items():
        fields = re.fullmatch(r"(.*\.experts\.)local_experts\.(\d+)\.linear_fc([12])\.weight", name)
        if fields is None:
            result[name] = tensor
        else:
            gathered.setdefault(f"{fields[1]}weight{fields[3]}", {})[int(fields[2])] = tensor
    return result | {name: packed([parts[i] for i in sorted(parts)], int(name[-1])) for name, parts in gathered.items()}
