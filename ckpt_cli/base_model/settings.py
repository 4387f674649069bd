"""What two configs say about the computation that no shape shows: rotary embedding, norms, activation, heads, windows, ties.

transformers writes the rotary embedding in three ways: ``rope_theta`` and ``rope_scaling`` (``type``, then ``rope_type``), and since 5.0
``rope_parameters`` with both (``modeling_rope_utils.py``). A window that ``use_sliding_window`` switches off is null or a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_cli.hub.config import Config, levels
from ckpt_cli.names import printable

COUNTED = re.compile(
    r"rope_.*|rotary_.*|partial_rotary_factor|.*theta|.*base_freq|.*(_|^)eps(ilon)?|(hidden_|mlp_|ffn_)?act(ivation)?(_fn|_function)?"
    r"|hidden_activation|activation_function|n_heads?|num(_\w+)?_heads|head_dim|.*_head_dim|multi_query|(use_)?sliding_window|max_window_layers|tie_word_embeddings"
    r"|.*softcapping|.*_multiplier|query_pre_attn_scalar|logit_scale|logits_scaling|.*scaling_factor|scale_(attn|embedding).*|num_experts_per_tok"
    r"|norm_topk_prob|scoring_func|topk_(group|method)|layer_types|alibi|use_qk_norm|qk_norm"
)
"""Keys that decide what weights of the same shapes mean."""

HEADS = re.compile(r"n_heads?|num(_\w+)?_heads|head_dim|.*_head_dim|multi_query")
"""Keys that say how rows of a projection are divided into heads: with another one, the same rows mean something else."""

OFF = ("use_sliding_window",)
"""Switches that are off where a config does not have them, in every class that knows them."""

SAME = {"swish": "silu", "gelu_pytorch_tanh": "gelu_new"}
"""Names of one activation."""

PLAIN = ("default", "mrope", None)
"""Kinds of rotary embedding that are not scaled; the second says that its parts are divided among axes."""


@dataclass(frozen=True, slots=True)
class Difference:
    """An entry in which two configs differ, at one level of both: ``key`` is written with the name of that level."""

    key: str
    mine: object
    base: object

    @property
    def divides_heads(self) -> bool:
        return HEADS.fullmatch(self.key.rpartition(".")[2]) is not None

    @property
    def text(self) -> str:
        return f"{printable(self.key)} is {_shown(self.mine)}, in the base {_shown(self.base)}"


def different_settings(config: Config, base: Config) -> list[Difference]:
    """The entries about the computation that both configs have and in which they differ; what one leaves to a default is not known."""
    return [setting for name, mine, other in _pairs(config, base) for setting in _different(name, mine, other)]


def _pairs(config: Config, base: Config) -> Iterator[tuple[str, Config, Config]]:
    """The levels of two configs that are about the same part; a language model may be a whole on one side and a part on the other."""
    inner = [each.get("text_config") if isinstance(each.get("text_config"), dict) else None for each in (config, base)]
    if (inner[0] is None) != (inner[1] is None):
        yield "", inner[0] or config, inner[1] or base
        return
    yield "", config, base
    for key, mine in config.items():
        if any(mine is level for level in levels(config)[1:]) and isinstance(base.get(key), dict):
            yield f"{key}.", mine, base[key]


def _different(level: str, config: Config, base: Config) -> Iterator[Difference]:
    mine, others = ({**dict.fromkeys(OFF, False), **each} for each in (_normal(config), _normal(base)))
    for key in mine:
        if key in others and COUNTED.fullmatch(key) and mine[key] != others[key]:
            yield Difference(f"{level}{key}", mine[key], others[key])


def _normal(config: Config) -> dict[str, Any]:
    """The entries of one level in one of the ways in which they are written; those that are null say nothing, but for a window."""
    found = {str(key): value for key, value in config.items()}
    if found.get("use_sliding_window") is False:
        found["sliding_window"] = found["max_window_layers"] = None
    rope = found.pop("rope_parameters", None)
    if isinstance(rope, Mapping) and not any(isinstance(value, Mapping) for value in rope.values()):
        found |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        found["rope_scaling"] = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    elif isinstance(rope, Mapping):
        found["rope_parameters"] = rope
    scaling = found.get("rope_scaling")
    if "rope_theta" in found or "rope_scaling" in found:
        entries = dict(scaling) if isinstance(scaling, Mapping) else {}
        kind = entries.pop("rope_type", entries.pop("type", None))
        entries.pop("type", None)
        found["rope_scaling"] = {**({} if kind in PLAIN else {"rope_type": kind}), **entries} or "none"
    named = {key: SAME.get(value, value) if isinstance(value, str) else value for key, value in found.items()}
    return {key: value for key, value in named.items() if value is not None or key == "sliding_window"}


def _shown(value: object) -> str:
    text = printable("none" if value is None else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
