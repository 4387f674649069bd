"""Rows of the mapping: what Megatron calls a tensor, its shape, how it is cut, and what the hub calls the parts.

Names are those below a layer; ``{e}`` is an expert. Shapes are in the sizes of `sizes`. Facts: what Megatron core's modules save
(sharded_state_dict and state_dict), which layers of Transformer Engine name otherwise than local ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckpt_cli.hub.megatron.names import EMBEDDING, OUTPUT, OUTPUT_BIAS

Cut = Literal["same", "halves", "heads", "rows"]


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of Megatron and the tensors of the hub that it is.

    ``sources`` are the names that it may have; ``shape`` its sizes; ``cut``: it is the same tensor, two ``halves`` (gate, then up, on
    dimension 0), the ``heads`` of queries, keys and values group by group, or the first ``rows`` of a padded vocabulary.
    """

    targets: tuple[str, ...]
    sources: tuple[str, ...]
    shape: tuple[str, ...]
    cut: Cut = "same"


Rows = tuple[Row, ...]


def same(target: str, shape: tuple[str, ...], *sources: str) -> Row:
    """The same tensor under another name."""
    return Row((target,), sources, shape)


def gated(prefix: str, suffix: str, sizes: tuple[str, str], names: tuple[str, str], *sources: str) -> Rows:
    """Gate and up of an MLP: one tensor of both, or two with ``_w`` and ``_v`` after its name, as Megatron-FSDP saves them."""
    gate, up = (f"{prefix}.{name}.{suffix}" for name in names)
    doubled, single = sizes
    beyond = ("h",) if suffix == "weight" else ()
    whole = Row((gate, up), sources, (doubled, *beyond), "halves")
    apart = [Row((target,), tuple(f"{s}_{letter}" for s in sources), (single, *beyond)) for target, letter in ((gate, "w"), (up, "v"))]
    return (whole, *apart)


def experts_named(part: str) -> tuple[str, ...]:
    """The names of one expert's ``linear_fc1.weight`` or ``linear_fc2.weight``: in torch_dist, of SequentialMLP, of TEGroupedMLP."""
    return f"mlp.experts.experts.{{e}}.{part}", f"mlp.experts.local_experts.{{e}}.{part}", f"mlp.experts.{part}{{e}}"


TOP: Rows = (
    Row(("model.embed_tokens.weight",), (EMBEDDING,), ("V", "h"), "rows"),
    Row(("lm_head.weight",), (OUTPUT,), ("V", "h"), "rows"),
    same("model.norm.weight", ("h",), "decoder.final_layernorm.weight"),
)
"""Outside of layers."""

CRITIC: Rows = (
    TOP[0],
    same("score.weight", ("1", "h"), OUTPUT),
    TOP[2],
)
CRITIC_BIAS: Rows = (same("score.bias", ("1",), OUTPUT_BIAS),)
"""A critic's head has one row (verl), and may have a bias."""

