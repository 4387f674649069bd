"""Arguments of Megatron that decide what its weights mean, and what a config.json says of the same: one table for both directions.

Facts: Megatron core's transformer config, rotary embeddings and router, and transformers' classes. An argument whose effect the names
and shapes of tensors show (biases, norms, sizes) is compared by these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ckpt_cli.errors import Inconsistent, Unsupported
from ckpt_cli.hub.config import Config, model_type
from ckpt_cli.hub.megatron import rotary
from ckpt_cli.hub.megatron.rotary import Allowed
from ckpt_cli.hub.megatron.sizes import size_of, sizes_of
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.plain_values import Unrepresented

Arguments = Mapping[str, Any]
Models = Literal["all", "experts", "latent", "llama3", "yarn", "latent-yarn"]

RUN_CONFIG = "run_config.yaml"
"""Among arguments: they are the entries of a trainer's file, of which some may not be read; no config.json is made of them."""

ROTATES_PAIRS = ("glm4",)
"""Classes whose rotary embedding turns neighbours, as Megatron does with ``rotary_interleaved``; in MLA it orders them itself."""

SIGMOID = ("deepseek_v3", "glm4_moe")
"""Classes whose router scores by sigmoid and always lets the weights of the chosen experts sum to one."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of the training by its ``name``, and the ``plain`` values of the classes that `config.config_from` writes.

    ``said`` gives the values that mean what a config says, under ``key`` if it is an entry and not the class that says it; without
    ``said`` every class computes as with plain values.
    ``seen``: tensors show it. ``models``: those whose weights it concerns; ``llama3`` and the two of yarn are those that are scaled so.
    ``doubt``: other values are a warning.
    """

    name: str
    plain: tuple[object, ...] = ()
    said: Callable[[Config], Allowed] | None = None
    key: str = ""
    seen: bool = False
    models: Models = "all"
    doubt: bool = False


def _entry(key: str) -> Callable[[Config], Allowed]:
    """The value of one entry; nothing if it is not there."""
    return lambda config: None if config.get(key) is None else (config[key],)


def _activation(config: Config) -> Allowed:
    return None if config.get("hidden_act") is None else (config["hidden_act"] in ("silu", "swish"),)


def _window(config: Config) -> Allowed:
    """Megatron counts the tokens before this one, and transformers counts this one too; both numbers are in use."""
    width = config.get("sliding_window") if config.get("use_sliding_window") is not False else None
    return (None,) if type(width) is not int else ((width, 0), [width, 0], (width - 1, 0), [width - 1, 0])


def _scores(config: Config) -> Allowed:
    if model_type(config) not in SIGMOID:
        return ("softmax",)
    return None if config.get("norm_topk_prob") is False else (config.get("scoring_func", "sigmoid"),)


def _before_softmax(config: Config) -> Allowed:
    """Whether the softmax is of all experts, so that the weights of the chosen ones do not sum to one."""
    if model_type(config) in SIGMOID:
        return (True, False, None)
    normalised = config.get("norm_topk_prob") is True or model_type(config) == "mixtral"
    return (False, None) if normalised else (True,)


def _weight_factor(config: Config) -> Allowed:
    if model_type(config) not in SIGMOID:
        return (None, 1.0)
    factor = config.get("routed_scaling_factor")
    return None if factor is None else (None, 1.0) if factor == 1 else (factor,)


def _groups_of_experts(key: str) -> Callable[[Config], Allowed]:
    def said(config: Config) -> Allowed:
        if model_type(config) not in SIGMOID:
            return (None,)
        return None if config.get("n_group") is None else (None, 1) if config["n_group"] == 1 else (config.get(key),)

    return said


def _softmax_scale(config: Config) -> Allowed:
    """Classes scale scores by the root of a head's width; latent attention does not look at the argument."""
    width = sizes_of(config).get("d")
    return None if rotary.is_latent(config) or width is None else (None, width**-0.5)


