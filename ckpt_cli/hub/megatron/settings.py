"""Arguments of Megatron that decide what its weights mean, and what a config.json says of the same: one table for both directions.

Facts: Megatron core's transformer config, rotary embeddings and router, and transformers' classes. An argument whose effect the names
and shapes of tensors show (biases, norms, sizes) is compared by these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ckpt_cli.errors import Inconsistent, Unsupported
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.megatron.sizes import size_of, sizes_of
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

Arguments = Mapping[str, Any]
Allowed = Collection[object] | None
"""The values of an argument that mean what a config says; None if the config does not say it."""

Models = Literal["all", "experts", "latent"]

ROTATES_PAIRS = ("glm4",)
"""Classes whose rotary embedding turns neighbours, as Megatron does with ``rotary_interleaved``; in MLA it orders them itself."""

HALF_ROTARY = ("glm4", "glm4_moe")
"""Classes that turn half of each head unless the config says otherwise."""

SIGMOID = ("deepseek_v3", "glm4_moe")
"""Classes whose router scores by sigmoid and always lets the weights of the chosen experts sum to one."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of the training by its ``name``, and the ``plain`` values of the classes that `config.config_from` writes.

    ``said`` gives the values that mean what a config says, under ``key`` if it is an entry and not the class that says it; without
    ``said`` every class computes as with plain values.
    ``seen``: tensors show it. ``models``: those whose weights it concerns. ``doubt``: other values are a warning.
    """

    name: str
    plain: tuple[object, ...] = ()
    said: Callable[[Config], Allowed] | None = None
    key: str = ""
    seen: bool = False
    models: Models = "all"
    doubt: bool = False


def _rope(config: Config) -> Config:
    """The entries about rotary embedding, in one of the two ways in which transformers writes them."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    entries = dict(scaling) if isinstance(scaling, Mapping) else {}
    return {
        "rope_type": entries.get("type", "default"),
        **{k: config[k] for k in ("rope_theta", "partial_rotary_factor") if k in config},
        **entries,
    }


def _entry(key: str) -> Callable[[Config], Allowed]:
    """The value of one entry; nothing if it is not there."""
    return lambda config: None if config.get(key) is None else (config[key],)


def _rotary_factor(kind: str, *plain: object) -> Callable[[Config], Allowed]:
    """The factor of one kind of scaled rotary embedding; ``plain`` without it."""

    def said(config: Config) -> Allowed:
        rope = _rope(config)
        return plain if rope["rope_type"] != kind else None if rope.get("factor") is None else (rope["factor"],)

    return said


def _theta(config: Config) -> Allowed:
    return None if "rope_theta" not in (rope := _rope(config)) else (rope["rope_theta"],)


def _partial(config: Config) -> Allowed:
    usual = 0.5 if config.get("model_type") in HALF_ROTARY else 1.0
    return (1.0 if size_of(config, "kv_lora_rank") is not None else _rope(config).get("partial_rotary_factor", usual),)


def _activation(config: Config) -> Allowed:
    return None if config.get("hidden_act") is None else (config["hidden_act"] in ("silu", "swish"),)


def _window(config: Config) -> Allowed:
    """Megatron counts the tokens before this one, and transformers counts this one too; both numbers are in use."""
    width = config.get("sliding_window") if config.get("use_sliding_window") is not False else None
    return (None,) if type(width) is not int else ((width, 0), [width, 0], (width - 1, 0), [width - 1, 0])


def _scores(config: Config) -> Allowed:
    if config.get("model_type") not in SIGMOID:
        return ("softmax",)
    return None if config.get("norm_topk_prob") is False else (config.get("scoring_func", "sigmoid"),)


def _before_softmax(config: Config) -> Allowed:
    """Whether the softmax is of all experts, so that the weights of the chosen ones do not sum to one."""
    if config.get("model_type") in SIGMOID:
        return (True, False, None)
    normalised = config.get("norm_topk_prob") is True or config.get("model_type") == "mixtral"
    return (False, None) if normalised else (True,)


def _weight_factor(config: Config) -> Allowed:
    if config.get("model_type") not in SIGMOID:
        return (None, 1.0)
    factor = config.get("routed_scaling_factor")
    return None if factor is None else (None, 1.0) if factor == 1 else (factor,)


