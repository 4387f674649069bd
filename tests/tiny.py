"""A Qwen2 of two layers and its folders, for tests about what lies around weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.tensors import Tensors

WIDTH, ROWS, LAYERS, INNER = 16, 64, 2, 32

TOKENIZER: dict[str, Any] = {
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(60)}, "unk_token": "t0"},
    },
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
}


def shapes(*, tied: bool = False, layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (ROWS, WIDTH)}
    for layer in range(layers):
        for projection, rows in (("q", WIDTH), ("k", WIDTH // 2), ("v", WIDTH // 2)):
            found[f"model.layers.{layer}.self_attn.{projection}_proj.weight"] = (rows, WIDTH)
            found[f"model.layers.{layer}.self_attn.{projection}_proj.bias"] = (rows,)
        found[f"model.layers.{layer}.self_attn.o_proj.weight"] = (WIDTH, WIDTH)
        found[f"model.layers.{layer}.mlp.gate_proj.weight"] = (INNER, WIDTH)
        found[f"model.layers.{layer}.mlp.up_proj.weight"] = (INNER, WIDTH)
        found[f"model.layers.{layer}.mlp.down_proj.weight"] = (WIDTH, INNER)
        found[f"model.layers.{layer}.input_layernorm.weight"] = (WIDTH,)
        found[f"model.layers.{layer}.post_attention_layernorm.weight"] = (WIDTH,)
    found["model.norm.weight"] = (WIDTH,)
    return found if tied else {**found, "lm_head.weight": (ROWS, WIDTH)}


def weights(seed: int = 0, *, tied: bool = False, layers: int = LAYERS) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) * 0.05 for name, shape in shapes(tied=tied, layers=layers).items()}


def config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": ROWS,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "eos_token_id": 1,
        **changes,
    }


def unknown(**changes: Any) -> dict[str, Any]:
    """The config of a class that nobody knows."""
    return config(model_type="strange", architectures=["StrangeLM"], **changes)


def classless(**changes: Any) -> dict[str, Any]:
    """A config that names no class, so that transformers is not asked for one."""
    return config(model_type="strange", architectures=None, **changes)


def folder(
    path: Path, tensors: Tensors | None, of: Mapping[str, Any] | None = None, files: Mapping[str, Any] | None = None, *, bare: bool = False
) -> Path:
    """A folder as `save_pretrained` makes it: weights, a config (the usual one, none if ``bare``), a tokenizer and other ``files``."""
    path.mkdir(parents=True, exist_ok=True)
    if tensors is not None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
    texts = {} if bare else {"config.json": config() if of is None else of, **TOKENIZER}
    for name, content in {**texts, **(files or {})}.items():
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def verl(
    run: Path,
    tensors: Tensors,
    of: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] | None = None,
    *,
    step: int = 1,
    role: str = "actor",
) -> Path:
    """A checkpoint of verl, written by one rank, in a run. Returns the folder of the role."""
    home = run / f"global_step_{step}" / role
    home.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, home / "model_world_size_1_rank_0.pt")
    (home / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    folder(home / "huggingface", None, of, files)
    return home


def adapter(path: Path, tensors: Tensors, base: str | Path, **changes: Any) -> Path:
    """An adapter of r 4 and alpha 8 as PEFT saves it."""
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    content = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": str(base)}
    (path / "adapter_config.json").write_text(json.dumps({**content, "task_type": "CAUSAL_LM", **changes}))
    return path


def factors(seed: int = 3) -> Tensors:
    """LoRA factors for q_proj of every layer."""
    random = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        found[f"{name}A.weight"] = torch.randn(4, WIDTH, generator=random)
        found[f"{name}B.weight"] = torch.randn(WIDTH, 4, generator=random)
    return found
