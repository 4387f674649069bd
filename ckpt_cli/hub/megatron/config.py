"""A config.json from the arguments of a training with Megatron-LM, and whether arguments and a config speak of one model.

Arguments do not name a class: Llama and Mistral have the same ones. Of classes with the same tensors and the same arithmetic the
first is written. What a class cannot express is a reason to write none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_cli.errors import Inconsistent, Unsupported
from ckpt_cli.hub.config import Config, ties_embeddings
from ckpt_cli.hub.megatron.sizes import size_of, sizes_of
from ckpt_cli.tensors.component import Note

Arguments = Mapping[str, Any]

PLAIN: dict[str, tuple[object, ...]] = {
    "swiglu": (True,),
    "normalization": ("RMSNorm",),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0, 1),
    "rotary_interleaved": (False,),
    "use_rope_scaling": (False,),
    "apply_layernorm_1p": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "add_bias_linear": (False,),
    "multi_latent_attention": (False,),
    "squared_relu": (False,),
    "attention_output_gate": (False,),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_score_function": ("softmax",),
    "moe_router_topk_scaling_factor": (None,),
    "moe_router_group_topk": (None,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    "softmax_type": ("vanilla",),
    "qk_l2_norm": (False,),
    "quick_geglu": (False,),
    "glu_linear_offset": (0.0, 0),
    "activation_func_clamp_value": (None,),
    "rotary_seq_len_interpolation_factor": (None,),
    "mrope_section": (None,),
    "is_hybrid_model": (False,),
    "use_mup": (False,),
    "window_size": (None,),
    "mtp_num_layers": (None, 0),
    "linear_attention_freq": (None,),
    "no_rope_freq": (None,),
    "experimental_attention_variant": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
}
"""Arguments that are more than a class of `_kind` has unless they are one of these; older versions of Megatron lack some."""

ZERO_CENTRED = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
INTERLEAVED = ("glm4", "glm4_moe", "deepseek_v3")
"""Classes of the hub whose rotary embedding turns neighbours, as Megatron does with ``rotary_interleaved`` (or does itself in MLA)."""


def config_from(arguments: Arguments) -> dict[str, Any] | str:
    """The config.json of the model that some arguments describe, or why there is none."""
    if not arguments:
        return "the checkpoint holds no arguments of its training"
    odd = next((name for name, usual in PLAIN.items() if name in arguments and arguments[name] not in usual), None)
    if odd is not None:
        return f"the argument {odd} is {str(arguments[odd])[:40]}, which no config is written for"
    needed = ("num_layers", "hidden_size", "num_attention_heads")
    lacking = next((name for name in needed if size_of(arguments, name) is None), None)
    if lacking is not None:
        return f"the arguments do not say {lacking}"
    kind = _kind(arguments)
    if kind is None:
        return "no class has such experts as the arguments describe"
    vocabulary = size_of(arguments, "vocab_size", "padded_vocab_size")
    model_type, architecture, own = kind
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": arguments["hidden_size"],
        "intermediate_size": size_of(arguments, "ffn_hidden_size"),
        "num_hidden_layers": arguments["num_layers"],
        "num_attention_heads": arguments["num_attention_heads"],
        "num_key_value_heads": _groups(arguments),
        "head_dim": size_of(arguments, "kv_channels"),
        "max_position_embeddings": size_of(arguments, "max_position_embeddings", "seq_length"),
        "rms_norm_eps": arguments.get("layernorm_epsilon", arguments.get("norm_epsilon")),
        "rope_theta": arguments.get("rotary_base"),
        "tie_word_embeddings": _tied(arguments),
        "vocab_size": vocabulary,
        **own,
    }
    unknown = next((name for name, value in config.items() if value is None), None)
    return config if unknown is None else f"the arguments do not say what {unknown} is"


def _kind(arguments: Arguments) -> tuple[str, str, dict[str, Any]] | None:
    """Model type, class and the entries that only this class has; None if no class fits."""
    bias, norms = arguments.get("add_qkv_bias") is True, arguments.get("qk_layernorm") is True
    if size_of(arguments, "num_experts") is None:
        if norms:
            return None if bias else ("qwen3", "Qwen3ForCausalLM", {"attention_bias": False})
        return ("qwen2", "Qwen2ForCausalLM", {}) if bias else ("llama", "LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False})
    dense = _dense_layers(arguments)
    shared = size_of(arguments, "moe_shared_expert_intermediate_size")
    if dense is None or size_of(arguments, "moe_router_topk") is None:
        return None
    inner = size_of(arguments, "moe_ffn_hidden_size", "ffn_hidden_size")
    own: dict[str, Any] = {"num_experts_per_tok": arguments["moe_router_topk"], "router_aux_loss_coef": _number(arguments)}
    if not norms and not bias and shared is None:
        plain = not dense and arguments.get("moe_router_pre_softmax") in (None, False)
        own |= {"num_local_experts": arguments["num_experts"], "intermediate_size": inner, "sliding_window": None}
        return ("mixtral", "MixtralForCausalLM", {k: v for k, v in own.items() if v is not None}) if plain else None
    own |= {
        "num_experts": arguments["num_experts"],
        "moe_intermediate_size": inner,
        "norm_topk_prob": arguments.get("moe_router_pre_softmax") is not True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }
    if norms:
        return None if bias or shared is not None else ("qwen3_moe", "Qwen3MoeForCausalLM", {**own, "attention_bias": False})
    if shared is None or arguments.get("moe_shared_expert_gate") is not True:
        return None
    return "qwen2_moe", "Qwen2MoeForCausalLM", {**own, "qkv_bias": bias, "shared_expert_intermediate_size": shared}


def _dense_layers(arguments: Arguments) -> list[int] | None:
    """The layers without experts, by ``moe_layer_freq``: every so many layers has them, from the first on, or a list says it of each."""
    layers, every = arguments["num_layers"], arguments.get("moe_layer_freq", 1)
    if layers > 1 << 14:
        return None
    if type(every) is int and every > 0:
        return [number for number in range(layers) if number % every]
    if isinstance(every, list) and len(every) == layers and all(kind in (0, 1) for kind in every):
        return [number for number, kind in enumerate(every) if not kind]
    return None


def _number(arguments: Arguments) -> float:
    found = arguments.get("moe_aux_loss_coeff")
    return float(found) if isinstance(found, (int, float)) else 0.0


def _groups(arguments: Arguments) -> int | None:
    heads = size_of(arguments, "num_attention_heads")
    return size_of(arguments, "num_query_groups") if arguments.get("group_query_attention") is True else heads


def _tied(arguments: Arguments) -> bool | None:
    untied = arguments.get("untie_embeddings_and_output_weights")
    return None if not isinstance(untied, bool) else not untied


def _normalised(arguments: Arguments) -> bool | None:
    """Whether the weights of the chosen experts sum to one: the softmax is of these, or of all; None for other scores."""
    before = arguments.get("moe_router_pre_softmax")
    return not before if isinstance(before, bool) and arguments.get("moe_router_score_function", "softmax") == "softmax" else None


def check_config(config: Config, arguments: Arguments) -> list[Note]:
    """Warnings about a config that says other numbers than the training's arguments.

    Raises Inconsistent if it has other heads, by which tensors are cut, and Unsupported for arguments that make weights mean something
    else than they do in the class of the config.
    """
    if not arguments:
        return []
    centred = next((name for name in ZERO_CENTRED if arguments.get(name) is True), None)
    turned = arguments.get("rotary_interleaved") is True and config.get("model_type") not in INTERLEAVED
    if centred is not None or turned:
        raise Unsupported(
            f"the training had {centred or 'rotary_interleaved'}, with which its weights mean something else than in this class",
            expected="weights as the class in config.json has them",
            hint="--names native writes them as they are",
        )
    sizes = sizes_of(config)
    for symbol, said in (
        ("H", size_of(arguments, "num_attention_heads")),
        ("G", _groups(arguments)),
        ("d", size_of(arguments, "kv_channels")),
    ):
        if said is not None and symbol in sizes and sizes[symbol] != said and arguments.get("multi_latent_attention") is not True:
            what = {"H": "attention heads", "G": "key and value heads", "d": "elements per head"}[symbol]
            text = f"config.json says {sizes[symbol]} {what}, the training had {said}"
            raise Inconsistent(text, expected="the config.json of this model", hint="pass the --base of this model")
    rope = config.get("rope_parameters")
    said_by = {
        "rms_norm_eps": arguments.get("layernorm_epsilon", arguments.get("norm_epsilon")),
        "rope_theta": arguments.get("rotary_base"),
        "num_experts_per_tok": arguments.get("moe_router_topk") if size_of(arguments, "num_experts") is not None else None,
        "tie_word_embeddings": _tied(arguments),
        "norm_topk_prob": _normalised(arguments),
    }
    held = {**config, "tie_word_embeddings": ties_embeddings(config), **(rope if isinstance(rope, Mapping) else {})}
    differing = [f"{name} {held[name]} ({said})" for name, said in said_by.items() if said is not None and held.get(name, said) != said]
    if not differing:
        return []
    return [Note("warning", "config-differs", f"config.json says otherwise than the training's arguments: {', '.join(differing)}")]


def vocabulary_size(config: Config) -> int:
    """The tokens that a config counts; 0 if it does not say it."""
    return size_of(config, "vocab_size") or 0


def padding_note(config: Config, arguments: Arguments) -> list[Note]:
    """What is said of a vocabulary whose own size nothing tells, so that its padding is written: ``config`` was made of ``arguments``."""
    if not arguments or size_of(arguments, "vocab_size") is not None or config != config_from(arguments):
        return []
    text = "the size of the vocabulary is not recorded: the rows that pad it are written too; --base DIR with the base model trims them"
    return [Note("warning", "vocabulary-padded", text)]
