"""A config.json from the arguments of a training with Megatron-LM, and whether arguments and a config speak of one model.

Arguments do not name a class: Llama and Mistral have the same ones. Of classes with the same tensors and the same arithmetic the
first is written. What a class cannot express is a reason to write none.
"""

from __future__ import annotations

from typing import Any

from ckpt_cli.hub.classes.tying import ties_embeddings
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.megatron.settings import RUN_CONFIG, Arguments, compare, groups, odd_argument
from ckpt_cli.hub.megatron.sizes import size_of
from ckpt_cli.tensors.component import Note

WITHOUT_END = ("NullTokenizer", "NullMultimodalTokenizer")
"""Tokenizers of Megatron that add the end of a document to the tokens of ``vocab_size``."""


def config_from(arguments: Arguments) -> dict[str, Any] | str:
    """The config.json of the model that some arguments describe, or why there is none."""
    if not arguments:
        return "the checkpoint holds no arguments of its training"
    if RUN_CONFIG in arguments:
        return f"none is made of what {RUN_CONFIG} says"
    odd = odd_argument(arguments)
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
        "num_key_value_heads": groups(arguments),
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


def _tied(arguments: Arguments) -> bool | None:
    untied = arguments.get("untie_embeddings_and_output_weights")
    return None if not isinstance(untied, bool) else not untied


def check_config(config: Config, arguments: Arguments) -> list[Note]:
    """Warnings about a config that ties other tensors than the training did, and what `compare` warns of. Raises what that raises."""
    notes = compare(config, arguments)
    tied, said = _tied(arguments), ties_embeddings(config)
    if tied in (None, said):
        return notes
    text = f"config.json says otherwise than the training's arguments: tie_word_embeddings {said} ({tied})"
    return [*notes, Note("warning", "config-differs", text)]


def vocabulary_size(config: Config) -> int:
    """The tokens that a config counts; 0 if it does not say it."""
    return size_of(config, "vocab_size") or 0


def padding_note(config: Config, arguments: Arguments) -> list[Note]:
    """What is said of a vocabulary whose own size arguments do not tell, if ``config`` was made of them.

    Without a size the padding is written; the tokens of some tokenizers do not count the end of a document.
    """
    if not arguments or config != config_from(arguments):
        return []
    count = size_of(arguments, "vocab_size")
    if count is not None and str(arguments.get("tokenizer_type")) in WITHOUT_END and (size_of(arguments, "padded_vocab_size") or 0) > count:
        text = f"the {count} tokens in the arguments are those before the end of a document, whose row {count} is left out"
        return [Note("warning", "end-of-document", f"{text}; --base DIR with a config.json that counts it keeps the row")]
    if count is not None:
        return []
    text = "the size of the vocabulary is not recorded: the rows that pad it are written too; --base DIR with the base model trims them"
    return [Note("warning", "vocabulary-padded", text)]
