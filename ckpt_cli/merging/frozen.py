"""Whether the weights under adapters are those of the base, as PEFT trains: a state that was saved while merged holds each update already.

TRL merges the adapters before it hands the weights to vLLM, and unmerges them after that; what is saved in between looks like any state.
Without the base nothing tells. Only samples of a few modules are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckpt_cli.base_model.opened import Base
from ckpt_cli.discover.open import OpenedComponent
from ckpt_cli.errors import CkptError, Inconsistent
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.peft_names import Adapter, PeftState
from ckpt_cli.lora.config import AdapterFacts, adapter_facts
from ckpt_cli.lora.fit import fuse_adapters
from ckpt_cli.lora.on_base.adapted import adapted_name
from ckpt_cli.lora.on_base.seen import as_in_memory
from ckpt_cli.lora.on_base.turned import turned_modules
from ckpt_cli.lora.settings import changed_base
from ckpt_cli.names import printable
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.reading import elements
from ckpt_cli.tensors.tensor import Tensor

MODULES = 8
"""So many are sampled, over the whole depth of a model."""

SAMPLE = 4096
"""Elements that are read at each of three places."""

ROUNDED = 2.0**-7
"""Weights that differ by less than this share are the same: a base in float32 was rounded to 16 bits on its way into the training."""

UNRELATED = 0.1
"""A cosine below is that of another model's weights, of which `ckpt_cli.tensors.kinship` tells."""

SURE = 0.05
"""How well the share of the update that is in the weights must be known."""

NEAR, EXPLAINED = 0.2, 0.3
"""How far that share may be from all of it, and what may be left over, in parts of the update."""


@dataclass(frozen=True, slots=True)
class Measured:
    """How far the sampled weights of a module are from the base's, relative to these; ``merged``: they are the base's with the update.

    ``cosine`` is that of both; 0 of unrelated weights.
    """

    name: str
    distance: float
    merged: bool
    cosine: float = 1.0


def frozen_notes(component: OpenedComponent, base: Base, state: PeftState, alpha: float | None) -> list[Note]:
    """A warning about weights under adapters that are not the base's. Raises Inconsistent if they are these with the adapters in them."""
    try:
        facts = adapter_facts(component.homes, alpha, component.assets.config)
        held = as_in_memory(base.weights().tensors, component.assets.config, state.adapters, facts.config).tensors
        measured = list(_measured(state, held, facts)) if changed_base(facts.config) is None else []
    except CkptError:
        return []  # what cannot be read, or does not fit, is told where it is needed
    merged = next((each for each in measured if each.merged), None)
    if merged is not None:
        here = all(adapted_name(adapter, held) is not None for adapter in state.adapters)
        then = "merge that with this --base" if here else "fuse it into the base with PEFT"
        raise Inconsistent(
            "the adapter is in these weights already: they are the base's with its update, as of a state that was saved while merged",
            tensor=state.wrapped.get(merged.name, merged.name),
            path=component.component.root,
            expected="the weights of the base, beside an adapter that is not merged",
            hint=f"pass --lora export, without --base, to write the adapter alone, and {then}; "
            "in the training, call unmerge_adapter() before saving",
        )
    apart = max(
        (each for each in measured if each.distance > ROUNDED and each.cosine > UNRELATED), key=lambda each: each.distance, default=None
    )
    if apart is None:
        return []
    text = (
        f"{printable(apart.name)} differs from the base by {apart.distance:.1%}, although it has an adapter, and PEFT trains nothing else "
        "of such a module: the base may not be the model that training started from"
    )
    return [Note("warning", "not-frozen", text)]


def measured_under(state: PeftState, base: Mapping[str, Tensor], config: Config, facts: AdapterFacts) -> list[Measured]:
    """What some of the weights under the adapters of a whole state are, beside a base's; empty if these are not to be the base's.

    ``config`` is that of the model that was trained. Raises what `as_in_memory` and `fuse_adapters` raise.
    """
    if changed_base(facts.config) is not None:
        return []
    return list(_measured(state, as_in_memory(base, config, state.adapters, facts.config).tensors, facts))


def _measured(state: PeftState, base: Mapping[str, Tensor], facts: AdapterFacts) -> Iterator[Measured]:
    named = [(adapter, name) for adapter in state.adapters if (name := adapted_name(adapter, state.tensors)) is not None]
    named = [(adapter, name) for adapter, name in named if name in base and _comparable(adapter, state.tensors[name], base[name])]
    step = max(len(named) / MODULES, 1.0)
    chosen = [named[int(number * step)] for number in range(min(MODULES, len(named)))]
    modules = {adapter.module for adapter, _ in chosen}
    held = {name: tensor for name, tensor in base.items() if name.rpartition(".")[0] in modules}
    turned = turned_modules({adapter.path: (adapter, base[name]) for adapter, name in named}, facts)
    some = replace(state, tensors=held, adapters=tuple(adapter for adapter, _ in chosen))
    updated = fuse_adapters(some, facts, wide=True, turned=turned).tensors
    for _, name in chosen:
        yield _compared(name, state.tensors[name], base[name], updated[name])


def _comparable(adapter: Adapter, mine: Tensor, base: Tensor) -> bool:
    """Whether two weights have one shape, and numbers that can be read anywhere."""
    tensors = (mine, base, *adapter.parts.values())
    plain = all(tensor.dtype.kind == "float" and tensor.dtype.numpy is not None for tensor in tensors)
    return mine.shape == base.shape and plain and not any(piece.source.forward_only for tensor in tensors for piece in tensor.pieces)


def _compared(name: str, mine: Tensor, base: Tensor, updated: Tensor) -> Measured:
    """Which share of the update the difference from the base is, and what is left over: rounding, if it is all of it."""
    import numpy

    count = min(SAMPLE, mine.numel)
    end = mine.numel - count
    places = [(0, mine.numel)] if mine.numel <= 3 * SAMPLE else [(start, count) for start in (0, end // 2, end)]
    weights, own, others = (
        numpy.concatenate([elements(tensor, *place) for place in places]).astype(numpy.float64) for tensor in (mine, base, updated)
    )
    size = float(numpy.linalg.norm(own))
    with numpy.errstate(invalid="ignore", divide="ignore", over="ignore"):
        change, update = weights - own, others - own
        width, left = float(numpy.linalg.norm(update)), float(numpy.linalg.norm(weights - others))
        distance = float(numpy.linalg.norm(change)) / size if size else math.nan
        length = float(numpy.linalg.norm(weights)) * size
        cosine = float(weights @ own) / length if length else 0.0
        if not width or not math.isfinite(width + left):
            return Measured(name, distance, False, cosine)
        share = float(change @ update) / width**2
    is_known = left < SURE * width * math.sqrt(len(own))
    return Measured(name, distance, is_known and abs(share - 1) < NEAR and left < max(EXPLAINED * width, ROUNDED * size), cosine)