def _groups_of_experts(key: str) -> Callable[[Config], Allowed]:
    def said(config: Config) -> Allowed:
        if config.get("model_type") not in SIGMOID:
            return (None,)
        return None if config.get("n_group") is None else (None, 1) if config["n_group"] == 1 else (config.get(key),)

    return said


SETTINGS: tuple[Argument, ...] = (
    Argument("swiglu", (True,), _activation, "hidden_act"),
    Argument("quick_geglu", (False,)),
    Argument("squared_relu", (False,)),
    Argument("glu_linear_offset", (0.0,)),
    Argument("activation_func_clamp_value", (None,)),
    Argument("normalization", ("RMSNorm",)),
    Argument("layernorm_epsilon", (), _entry("rms_norm_eps"), "rms_norm_eps"),
    Argument("norm_epsilon", (), _entry("rms_norm_eps"), "rms_norm_eps"),
    Argument("apply_layernorm_1p", (False,)),
    Argument("layernorm_zero_centered_gamma", (False,)),
    Argument("apply_residual_connection_post_layernorm", (False,)),
    Argument("qk_l2_norm", (False,)),
    Argument("softmax_type", ("vanilla",)),
    Argument("window_size", (None,), _window, "sliding_window"),
    Argument("window_attn_skip_freq", (None,), doubt=True),
    Argument("position_embedding_type", ("rope",)),
    Argument("rotary_base", (), _theta, "rope_theta"),
    Argument("rotary_percent", (1.0,), _partial, "partial_rotary_factor"),
    Argument("rotary_interleaved", (False,), lambda config: (config.get("model_type") in ROTATES_PAIRS,)),
    Argument("rotary_seq_len_interpolation_factor", (None,), _rotary_factor("linear", None, 1), "rope_parameters"),
    Argument("use_rope_scaling", (False,), lambda config: (_rope(config)["rope_type"] == "llama3",), "rope_parameters"),
    Argument("rotary_scaling_factor", (), _rotary_factor("yarn", 1), "rope_parameters", models="latent"),
    Argument("no_rope_freq", (None,)),
    Argument("mrope_section", (None,)),
    Argument("use_mup", (False,)),
    Argument("linear_attention_freq", (None,)),
    Argument("experimental_attention_variant", (None,)),
    Argument("heterogeneous_layers_config_path", (None,)),
    Argument("heterogeneous_layers_config_encoded_json", (None,)),
    Argument("is_hybrid_model", (False,)),
    Argument("spec", (None,), doubt=True),
    Argument("qk_head_dim", (), _entry("qk_nope_head_dim"), "qk_nope_head_dim", models="latent"),
    Argument("qk_pos_emb_head_dim", (), _entry("qk_rope_head_dim"), "qk_rope_head_dim", models="latent"),
    Argument("v_head_dim", (), _entry("v_head_dim"), "v_head_dim", models="latent"),
    Argument("moe_router_topk", (), _entry("num_experts_per_tok"), "num_experts_per_tok", models="experts"),
    Argument("moe_router_score_function", ("softmax",), _scores, "scoring_func", models="experts"),
    Argument("moe_router_pre_softmax", (), _before_softmax, "norm_topk_prob", models="experts"),
    Argument("moe_router_topk_scaling_factor", (None,), _weight_factor, "routed_scaling_factor", models="experts"),
    Argument("moe_router_num_groups", (None,), _groups_of_experts("n_group"), "n_group", models="experts"),
    Argument("moe_router_group_topk", (None,), _groups_of_experts("topk_group"), "topk_group", models="experts"),
    Argument("moe_router_load_balancing_type", ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"), models="experts"),
    Argument("moe_router_force_load_balancing", (False,), models="experts"),
    Argument("moe_apply_probs_on_input", (False,), models="experts"),
    Argument("moe_expert_capacity_factor", (None,), models="experts", doubt=True),
    Argument("add_bias_linear", (False,), seen=True),
    Argument("attention_output_gate", (False,), seen=True),
    Argument("multi_latent_attention", (False,), seen=True),
    Argument("moe_router_enable_expert_bias", (False,), seen=True),
    Argument("moe_latent_size", (None,), seen=True),
    Argument("mtp_num_layers", (None, 0), seen=True),
)
"""``moe_router_load_balancing_type``: sinkhorn chooses experts by other scores. ``doubt``: a layer of the run's own, experts that
dropped tokens, and layers without a window have no entry in a config."""


def odd_argument(arguments: Arguments) -> str | None:
    """The first argument that is more than the plain classes have."""
    return next((row.name for row in SETTINGS if row.plain and not _fits(arguments, row, row.plain)), None)


def compare(config: Config, arguments: Arguments) -> list[Note]:
    """Warnings about arguments that a config cannot be compared with.

    Raises Inconsistent if the config says other numbers than the training had, and Unsupported for arguments with which weights mean
    something else than in the class of the config.
    """
    if not arguments:
        return []
    _check_sizes(config, arguments)
    known = {*config, *_rope(config), "rope_parameters"}
    doubts: list[str] = []
    for row in SETTINGS:
        if row.seen or row.name not in arguments or not _concerns(row, arguments):
            continue
        allowed = row.plain if row.said is None else row.said(config)
        if allowed is not None and _fits(arguments, row, allowed):
            continue
        value = str(arguments[row.name])[:60]
        # A window beyond the lengths of the training changes nothing in it.
        if row.doubt or allowed is None or (row.name == "window_size" and arguments[row.name] is None):
            doubts.append(f"{row.name} {value}")
        elif row.key not in known:
            raise Unsupported(
                f"the training had {row.name} {value}, with which its weights mean something else than in this class",
                expected="weights as the class in config.json has them",
                hint="--names native writes them as they are",
            )
        else:
            usual = " or ".join(dict.fromkeys(str(list(each) if isinstance(each, tuple) else each) for each in allowed))
            raise Inconsistent(
                f"the training had {row.name} {value}, by {row.key} in config.json it is {usual[:80]}",
                expected="the config.json of this model",
                hint="pass a --base whose config.json says what the training had; --names native writes the weights as they are",
            )
    if not doubts:
        return []
    text = f"arguments of the training that config.json says nothing about were not compared: {few(doubts)}"
    return [Note("warning", "arguments-not-compared", text)]


def _concerns(row: Argument, arguments: Arguments) -> bool:
    if row.models == "experts":
        return size_of(arguments, "num_experts") is not None
    return row.models == "all" or arguments.get("multi_latent_attention") is True


def _fits(arguments: Arguments, row: Argument, allowed: Collection[object]) -> bool:
    """Whether an argument that is there has one of some values; of a list of them every one."""
    value = arguments.get(row.name, next(iter(allowed), None))
    if isinstance(value, list) and row.name == "moe_router_load_balancing_type":
        return all(each in allowed for each in value)
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)


