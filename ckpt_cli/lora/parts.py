"""Adapters on a part of a model that PEFT wrapped alone, and adapters whose names begin with what a trainer calls the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate, takewhile
from typing import TypeVar

from ckpt_cli.errors import Unsupported
from ckpt_cli.hub.classes.fit import KnownClass, known_class
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.peft_names import PREFIX, Adapter, PeftState
from ckpt_cli.lora.on_base.adapted import fits
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

Value = TypeVar("Value")


def within_part(state: PeftState) -> PeftState:
    """A state as PEFT sees it that wrapped one part of the model: with names from there on, and nothing else."""
    part = state.part
    return replace(_renamed(replace(state, tensors=inside(state.tensors, part)), part), parts=("",)) if part else state


def inside(named: Mapping[str, Value], part: str) -> dict[str, Value]:
    """What lies in a part of the model, under its own names, which stay as they are here."""
    return {name: value for name, value in named.items() if name.startswith(part)}


def names_within(named: Mapping[str, Value], part: str) -> dict[str, Value]:
    """What lies in a part of the model, by the names that it has there."""
    return {name.removeprefix(part): value for name, value in inside(named, part).items()}


def placed(state: PeftState, base: Mapping[str, Tensor]) -> PeftState:
    """Adapters alone by the names of the base that they are for: without what a trainer puts in front of all names of the model."""
    split = [part.split(".")[:-1] for part in state.parts]
    shared = [parts[0] for parts in takewhile(lambda parts: len({*parts}) == 1, zip(*split, strict=False))]
    leads = ["", *accumulate(f"{part}." for part in shared)]
    fitting = {lead: sum(fits(_of_adapter(adapter, lead), base) for adapter in state.adapters) for lead in leads}
    return _renamed(state, max(leads, key=lambda lead: fitting[lead]))


def without_lead(state: PeftState, lead: str) -> PeftState:
    """Adapters alone without the name of their model, which a file of a pipeline has in front of all names."""
    modules = [adapter.module for adapter in state.adapters]
    if not lead or not modules or not all(module.startswith(lead) for module in modules):
        return state
    under = f"{PREFIX}{lead}"
    exported = {f"{PREFIX}{name[len(under) :]}" if name.startswith(under) else name: each for name, each in state.exported.items()}
    return replace(_renamed(state, lead), exported=exported)


def refuse_apart(state: PeftState, beside: Iterable[str]) -> None:
    """Raise Unsupported for adapters that are no adapter of one model: of several parts, or with tensors from outside of theirs."""
    if len(state.parts) > 1:
        raise Unsupported(
            f"these are adapters of {len(state.parts)} parts of the model, each wrapped by PEFT: {_listed(state.parts)}",
            expected="adapters of one model: PEFT loads a folder for each",
            hint="fuse them into the model, which needs --base where its weights are not here, or pass --lora keep",
        )
    outside = [name for name in beside if not name.startswith(state.part)]
    if outside:
        raise Unsupported(
            f"the adapters are for {_listed(state.parts)}, and {few(outside, 3)} was trained outside of that part",
            tensor=outside[0],
            expected="what an adapter of that part holds",
            hint="fuse them with --base, or pass --lora keep",
        )


def is_for_a_part(state: PeftState, config: Config) -> bool:
    """Whether adapters are for a part of the model of this ``config``, unless its class knows their modules without what is in front."""
    if not state.part:
        return False
    kind = known_class(config, {name: tensor.shape for name, tensor in state.tensors.items()})
    return not (isinstance(kind, KnownClass) and any(kind.knows(f"{adapter.inner}.weight") for adapter in state.adapters))


def part_note(state: PeftState) -> Note:
    """A warning about an exported adapter that is for a part of the model."""
    part = state.part.removesuffix(".")
    text = f"PEFT wrapped {part}, a part of what was trained: load the adapter with PeftModel.from_pretrained(model.{part}, ...)"
    return Note("warning", "lora-part", f"{text}; on the whole model, PEFT finds none of its tensors")


def _renamed(state: PeftState, lead: str) -> PeftState:
    """A state without ``lead`` in front of its names."""
    if not lead:
        return state
    return replace(
        state,
        tensors={name.removeprefix(lead): tensor for name, tensor in state.tensors.items()},
        adapters=tuple(_of_adapter(adapter, lead) for adapter in state.adapters),
        saved=tuple(name.removeprefix(lead) for name in state.saved),
        originals={name.removeprefix(lead): tensor for name, tensor in state.originals.items()},
        wrapped={name.removeprefix(lead): named for name, named in state.wrapped.items()},
        parts=tuple(part.removeprefix(lead) for part in state.parts),
    )


def _of_adapter(adapter: Adapter, lead: str) -> Adapter:
    module, path, part = (name.removeprefix(lead) for name in (adapter.module, adapter.path, adapter.part))
    return replace(adapter, module=module, path=path, part=part)


def _listed(parts: Iterable[str]) -> str:
    return few([part.removesuffix(".") or "the model" for part in parts])
