"""What the files of a Hugging Face model in safetensors are called."""

from __future__ import annotations

from ckpt_cli.formats.sets.names import PartName, part_name

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMA = "ema.safetensors"
"""How BAGEL names its averaged weights, alone or beside the others."""

OPTIMIZER = "optimizer.safetensors"
"""What `extract-state` writes: no model."""


def safetensors_part(name: str) -> PartName | None:
    """What the name of a part in safetensors says; None for other names."""
    part = part_name(name)
    return part if part is not None and part.suffix == SUFFIX else None


def is_whole(name: str) -> bool:
    part = safetensors_part(name)
    return part is None or part.parts == 1


def stem_of(name: str) -> str:
    """What parts of a model, its index and its only file have in common, as "model": the name of the component in them."""
    part = safetensors_part(name)
    return part.stem if part else name.removesuffix(INDEX_SUFFIX).removesuffix(SUFFIX)
