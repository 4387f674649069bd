"""Megatron's names taken apart: which layer, which expert, and what it is below them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

LAYER = re.compile(r"decoder\.layers\.(?P<layer>[0-9]{1,6})\.(?P<rest>.+)", re.ASCII)
PREDICTION = re.compile(r"mtp\.layers\.(?P<layer>[0-9]{1,6})\.(?:(?:transformer_layer|mtp_model_layer)\.)?(?P<rest>.+)", re.ASCII)
EXPERT = re.compile(
    r"(?P<before>mlp\.experts\.(?:experts|local_experts)\.)(?P<expert>[0-9]{1,6})(?P<after>\..+)"
    r"|(?P<name>mlp\.experts\.linear_fc[12]\.(?:weight|bias))(?P<number>[0-9]{1,6})(?P<half>_[wv])?",
    re.ASCII,
)
SIGNS = re.compile(r"(.*\.)?decoder\.layers\.[0-9]+\.(self_attention|mlp)\.linear_[a-z0-9_]+\..*", re.ASCII)
"""Fused projections of a decoder: a name that only Megatron core gives."""

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
OUTPUT_BIAS = "output_layer.bias"

Where = Literal["top", "layer", "prediction"]


@dataclass(frozen=True, slots=True)
class Parsed:
    """A name as a ``place`` in the model: of a layer (of the decoder, or of multi-token prediction), of an ``expert`` in it.

    ``rest`` is the name below the layer, with ``{e}`` for the expert.
    """

    where: Where
    layer: int
    expert: int | None
    rest: str


def parsed(name: str) -> Parsed:
    """The parts of a name."""
    for where, regex in (("layer", LAYER), ("prediction", PREDICTION)):
        fields = regex.fullmatch(name)
        if fields is not None:
            expert, rest = _expert(fields["rest"])
            return Parsed("layer" if where == "layer" else "prediction", int(fields["layer"]), expert, rest)
    return Parsed("top", 0, None, name)


def _expert(rest: str) -> tuple[int | None, str]:
    fields = EXPERT.fullmatch(rest)
    if fields is None:
        return None, rest
    if fields["expert"] is not None:
        return int(fields["expert"]), f"{fields['before']}{{e}}{fields['after']}"
    return int(fields["number"]), f"{fields['name']}{{e}}{fields['half'] or ''}"


def is_megatron(names: Iterable[str]) -> bool:
    """Whether these are the names of a model of Megatron core."""
    return any(map(SIGNS.fullmatch, names))


def common_wrapper(names: Collection[str]) -> str:
    """What all names have in front of Megatron's own, such as "module."; empty if some have it not."""
    at = next((name.index("decoder.layers.") for name in names if SIGNS.fullmatch(name)), 0)
    prefix = next((name[:at] for name in names if SIGNS.fullmatch(name)), "")
    return prefix if prefix and all(name.startswith(prefix) for name in names) else ""
