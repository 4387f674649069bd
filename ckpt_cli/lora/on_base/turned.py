"""Which weights under adapters are stored as [in, out], as those of GPT-2 are: shapes tell it of all but square ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckpt_cli.errors import Undecidable
from ckpt_cli.hub.peft_names import Adapter
from ckpt_cli.names import few
from ckpt_cli.tensors.tensor import Tensor

if TYPE_CHECKING:
    from ckpt_cli.lora.config import AdapterFacts

CONV1D = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})
"""Model types with layers that are stored as [in, out] (transformers, ``pytorch_utils.Conv1D``), beside linear ones; also as a part."""

LAYERS = frozenset({"c_attn", "q_attn", "c_fc", "c_proj"})
"""What they call these layers."""


def turned_modules(named: Mapping[str, tuple[Adapter, Tensor]], facts: AdapterFacts) -> frozenset[str]:
    """The modules whose weights are stored as [in, out], by their paths: ``named`` has the adapters with their weights.

    A square weight is as others of its name are, or as the class says. PEFT's config says which kind the last module was, so that it
    tells nothing where there are both. Raises Undecidable there.
    """
    shown = {path: turned for path, (adapter, weight) in named.items() if (turned := _by_shape(adapter, weight)) is not None}
    square = [path for path, (adapter, weight) in named.items() if path not in shown and _is_square(adapter, weight)]
    by_end: dict[str, set[bool]] = {}
    for path, turned in shown.items():
        by_end.setdefault(_end(named[path][0]), set()).add(turned)
    of_class = facts.model_types & CONV1D
    found, rest = {path for path, turned in shown.items() if turned}, []
    for path in square:
        end = _end(named[path][0])
        told = by_end.get(end, {True} if of_class and end in LAYERS else set())
        if len(told) == 1:
            found |= {path} if told == {True} else set()
        else:
            rest.append(path)
    if not rest:
        return frozenset(found)
    said, kinds = facts.config.get("fan_in_fan_out"), {*shown.values(), *([True] if found else [])}
    if of_class and True in kinds:
        return frozenset(found)  # which explains a True: the others are plain layers
    if len(kinds) == 2 or (said is not None and kinds and kinds != {said is True}):
        raise Undecidable(
            f"nothing tells whether {few([named[path][0].module for path in rest], 3)} is stored as [in, out]: its weight is square, and "
            "the model has layers of both kinds",
            tensor=named[rest[0]][0].stored,
            expected="a config.json whose model_type names the classes of all parts",
            hint="pass --lora export, and fuse it with PEFT",
        )
    turned = kinds == {True} or said is True
    return frozenset([*found, *rest] if turned else found)


def _end(adapter: Adapter) -> str:
    return adapter.module.rpartition(".")[2]


def _is_linear(adapter: Adapter, weight: Tensor) -> bool:
    return not adapter.embedding and len(weight.shape) == len(adapter.a.shape) == len(adapter.b.shape) == 2


def _is_square(adapter: Adapter, weight: Tensor) -> bool:
    return _is_linear(adapter, weight) and weight.shape == (adapter.b.shape[0], adapter.a.shape[1]) and len({*weight.shape}) == 1


def _by_shape(adapter: Adapter, weight: Tensor) -> bool | None:
    """Whether a weight is stored as [in, out], None if its shape does not tell."""
    if not _is_linear(adapter, weight) or len({*weight.shape}) == 1 or math.prod(weight.shape) == 0:
        return None
    sides = adapter.b.shape[0], adapter.a.shape[1]
    return False if weight.shape == sides else True if weight.shape == sides[::-1] else None