YARN: Mapping[str, Callable[[Config], Allowed]] = {
    "rotary_scaling_factor": rotary.factor("yarn", 1),
    "original_max_position_embeddings": rotary.of_yarn("original_max_position_embeddings"),
    "beta_fast": rotary.of_yarn("beta_fast"),
    "beta_slow": rotary.of_yarn("beta_slow"),
    "mscale": rotary.scale(0),
    "mscale_all_dim": rotary.scale(1),
}
"""Arguments of yarn: under these names in latent attention, else with ``yarn_`` in front."""

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
    Argument("softmax_scale", (None,), _softmax_scale),
    Argument("position_embedding_type", ("rope",), rotary.kind_of_embedding, "rope_parameters"),
    Argument("rotary_base", (), rotary.theta, "rope_theta"),
    Argument("rotary_percent", (1.0,), rotary.turned_part, "partial_rotary_factor"),
    Argument("rotary_interleaved", (False,), lambda config: (model_type(config) in ROTATES_PAIRS,)),
    Argument("rotary_seq_len_interpolation_factor", (None,), rotary.factor("linear", None, 1), "rope_parameters"),
    Argument("use_rope_scaling", (False,), rotary.of_llama_3, "rope_parameters"),
    Argument("rope_scaling_factor", (), rotary.factor("llama3"), "rope_parameters", models="llama3"),
    Argument("rope_type", (None, "rope"), rotary.kind_in_latent, "rope_parameters", models="latent"),
    *(Argument(name, (), said, "rope_parameters", models="latent-yarn") for name, said in YARN.items()),
    *(Argument(f"yarn_{name}", (), said, "rope_parameters", models="yarn") for name, said in YARN.items()),
    Argument("yarn_correction_range_round_to_int", (), rotary.rounds, "rope_parameters", models="yarn"),
    Argument("no_rope_freq", (None,)),
    Argument("mrope_section", (None,)),
    Argument("use_mup", (False,)),
    Argument("linear_attention_freq", (None,)),
    Argument("experimental_attention_variant", (None,)),
    Argument("heterogeneous_layers_config_path", (None,)),
    Argument("heterogeneous_layers_config_encoded_json", (None,)),
    Argument("is_hybrid_model", (False,)),
    Argument("spec", (None,), doubt=True),
    Argument("yaml_cfg", (None,), doubt=True),
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
    Argument("moe_router_force_biased", (None,), models="experts"),
    Argument("moe_apply_probs_on_input", (False,), models="experts"),
    Argument("moe_mlp_glu_interleave_size", (None,), models="experts"),
    Argument("moe_shared_expert_glu_interleave_size", (None,), models="experts"),
    Argument("moe_expert_capacity_factor", (None,), models="experts", doubt=True),
    Argument("moe_expert_rank_capacity_factor", (None,), models="experts", doubt=True),
    Argument("mtp_use_repeated_layer", (False, None), doubt=True),
    Argument("add_bias_linear", (False,), seen=True),
    Argument("attention_output_gate", (False,), seen=True),
    Argument("multi_latent_attention", (False,), seen=True),
    Argument("moe_router_enable_expert_bias", (False,), seen=True),
    Argument("moe_latent_size", (None,), seen=True),
    Argument("mtp_num_layers", (None, 0), seen=True),
)
"""``moe_..._glu_interleave_size``: rows of ``linear_fc1`` alternate in blocks of gate and up, within what each rank had.
``moe_router_load_balancing_type``: sinkhorn chooses experts by other scores. ``doubt``: a layer of the run's own, arguments from a
file with other names, experts that dropped tokens, layers without a window, and predicting layers that stand for several have no
entry in a config.
"""


def odd_argument(arguments: Arguments) -> str | None:
    """The first argument that is more than the plain classes have."""
    return next((row.name for row in SETTINGS if row.plain and not _fits(arguments, row, row.plain)), None)


