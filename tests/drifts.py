"""Models as the comparison sees them: drifts of tensors with names as real models have, without any weights."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_cli.results.drift import BaseComparison, TensorDrift
from ckpt_cli.verifying.drift.groups import by_drift, frozen_parts, group_drifts, heatmap_of

MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp.gate",
    "input_layernorm",
    "post_attention_layernorm",
)


def drift(name: str, relative: float, elements: int = 100, base_norm: float = 10.0) -> TensorDrift:
    """A tensor that moved by ``relative`` of its norm."""
    return TensorDrift(
        name=name,
        elements=elements,
        compared=elements,
        changed=elements // 2 if relative else 0,
        max_abs=2 * relative,
        mean_abs=relative / 2,
        l2=relative * base_norm,
        base_norm=base_norm,
        relative_l2=relative,
        cosine=1 - relative * relative / 2,
        cosine_distance=relative * relative / 2,
    )


def layers(count: int, stack: str = "model.layers", frozen: int = 0) -> list[TensorDrift]:
    """A stack of layers that moved the more the later they come, the first ones not at all."""
    return [
        drift(f"{stack}.{layer}.{module}.weight", 0.0 if layer < frozen else 10 ** (-4 + 2 * layer / count))
        for layer in range(count)
        for module in MODULES
    ]


def comparison(drifts: Iterable[TensorDrift], base: str = "models/base") -> BaseComparison:
    """What a comparison with these drifts returns."""
    drifts = list(drifts)
    return BaseComparison(
        base=base,
        common=len(drifts),
        missing=(),
        extra=(),
        reshaped=(),
        other_dtype=(),
        unchanged=sum(not each.changed for each in drifts),
        drifts=tuple(sorted((each for each in drifts if each.changed), key=by_drift)),
        groups=group_drifts(drifts),
        frozen=frozen_parts(drifts),
        heatmap=heatmap_of(drifts),
    )
