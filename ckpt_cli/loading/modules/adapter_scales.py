"""What a live model of PEFT does with adapters besides what tensors say: their scale, and what their initialisation did below them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError, Unsupported
from ckpt_cli.hub.peft_names import BASE, PREFIX
from ckpt_cli.lora.config import CONFIG, AdapterFacts, adapter_facts
from ckpt_cli.lora.settings import changed_base
from ckpt_cli.names import few, plural, strip_wrappers
from ckpt_cli.tensors.component import Note


@dataclass(frozen=True, slots=True)
class Layer:
    """An adapter of one module: ``key`` is what patterns of its config are matched with."""

    module: str
    key: str
    rank: int
    scale: float


def adapter_notes(
    model: Any, homes: Sequence[Path], alpha: float | None, *, filled: Collection[str], missing: Collection[str], alone: bool
) -> list[Note]:
    """What a model's adapters do otherwise than those of a checkpoint, whose files are in ``homes``; ``alpha`` is ``lora_alpha``.

    ``filled`` and ``missing`` are names of the model's tensors, ``alone``: the checkpoint does not hold what lies below its adapters.
    Raises Unsupported for adapters that belong to other weights than those below them, and what `adapter_facts` raises of files that
    cannot be read.
    """
    layers = [*_layers(model)]
    if not layers:
        return []
    own = _initialised(model)
    if not any("lora_" in name for name in filled):
        return [_below(own)] if own is not None else []
    try:
        facts = adapter_facts(homes, alpha)
    except Unsupported:
        return [_not_compared("the checkpoint's are no plain LoRA")]
    theirs = changed_base(facts.config)
    if alone and facts.config and theirs != own:
        raise _other_below(theirs, own)
    absent = {_plain(name).partition(".lora_")[0] for name in missing}
    return _scale_notes(facts, [layer for layer in layers if layer.module not in absent])


def _scale_notes(facts: AdapterFacts, layers: Sequence[Layer]) -> list[Note]:
    differing: dict[tuple[float, float], list[str]] = {}
    try:
        for layer in layers:
            scale = facts.scale(layer.key, layer.rank)
            if not math.isclose(scale, layer.scale, rel_tol=1e-6):
                differing.setdefault((scale, layer.scale), []).append(layer.module)
    except CkptError as error:
        return [_not_compared(error.message)]
    texts = [
        f"by {mine:g} instead of {scale:g} in {plural(len(modules), 'module')}: {few(modules)}"
        for (scale, mine), modules in differing.items()
    ]
    if not texts:
        return []
    text = f"the model adds its adapters with another scale than {facts.origin} says, {'; '.join(texts)}"
    return [Note("warning", "other-settings", text)]


def _not_compared(why: str) -> Note:
    return Note("info", "adapter-scale", f"the scale of the model's adapters was not compared: {why}")


def _other_below(theirs: str | None, own: str | None) -> Unsupported:
    """The error for adapters that were trained above other weights than a model of its initialisation has."""
    if theirs is None:
        text = f"the model's adapters were initialised with {own}, which changed the weights below them; those of the checkpoint were not"
        return Unsupported(text, expected=f"init_lora_weights as {CONFIG} has it", hint="make the model with init_lora_weights=True")
    return Unsupported(
        f"the adapters were initialised with {theirs}, which changed the weights below them; those of the model were not",
        expected=f"a model made with init_lora_weights={theirs!r}, as in the training",
        hint=f"make it so from the same base; if its weights have that change already, set init_lora_weights to true in {CONFIG}",
    )


def _below(way: str) -> Note:
    text = f"the model's adapters were initialised with {way}, which took what they hold out of the weights below them"
    return Note("warning", "adapter-base", f"{text}: those that were loaded must lack it too")


def _layers(model: Any) -> Iterator[Layer]:
    """The LoRA layers of PEFT in a model, each once per adapter."""
    for name, module in model.named_modules():
        scales, ranks = getattr(module, "scaling", None), getattr(module, "r", None)
        if isinstance(scales, Mapping) and isinstance(ranks, Mapping):
            parameter = getattr(module, "parameter_name", None)
            plain = _plain(name)
            for adapter in scales.keys() & ranks.keys():
                yield Layer(plain, f"{plain}.{parameter}" if parameter else plain, ranks[adapter], float(scales[adapter]))


def _plain(name: str) -> str:
    """The name of a module without what PEFT and wrappers add."""
    inner = strip_wrappers(name).rpartition(PREFIX)[2]
    return ".".join(part for part in inner.split(".") if part != BASE)


def _initialised(model: Any) -> str | None:
    """The initialisation of a model's adapters that changed the weights below them, None for the usual ones."""
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        for config in configs.values() if isinstance(configs, Mapping) else ():
            way = changed_base({"init_lora_weights": getattr(config, "init_lora_weights", None)})
            if way is not None:
                return way
    return None
