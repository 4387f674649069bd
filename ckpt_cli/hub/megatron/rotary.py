"""What a config.json says about rotary embedding, in the words of Megatron's arguments.

Facts: Megatron core's rotary embeddings and multi-head latent attention, and transformers' ``modeling_rope_utils``. Megatron's scaling
of Llama 3 has three numbers that no argument changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ckpt_cli.hub.config import Config, model_type
from ckpt_cli.hub.megatron.sizes import size_of

Allowed = Collection[object] | None
"""The values of an argument that mean what a config says; None if the config does not say it, and an empty one if none means it."""

LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA_3_FACTOR = 8.0
"""The factor of cores without an argument for it."""

HALF_ROTARY = ("glm4", "glm4_moe")
"""Classes that turn half of each head unless the config says otherwise."""

WITHOUT_YARN = ("default", "llama3", "linear", "dynamic")
"""Kinds of scaling for which Megatron's kind of embedding is ``rope``; a dynamic one changes nothing within the trained length."""

BETAS = {"beta_fast": 32, "beta_slow": 1}
"""Those of transformers' yarn where a config does not say them."""


def rope_of(config: Config) -> Config:
    """The entries about rotary embedding, in one of the two ways in which transformers writes them."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    entries = dict(scaling) if isinstance(scaling, Mapping) else {}
    return {
        "rope_type": entries.get("type", "default"),
        **{k: config[k] for k in ("rope_theta", "partial_rotary_factor") if k in config},
        **entries,
    }


def is_latent(config: Config) -> bool:
    """Whether a config is of a model with multi-head latent attention."""
    return size_of(config, "kv_lora_rank") is not None


def theta(config: Config) -> Allowed:
    return None if "rope_theta" not in (rope := rope_of(config)) else (rope["rope_theta"],)


def turned_part(config: Config) -> Allowed:
    """The part of a head that is turned; of latent attention it is a part of its own."""
    usual = 0.5 if model_type(config) in HALF_ROTARY else 1.0
    return (1.0 if is_latent(config) else rope_of(config).get("partial_rotary_factor", usual),)


def factor(kind: str, *plain: object) -> Callable[[Config], Allowed]:
    """The factor of one kind of scaled rotary embedding; ``plain`` without it."""

    def said(config: Config) -> Allowed:
        rope = rope_of(config)
        return plain if rope["rope_type"] != kind else None if rope.get("factor") is None else (rope["factor"],)

    return said


def of_llama_3(config: Config) -> Allowed:
    """Whether it is scaled as Llama 3; no argument means it with other numbers than Megatron's."""
    rope = rope_of(config)
    if rope["rope_type"] != "llama3":
        return (False,)
    return (True,) if all(rope.get(name, value) == value for name, value in LLAMA_3.items()) else ()


def kind_of_embedding(config: Config) -> Allowed:
    """``position_embedding_type``: latent attention has an argument of its own for yarn."""
    kind = rope_of(config)["rope_type"]
    return ("rope",) if kind in WITHOUT_YARN or is_latent(config) else (kind,)


def kind_in_latent(config: Config) -> Allowed:
    """``rope_type`` of latent attention: by itself yarn, which with a factor of 1 is not scaled."""
    rope = rope_of(config)
    if rope["rope_type"] == "yarn":
        return ("yarn", None) if rope.get("truncate", True) is True else ()
    return ("rope", "yarn", None) if rope["rope_type"] == "default" else ()


def of_yarn(key: str) -> Callable[[Config], Allowed]:
    """A number of yarn, by its ``key`` in a config."""

    def said(config: Config) -> Allowed:
        rope = rope_of(config)
        value = rope.get(key, BETAS.get(key))
        if value is None and key == "original_max_position_embeddings":
            value = config.get("max_position_embeddings")
        return None if rope["rope_type"] != "yarn" or value is None else (value,)

    return said


def rounds(config: Config) -> Allowed:
    """Whether yarn rounds the range that it corrects."""
    return (rope_of(config).get("truncate", True),)


def scales(config: Config) -> tuple[Any, Any] | None:
    """``mscale`` and ``mscale_all_dim``; None if the config says what they come to otherwise.

    transformers takes ``mscale`` only if it has both.
    """
    rope = rope_of(config)
    one, every = rope.get("mscale"), rope.get("mscale_all_dim") or 0
    if rope.get("attention_factor") is not None or (every and not one):
        return None
    return (one, every) if every else (1.0, 0.0)


def scale(number: int) -> Callable[[Config], Allowed]:
    """One of `scales`."""

    def said(config: Config) -> Allowed:
        found = scales(config) if rope_of(config)["rope_type"] == "yarn" else None
        return None if found is None else (found[number],)

    return said
