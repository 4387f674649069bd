"""The entries of config.json that matter for the weights. Multimodal configs nest one config per part, including the language model's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckpt_cli.names import printable

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
Config = Mapping[str, Any]
SHARDED_CLASS = re.compile(r"^(FSDP|Replicate)(?=[A-Z])")
GENERATIVE = re.compile(r".*((?<!Masked)LM|Generation|MTModel|EncoderDecoderModel)")
"""In names of classes that write texts. Others never ask for special ids, and some (SigLIP) have defaults without a row."""

PARTS = ("layer", "expert", "depth", "block", "stage", "label", "codebook", "nextn", "group", "head", "level", "module")
"""Words in the names of numbers of parts that a model is made of."""

SIZES = ("size", "dim", "len", "position", "_id", "width", "channel", "intermediate", "token")
"""Words in the names of numbers that count no parts."""

MOST_PARTS = 1 << 14
"""More parts of one kind than any model has."""


LOADERS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
"""What ``from_pretrained`` looks for without being told a name, before ".safetensors": diffusers says in a config which class it is of."""

EXPLICIT = "transformers_weights"
"""The entry by which a config names the weights file itself (transformers 4.57 and newer)."""


def levels(config: Config) -> list[Config]:
    """The config itself and the configs of its parts (``text_config``, ``vision_config``, ...)."""
    return [config, *(value for key, value in config.items() if key.endswith("_config") and isinstance(value, dict))]


def model_type(config: Config) -> str | None:
    """The model type that a config names; anything but a text names none."""
    named = config.get("model_type")
    return named if isinstance(named, str) else None


def model_types(config: Config) -> set[str]:
    """The model types of a config and of its parts, at every depth."""
    pending: list[object] = [config]
    found: set[str] = set()
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            pending += part.values()
            found |= {named} if (named := model_type(part)) is not None else set()
    return found


def huge_number(config: Config) -> str | None:
    """A number of parts (layers, experts, labels, ...) that would take forever to build; None if there is none.

    It is looked for at every depth of the config and in its lists.
    """
    pending: list[tuple[str, object]] = list(config.items())
    while pending:
        key, value = pending.pop()
        if isinstance(value, Mapping):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(key, item) for item in value]
        elif type(value) is int and value > MOST_PARTS and any(word in key for word in PARTS) and not any(word in key for word in SIZES):
            return f"{key} {str(value)[:20]}"
    return None


def expert_count(config: Config) -> int | None:
    """The number of experts, None if no level or if several levels with different numbers name one."""
    counts = {level[key] for level in levels(config) for key in EXPERT_COUNTS if type(level.get(key)) is int and level[key] > 1}
    return counts.pop() if len(counts) == 1 else None


def is_quantised(config: Config) -> bool:
    """Whether a config says that weights are quantised, as transformers or as mlx_lm, whose older folders have ``quantization`` alone."""
    of_mlx = config.get("quantization")
    return "quantization_config" in config or (isinstance(of_mlx, Mapping) and "bits" in of_mlx)


def not_loaded(config: Config, file: str) -> tuple[str, str] | None:
    """Why what loads models of this config passes over weights in ``file`` (an index, if there is one), and what to do.

    None if it loads them.
    """
    loader = "diffusers" if isinstance(config.get("_class_name"), str) and architecture(config) is None else "transformers"
    said = config.get(EXPLICIT) if loader == "transformers" else None
    wanted = f"{LOADERS[loader]}.safetensors"
    if isinstance(said, str):
        why = f"config.json says {EXPLICIT} {printable(said)}, so transformers does not load {printable(file)}"
        return None if file == said else (why, f"correct {EXPLICIT} in config.json")
    written_so = f"--weights-name {wanted} writes it under that name"
    variant = re.fullmatch(rf"{LOADERS[loader]}\.([\w.-]+)\.safetensors", file)
    if variant is not None:
        return f'{loader} loads {printable(file)} only if it is asked for variant="{printable(variant[1])}"', written_so
    if file in (wanted, f"{wanted}.index.json"):
        return None
    return f"{loader} looks for {wanted}, and does not load {printable(file)}", written_so


def architecture(config: Config) -> str | None:
    """The first class that the config names, without the prefix of FSDP2.

    ``fully_shard`` makes a class of the model's own, ``FSDPQwen3ForCausalLM`` (``replicate`` one with its name), and what saves a config
    then writes that name (torch, ``distributed/fsdp/_fully_shard/_fsdp_init.py``).
    """
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    return None if first is None else SHARDED_CLASS.sub("", first)


def writes_texts(config: Config) -> bool:
    """Whether the class that a config names has ``generate``, as far as its name tells; without a name it may have."""
    kind = architecture(config)
    return kind is None or GENERATIVE.match(kind) is not None


def with_plain_class(config: Config) -> Config:
    """The config with the class that `architecture` tells, for whoever looks it up by its name."""
    kind = architecture(config)
    return config if kind is None or config["architectures"][0] == kind else {**config, "architectures": [kind]}
