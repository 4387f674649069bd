"""Which rows make up a model class: one entry per model type.

Llama, Qwen2, Qwen3, Mixtral, Qwen2-MoE and Qwen3-MoE are proved by equal logits of Megatron's own forward pass; Mistral has Llama's
tensors. DeepSeek-V3, GLM-4 and GLM-4-MoE follow the tables of the programs that train them with Megatron (slime, Megatron-Bridge, verl).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt_cli.hub.config import Config
from ckpt_cli.hub.megatron.rows import (
    ATTENTION,
    DENSE,
    DENSE_BIAS,
    DENSE_FUSED,
    EXPERTS,
    LATENT,
    LATENT_Q,
    LATENT_Q_LOW,
    MIXTRAL_EXPERTS,
    OUT_BIAS,
    PREDICTION,
    QK_NORMS,
    QKV_BIAS,
    SANDWICH,
    SCORE_BIAS,
    SHARED_GATE,
    Rows,
    shared,
)
from ckpt_cli.hub.megatron.sizes import size_of


@dataclass(frozen=True, slots=True)
class Architecture:
    """The rows of every layer (``attention``), of a ``dense`` one, of one with ``experts``, and of a layer of multi-token ``prediction``.

    ``with_experts`` says of a layer's number whether it has experts.
    """

    attention: Rows
    dense: Rows = DENSE
    experts: Rows = ()
    with_experts: Callable[[int], bool] = lambda _: False
    prediction: Rows = ()

    def layer(self, number: int) -> Rows:
        """The rows of a layer of the decoder."""
        return (*self.attention, *(self.experts if self.with_experts(number) else self.dense))


def _llama(config: Config) -> Architecture:
    biases = (*QKV_BIAS, *OUT_BIAS) if config.get("attention_bias") is True else ()
    return Architecture((*ATTENTION, *biases), (*DENSE, *(DENSE_BIAS if config.get("mlp_bias") is True else ())))


def _qwen3(config: Config) -> Architecture:
    biases = (*QKV_BIAS, *OUT_BIAS) if config.get("attention_bias") is True else ()
    return Architecture((*ATTENTION, *QK_NORMS, *biases))


def _qwen2_moe(config: Config) -> Architecture:
    bias = () if config.get("qkv_bias") is False else QKV_BIAS
    rows = (*EXPERTS, *shared("mlp.shared_expert"), *SHARED_GATE)
    return Architecture((*ATTENTION, *bias), DENSE, rows, _every_step(config))


def _qwen3_moe(config: Config) -> Architecture:
    return Architecture(_qwen3(config).attention, DENSE, EXPERTS, _every_step(config))


def _glm4(config: Config) -> Architecture:
    bias = QKV_BIAS if config.get("attention_bias") is True else ()
    return Architecture((*ATTENTION, *bias, *SANDWICH), DENSE_FUSED)


def _glm4_moe(config: Config) -> Architecture:
    bias = QKV_BIAS if config.get("attention_bias") is True else ()
    norms = QK_NORMS if config.get("use_qk_norm") is True else ()
    return Architecture((*ATTENTION, *bias, *norms), DENSE, _routed(config), _after_dense(config), PREDICTION)


def _deepseek_v3(config: Config) -> Architecture:
    queries = LATENT_Q if size_of(config, "q_lora_rank") is None else LATENT_Q_LOW
    return Architecture((*LATENT, *queries), DENSE, _routed(config), _after_dense(config), PREDICTION)


def _routed(config: Config) -> Rows:
    return (*EXPERTS, *SCORE_BIAS, *(shared("mlp.shared_experts") if size_of(config, "n_shared_experts") is not None else ()))


def _every_step(config: Config) -> Callable[[int], bool]:
    """Experts in every layer, or every so many, but for those that are listed as dense."""
    step, listed = size_of(config, "decoder_sparse_step") or 1, config.get("mlp_only_layers")
    dense = frozenset(listed if isinstance(listed, list) and all(type(number) is int for number in listed) else ())
    return lambda number: number not in dense and (number + 1) % step == 0


def _after_dense(config: Config) -> Callable[[int], bool]:
    """Experts in all layers but the first few."""
    kinds = config.get("mlp_layer_types")
    first = size_of(config, "first_k_dense_replace") or 0
    if isinstance(kinds, list) and "first_k_dense_replace" not in config:
        return lambda number: number >= len(kinds) or kinds[number] == "sparse"
    return lambda number: number >= first


ARCHITECTURES: dict[str, Callable[[Config], Architecture]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": lambda _: Architecture((*ATTENTION, *QKV_BIAS)),
    "qwen3": _qwen3,
    "mixtral": lambda _: Architecture(ATTENTION, (), MIXTRAL_EXPERTS, lambda _: True),
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3,
}
"""By the ``model_type`` of a config."""


def architecture_of(config: Config) -> Architecture | None:
    """The rows of the model type that a config names; None for others."""
    kind = config.get("model_type")
    make = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    return None if make is None else make(config)