NORMS: Rows = (
    same("input_layernorm.weight", ("h",), "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    same("post_attention_layernorm.weight", ("h",), "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
)
"""Local layers write ``mlp.linear_fc1.layer_norm_weight`` before experts too."""

QKV = tuple(f"self_attn.{letter}_proj" for letter in "qkv")
ATTENTION: Rows = (
    *NORMS,
    Row(tuple(f"{name}.weight" for name in QKV), ("self_attention.linear_qkv.weight",), ("qkv", "h"), "heads"),
    same("self_attn.o_proj.weight", ("h", "q"), "self_attention.linear_proj.weight"),
)
QKV_BIAS: Rows = (Row(tuple(f"{name}.bias" for name in QKV), ("self_attention.linear_qkv.bias",), ("qkv",), "heads"),)
OUT_BIAS: Rows = (same("self_attn.o_proj.bias", ("h",), "self_attention.linear_proj.bias"),)
QK_NORMS: Rows = (
    same("self_attn.q_norm.weight", ("d",), "self_attention.q_layernorm.weight"),
    same("self_attn.k_norm.weight", ("d",), "self_attention.k_layernorm.weight"),
)

LATENT: Rows = (
    *NORMS,
    same("self_attn.kv_a_proj_with_mqa.weight", ("kv_down", "h"), "self_attention.linear_kv_down_proj.weight"),
    same(
        "self_attn.kv_a_layernorm.weight",
        ("kv_rank",),
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attention.kv_layernorm.weight",
    ),
    same("self_attn.kv_b_proj.weight", ("kv_up", "kv_rank"), "self_attention.linear_kv_up_proj.weight"),
    same("self_attn.o_proj.weight", ("h", "latent_v"), "self_attention.linear_proj.weight"),
)
"""Multi-head latent attention; its queries are projected at once, or through a low rank."""

LATENT_Q: Rows = (same("self_attn.q_proj.weight", ("latent_q", "h"), "self_attention.linear_q_proj.weight"),)
LATENT_Q_LOW: Rows = (
    same("self_attn.q_a_proj.weight", ("q_rank", "h"), "self_attention.linear_q_down_proj.weight"),
    same(
        "self_attn.q_a_layernorm.weight",
        ("q_rank",),
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.q_layernorm.weight",
    ),
    same("self_attn.q_b_proj.weight", ("latent_q", "q_rank"), "self_attention.linear_q_up_proj.weight"),
)

GATE_UP = ("gate_proj", "up_proj")
DENSE: Rows = (
    *gated("mlp", "weight", ("2f", "f"), GATE_UP, "mlp.linear_fc1.weight"),
    same("mlp.down_proj.weight", ("h", "f"), "mlp.linear_fc2.weight"),
)
DENSE_BIAS: Rows = (
    *gated("mlp", "bias", ("2f", "f"), GATE_UP, "mlp.linear_fc1.bias"),
    same("mlp.down_proj.bias", ("h",), "mlp.linear_fc2.bias"),
)
DENSE_FUSED: Rows = (
    same("mlp.gate_up_proj.weight", ("2f", "h"), "mlp.linear_fc1.weight"),
    same("mlp.down_proj.weight", ("h", "f"), "mlp.linear_fc2.weight"),
)
"""GLM-4 keeps gate and up in one tensor, as Megatron does."""

SANDWICH: Rows = (
    same("post_self_attn_layernorm.weight", ("h",), "post_self_attn_layernorm.weight"),
    same("post_mlp_layernorm.weight", ("h",), "post_mlp_layernorm.weight"),
)


def experts(prefix: str, names: tuple[str, str, str], size: str = "m") -> Rows:
    """Router and experts below ``prefix``; ``names`` of gate, up and down, ``size`` of what is between them."""
    gate, up, down = names
    return (
        same(f"{prefix}.gate.weight", ("E", "h"), "mlp.router.weight"),
        *gated(f"{prefix}.experts.{{e}}", "weight", (f"2{size}", size), (gate, up), *experts_named("linear_fc1.weight")),
        same(f"{prefix}.experts.{{e}}.{down}.weight", ("h", size), *experts_named("linear_fc2.weight")),
    )


EXPERTS = experts("mlp", ("gate_proj", "up_proj", "down_proj"))
MIXTRAL_EXPERTS = experts("block_sparse_moe", ("w1", "w3", "w2"), "f")
SCORE_BIAS: Rows = (same("mlp.gate.e_score_correction_bias", ("E",), "mlp.router.expert_bias"),)
SHARED_GATE: Rows = (same("mlp.shared_expert_gate.weight", ("1", "h"), "mlp.shared_experts.gate_weight"),)


def shared(prefix: str) -> Rows:
    """Experts that see every token."""
    return (
        *gated(prefix, "weight", ("2s", "s"), GATE_UP, "mlp.shared_experts.linear_fc1.weight"),
        same(f"{prefix}.down_proj.weight", ("h", "s"), "mlp.shared_experts.linear_fc2.weight"),
    )


PREDICTION: Rows = (
    same("eh_proj.weight", ("h", "2h"), "eh_proj.weight"),
    same("enorm.weight", ("h",), "enorm.weight"),
    same("hnorm.weight", ("h",), "hnorm.weight"),
    same("shared_head.norm.weight", ("h",), "final_layernorm.weight"),
)
"""What a layer of multi-token prediction has besides those of a layer; embedding and head are the model's."""