def compare(config: Config, arguments: Arguments) -> list[Note]:
    """Warnings about arguments that a config cannot be compared with. Without a config it is only looked for what no class has.

    Raises Inconsistent if the config says other numbers than the training had, and Unsupported for arguments with which weights mean
    something else than in the class of the config.
    """
    if not arguments:
        return []
    _check_sizes(config, arguments)
    known = {*config, *rotary.rope_of(config), "rope_parameters"}
    arguments = _with_own_numbers(arguments)
    doubts: list[str] = []
    unread: list[str] = []
    for row in SETTINGS:
        if row.seen or row.name not in arguments or not _concerns(row, arguments) or (not config and (row.said is not None or row.doubt)):
            continue
        allowed = row.plain if row.said is None else row.said(config)
        if allowed is not None and _fits(arguments, row, allowed):
            continue
        if _is_unread(row, arguments):
            unread.append(row.name)
            continue
        value = str(arguments[row.name])[:60]
        # A window beyond the lengths of the training changes nothing in it.
        if row.doubt or allowed is None or (row.name == "window_size" and arguments[row.name] is None):
            doubts.append(f"{row.name} {value}")
        elif row.key not in known:
            which = "this class" if config else "any class"
            raise Unsupported(
                f"the training had {row.name} {value}, with which its weights mean something else than in {which}",
                expected="weights as the class in config.json has them" if config else "weights as a class has them",
                hint="--names native writes them as they are",
            )
        else:
            usual = " or ".join(dict.fromkeys(str(list(each) if isinstance(each, tuple) else each) for each in allowed))
            other = f"by {row.key} in config.json it is {usual[:80]}" if allowed else f"{row.key} in config.json says what no argument says"
            raise Inconsistent(
                f"the training had {row.name} {value}, {other}",
                expected="the config.json of this model",
                hint="pass a --base whose config.json says what the training had; --names native writes the weights as they are",
            )
    texts = [f"arguments of the training that config.json says nothing about were not compared: {few(doubts)}"] if doubts else []
    if unread:
        where = RUN_CONFIG if RUN_CONFIG in arguments else "the arguments of the training"
        texts.append(f"what {where} gives no plain value of was not compared with config.json: {few(unread)}")
    return [Note("warning", "arguments-not-compared", text) for text in texts]


def _is_unread(row: Argument, arguments: Arguments) -> bool:
    value = arguments[row.name]
    return (row.models == "yarn" and value is None) or (RUN_CONFIG in arguments and isinstance(value, Unrepresented))


def _with_own_numbers(arguments: Arguments) -> Arguments:
    """Arguments with the factor that older cores have for Llama 3, and without values for those of yarn that are not there."""
    own: dict[str, Any] = {}
    if arguments.get("use_rope_scaling") is True:
        own["rope_scaling_factor"] = rotary.LLAMA_3_FACTOR
    if arguments.get("position_embedding_type") == "yarn":
        own |= {f"yarn_{name}": None for name in YARN}
    return {**own, **arguments}


def _concerns(row: Argument, arguments: Arguments) -> bool:
    if row.models == "experts":
        return size_of(arguments, "num_experts") is not None
    if row.models == "llama3":
        return arguments.get("use_rope_scaling") is True
    if row.models == "yarn":
        return arguments.get("position_embedding_type") == "yarn"
    latent = arguments.get("multi_latent_attention") is True
    if row.models == "latent-yarn":
        yarn = arguments.get("rope_type") != "rope"
        if row.name == "rotary_scaling_factor":
            # It scales scores too, where mscale_all_dim says so.
            return latent and (yarn or arguments.get("mscale_all_dim") not in (None, 0))
        return latent and yarn and arguments.get("rotary_scaling_factor") != 1
    return row.models == "all" or latent


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
    if RUN_CONFIG in arguments and not isinstance(arguments.get("group_query_attention"), bool):
        return None
    heads = size_of(arguments, "num_attention_heads")
    return size_of(arguments, "num_query_groups") if arguments.get("group_query_attention") is True else heads