def _check_sizes(config: Config, arguments: Arguments) -> None:
    """Raise Inconsistent if the config has other heads, by which tensors are cut, or fewer tokens than the training had."""
    sizes = sizes_of(config)
    latent = arguments.get("multi_latent_attention") is True
    for symbol, what, said in (
        ("H", "attention heads", size_of(arguments, "num_attention_heads")),
        ("G", "key and value heads", None if latent else groups(arguments)),
        ("d", "elements per head", None if latent else size_of(arguments, "kv_channels")),
    ):
        if said is not None and symbol in sizes and sizes[symbol] != said:
            text = f"config.json says {sizes[symbol]} {what}, the training had {said}"
            raise Inconsistent(text, expected="the config.json of this model", hint="pass the --base of this model")

    tokens, count = size_of(arguments, "vocab_size"), size_of(config, "vocab_size")
    if tokens is not None and count is not None and tokens > count:
        text = f"config.json counts {count} tokens, the training had {tokens}: the rows of the others would be left out"
        raise Inconsistent(
            text, expected="the config.json of this model", hint="pass a --base whose config.json has the vocab_size of the training"
        )


def groups(arguments: Arguments) -> int | None:
    """The key and value heads that arguments say."""
    heads = size_of(arguments, "num_attention_heads")
    return size_of(arguments, "num_query_groups") if arguments.get("group_query_attention") is True else heads
