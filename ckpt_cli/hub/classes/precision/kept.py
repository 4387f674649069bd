"""Tensors that stay in fp32 when transformers loads their class in 16 bits, such as routers of experts and their biases."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_cli.dtypes import BY_CODE, CAST_NAMES
from ckpt_cli.hub.classes.fit import KnownClass
from ckpt_cli.hub.classes.names import native_names
from ckpt_cli.hub.classes.rules import rules_for
from ckpt_cli.hub.config import Config
from ckpt_cli.tensors.tensor import Tensor

FP32 = BY_CODE["F32"]


def kept_in_fp32(tensors: Mapping[str, Tensor], kind: KnownClass | str, config: Config, dtype: str | None) -> frozenset[str]:
    """The names of tensors that ``from_pretrained`` makes fp32, also when it is asked for ``dtype`` (a name of `CAST_NAMES`).

    None of a class that is not known, nor for dtypes that have no fewer bits. ``kind`` is the class of these tensors, or why that is not
    known.
    """
    rules = kind.rules if isinstance(kind, KnownClass) else rules_for(config)
    found = rules.kept.get(CAST_NAMES.get(dtype or "", "")) if rules is not None else None
    if rules is None or found is None:
        return frozenset()
    names = native_names([name for name, tensor in tensors.items() if tensor.dtype.kind == "float"], rules)
    return frozenset(name for name, native in names.items() if any(map(found.search, rules.made_of(native))))
