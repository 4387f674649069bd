"""The sizes in a config.json by which Megatron's tensors are cut and checked."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_cli.errors import Inconsistent
from ckpt_cli.hub.config import EXPERT_COUNTS, Config
from ckpt_cli.hub.layers.counts import USUAL, layer_count

MAX_SIZE = 1 << 40


def size_of(config: Config, *names: str) -> int | None:
    """The first of some entries that is a natural number above 0."""
    return next((config[name] for name in names if type(config.get(name)) is int and 0 < config[name] < MAX_SIZE), None)


def sizes_of(config: Config) -> Mapping[str, int]:
    """Sizes by the symbols of `rows`, as far as the config says them. Raises Inconsistent for heads that cannot be groups."""
    known = {
        "1": 1,
        "h": size_of(config, "hidden_size"),
        "V": size_of(config, "vocab_size"),
        "L": size_of({USUAL: layer_count(config)}, USUAL),
        "f": size_of(config, "intermediate_size"),
        "m": size_of(config, "moe_intermediate_size", "intermediate_size"),
        "E": size_of(config, *EXPERT_COUNTS),
        "H": size_of(config, "num_attention_heads"),
        "q_rank": size_of(config, "q_lora_rank"),
        "kv_rank": size_of(config, "kv_lora_rank"),
    }
    found = {name: size for name, size in known.items() if size is not None}
    found |= _heads(config, found) | _latent(config, found)
    shared = size_of(config, "shared_expert_intermediate_size")
    count = size_of(config, "n_shared_experts")
    if shared is None and count is not None and "m" in found:
        shared = count * found["m"]
    if shared is not None:
        found["s"] = shared
    return found | {f"2{name}": 2 * found[name] for name in ("h", "f", "m", "s") if name in found}


def _heads(config: Config, found: Mapping[str, int]) -> dict[str, int]:
    heads, hidden = found.get("H"), found.get("h")
    if heads is None or hidden is None:
        return {}
    groups = size_of(config, "num_key_value_heads") or heads
    if heads % groups:
        text = f"{heads} attention heads are no multiple of {groups} key and value heads"
        raise Inconsistent(text, expected="num_attention_heads and num_key_value_heads in config.json that fit")
    width = size_of(config, "head_dim") or hidden // heads
    return {"G": groups, "d": width, "q": heads * width, "qkv": (heads + 2 * groups) * width}


def _latent(config: Config, found: Mapping[str, int]) -> dict[str, int]:
    """Sizes of multi-head latent attention: rows for every head with and without rotary embedding."""
    plain, rotary, value = (size_of(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    heads, rank = found.get("H"), found.get("kv_rank")
    if plain is None or rotary is None or value is None or heads is None or rank is None:
        return {}
    return {
        "kv_down": rank + rotary,
        "kv_up": heads * (plain + value),
        "latent_q": heads * (plain + rotary),
        "latent_v": heads * value,
    }
