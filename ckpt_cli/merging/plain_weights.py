"""Adapters that were trained on a quantised base, as QLoRA does, and are fused into the same model in 16 bits.

Trainers save the config of the model that was trained (axolotl, LLaVA), with a quantization_config that is not true of the weights that are
written. The base must say otherwise of itself, and its tensors must be plain. Weights of the run's own are codes, as its config says: they
may be packed into floats (``bnb_4bit_quant_storage``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpt_cli.base_model.opened import Base
from ckpt_cli.discover.open import OpenedComponent
from ckpt_cli.hub.classes.dtypes import quantised_names
from ckpt_cli.hub.config import is_quantised
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

ENTRIES = ("quantization_config", "quantization", "compression_config")
"""Entries of a config that tell of quantised weights: of transformers, mlx and compressed-tensors."""


def with_plain_config(component: OpenedComponent, base: Base | None, weights: Mapping[str, Tensor]) -> tuple[OpenedComponent, list[Note]]:
    """Adapters alone, whose config does not say that weights are quantised if those of the ``base`` are not; and what is said of it.

    ``weights`` are the base's if they are fused into these, else none.
    """
    assets = component.assets
    if base is None or not is_quantised(assets.config) or is_quantised(base.config) or not _are_plain(weights):
        return component, []
    said = tuple(entry for entry in ENTRIES if entry in assets.config)
    config = {key: value for key, value in assets.config.items() if key not in said}
    text = f"config.json says that weights are quantised, and those that the adapters are fused into are not: {few(said)} is not written"
    return replace(component, assets=replace(assets, config=config, unsaid=said)), [Note("info", "no-scales", text)]


def _are_plain(weights: Mapping[str, Tensor]) -> bool:
    floats = [tensor.dtype for tensor in weights.values() if tensor.dtype.kind == "float"]
    return bool(floats) and all(dtype.itemsize > 1 for dtype in floats) and not quantised_names(weights, quantised=True)
