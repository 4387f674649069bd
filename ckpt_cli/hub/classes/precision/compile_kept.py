"""Which tensors of a model class stay in fp32 when transformers loads it in 16 bits. Runs where transformers does: it imports torch."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from ckpt_cli.name_patterns import pattern_of

HALVES = {"BF16": "bfloat16", "F16": "float16"}
"""The dtypes of 16 bits that a model may be loaded in: our codes, and torch's names."""


def kept_of_model(kind: Any, config: Any) -> dict[str, list[str]]:
    """For each of `HALVES`: expressions to be searched in names in memory.

    Two things keep a tensor in fp32 (see ``convert_and_load_state_dict_in_model`` of transformers): expressions that the class lists, for
    fp16 or for both, in which ``*`` stands for any text and a dot for any character; and that the class makes it in fp32 whatever is asked.
    """
    return {code: list(dict.fromkeys(_kept(kind, config, dtype))) for code, dtype in HALVES.items()}


def _kept(kind: Any, config: Any, dtype: str) -> Iterator[str]:
    import torch
    from transformers.modeling_utils import local_torch_dtype

    half = getattr(torch, dtype)
    own = copy.deepcopy(config)
    for part in (own, *(getattr(own, name, None) for name in getattr(own, "sub_configs", None) or {})):
        if part is not None:
            part.dtype = half
    with torch.device("meta"), local_torch_dtype(half):
        model = kind(own)
    listed = [name for name, kept in sorted(model._get_dtype_plan(half).items()) if kept == torch.float32]  # noqa: SLF001 - its only name
    yield from (name.replace("*", ".*") for name in listed)
    found = re.compile("|".join(name.replace("*", ".*") for name in listed)) if listed else None
    start = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    for name, tensor in model.state_dict().items():
        if tensor.dtype == torch.float32 and (found is None or not found.search(name)):
            # Older files have more or less of the base model's prefix.
            text = re.escape(pattern_of(name)[0].removeprefix(start)).replace(r"\{\}", "[0-9]+")
            yield rf"(?:^|\.){text}$"
