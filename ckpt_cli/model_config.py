"""What a model's config.json says that matters for its weights. Multimodal configs nest one per part, the language model's too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
Config = Mapping[str, Any]


def levels(config: Config) -> list[Config]:
    """The config itself and the configs of its parts (``text_config``, ``vision_config``, ...)."""
    return [config, *(value for key, value in config.items() if key.endswith("_config") and isinstance(value, dict))]


def ties_embeddings(config: Config, default: bool = False) -> bool:
    """Whether the output head is tied to the input embedding, by the config itself or by that of its language model.

    ``default``: what the architecture does where neither says it.
    """
    text = config.get("text_config")
    said = [level["tie_word_embeddings"] for level in (config, text) if isinstance(level, Mapping) and "tie_word_embeddings" in level]
    return any(value is True for value in said) if said else default


def expert_count(config: Config) -> int | None:
    """The number of experts, None if no level or if several levels with different numbers name one."""
    counts = {level[key] for level in levels(config) for key in EXPERT_COUNTS if type(level.get(key)) is int and level[key] > 1}
    return counts.pop() if len(counts) == 1 else None


def layer_count(config: Config) -> int | None:
    """The number of layers of the model, or of its language model."""
    text = config.get("text_config")
    found = [level.get("num_hidden_layers") for level in (config, text) if isinstance(level, Mapping)]
    return next((count for count in found if type(count) is int), None)


def architecture(config: Config) -> str | None:
    """The first class that the config names."""
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
