"""The tensor of a model that a LoRA adapter is for."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ckpt_cli.errors import Undecidable, Unsupported
from ckpt_cli.hub.classes.dtypes import is_packed
from ckpt_cli.hub.peft_names import Adapter
from ckpt_cli.hub.tied_names import EMBEDDINGS, HEADS, SHARED, last_two
from ckpt_cli.names import few
from ckpt_cli.tensors.tensor import Tensor

EXPORT = "pass --lora export, and fuse it with PEFT"
NUMBERS = re.compile(r"(?<=\.)[0-9]+(?=\.)")
UNEMBEDDING = re.compile(r"unembed|head|output", re.IGNORECASE)
"""In names that programs other than transformers give an output head."""


def adapted_name(adapter: Adapter, tensors: Mapping[str, Tensor]) -> str | None:
    """The tensor that an adapter is for, None if it is not here or not the only one that fits."""
    found = candidates(adapter, tensors)
    return found[0] if len(found) == 1 else None


def fits(adapter: Adapter, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the tensor that an adapter is for is here, in a shape that its factors fit; of quantised ones the shape says nothing."""
    name = adapted_name(adapter, tensors)
    if name is None:
        return False
    weight = tensors[name]
    sides = (adapter.b.shape[0], math.prod(adapter.a.shape[1:]))
    experts = name != f"{adapter.module}.weight"
    return (
        experts
        or weight.dtype.kind != "float"
        or is_packed(name, tensors, *sides)
        or {weight.shape[0], math.prod(weight.shape[1:])} == set(sides)
    )


def only_adapted_name(adapter: Adapter, tensors: Mapping[str, Tensor]) -> str:
    """The tensor that an adapter is for: the weight of its module, or the one parameter of it that fits."""
    found = candidates(adapter, tensors)
    if (computed := parametrized_weight(adapter, tensors)) is not None:
        raise Unsupported(
            f"a parametrization of torch computes the weight of this adapter from {tensors[computed].name}: LoRA cannot be fused into it",
            tensor=adapter.stored,
            expected=f"{adapter.module}.weight",
            hint="pass --lora export, without --base, and load it with PEFT without merging",
        )
    if not found:
        raise Undecidable(
            "the weight that this adapter belongs to is not here",
            tensor=adapter.stored,
            expected=f"{adapter.module}.weight, or fused experts in {adapter.module} that these factors fit",
            hint=_no_weight_hint(adapter, tensors),
        )
    if len(found) > 1:
        raise Undecidable(f"the adapter fits {few(found)}", tensor=adapter.stored, hint=EXPORT)
    return found[0]


def parametrized_weight(adapter: Adapter, tensors: Mapping[str, Tensor]) -> str | None:
    """The first of the tensors that the weight of an adapter is computed from, if that is so."""
    weight = f"{adapter.module}.parametrizations.weight.original"
    return next((name for name in (weight, f"{weight}0") if name in tensors), None)


def _no_weight_hint(adapter: Adapter, tensors: Mapping[str, Tensor]) -> str:
    """What can be done about an adapter without its weight. PEFT leaves out adapters of modules that a model has not."""
    if any(name.startswith(f"{adapter.module}.") for name in tensors):
        return "pass --lora export, without --base, and fuse it with PEFT"
    shared = [name for name in tensors if last_two(name) == SHARED]
    if shared and last_two(f"{adapter.module}.weight") in (*EMBEDDINGS, *HEADS):
        return f"it is one of the uses of {shared[0]}, which is stored once: pass --lora export, without --base"
    leaf, sides = adapter.module.rpartition(".")[2], (adapter.b.shape[0], math.prod(adapter.a.shape[1:]))
    numbers = NUMBERS.findall(adapter.module)
    alike = [
        name
        for name, tensor in tensors.items()
        if tensor.shape == sides
        and NUMBERS.findall(name) == numbers
        and (name.endswith(f".{leaf}.weight") or (UNEMBEDDING.search(leaf) and last_two(name) in HEADS))
    ]
    those = f"if it is that of {few([name.removesuffix('.weight') for name in alike], 3)}"
    there = f"{those}, rename its tensors in the adapter's file; otherwise " if alike else ""
    return f"the model has no module of this name, and PEFT leaves out what has none: {there}fuse it with the program that trained it"


def candidates(adapter: Adapter, tensors: Mapping[str, Tensor]) -> list[str]:
    weight = f"{adapter.module}.weight"
    if weight in tensors:
        return [weight]
    own = [name for name in tensors if name.rpartition(".")[0] == adapter.module and len(tensors[name].shape) == 3]
    return [name for name in own if expert_layout(adapter, tensors[name]) is not None]


def expert_layout(adapter: Adapter, weight: Tensor) -> str | None:
    """How fused experts [E, x, y] are adapted: "out x in" or "in x out"; None if the factors do not fit."""
    experts, first, second = weight.shape
    rank, columns = adapter.a.shape[0], adapter.a.shape[-1]
    rows = adapter.b.shape[0]
    if not experts or rank % experts or adapter.b.shape[-1] != rank or len(adapter.a.shape) != 2 or len(adapter.b.shape) != 2:
        return None
    return "out x in" if (rows, columns) == (first, second) else "in x out" if (rows, columns) == (second, first) else None
