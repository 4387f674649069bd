"""Averages by what they keep about themselves: that is no weight, and where it says 0 the average has not begun."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_cli.errors import Unsupported
from ckpt_cli.formats.assembly import RankState, assemble
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.rank_files.dtensor import LocalReader
from ckpt_cli.formats.torch_files.average_states import COUNTERS, TRAINED, AverageState, state_of
from ckpt_cli.formats.torch_files.averages import NAMELESS, TELLING, is_average_name
from ckpt_cli.names import printable, unnumbered
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.reading import element_bytes
from ckpt_cli.tensors.tensor import Tensor

PLACE = re.compile(rf"(.+\.)?({'|'.join(NAMELESS)})\.[0-9]+", re.ASCII)
"""How formats that know no lists call a tensor of an average without names."""

SEVERAL = re.compile(r"(.+\.)?ema_models\.[0-9]+\.ema_model\..+", re.ASCII)
"""A tensor in the state of ema-pytorch's ``PostHocEMA``."""


def averaged(component: Component) -> Component:
    """A component as the weights in it, if it is the state of an average, whatever format it is in.

    Raises Unsupported for an average that is a list of tensors, and for several averages.
    """
    tensors = component.tensors
    several = next((name for name in tensors if SEVERAL.fullmatch(name)), None)
    by_name = is_average_name(unnumbered(component.name)[0])
    nameless = [name for name in tensors if PLACE.fullmatch(name)]
    if nameless and (by_name or len(nameless) == len(tensors)):
        raise nameless_error(component.name, nameless[0])
    if several is not None and by_name:
        raise Unsupported(
            f"the state under {printable(component.name)} holds several averages, of different widths",
            tensor=several,
            expected="one average",
            hint="save the state dict of the one that is meant",
        )
    state = state_of(tensors) or (_with_counters(tensors) if by_name else None)
    if state is None:
        return component
    notes = [*begun_notes(state.counters), *trained_notes(state.trained)]
    return replace(component, tensors=renamed(state.average), notes=(*component.notes, *notes))


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Some of the tensors of a component under new names; which share a storage, those that are left out may have told."""
    first: dict[str, str] = {}
    owners = {name: first.setdefault(tensor.alias_of or tensor.name, name) for name, tensor in tensors.items()}
    return {name: replace(tensor, name=name, alias_of=None if owners[name] == name else owners[name]) for name, tensor in tensors.items()}


def _with_counters(tensors: Mapping[str, Tensor]) -> AverageState | None:
    """An average whose counters are among its weights."""
    counters = {name: tensor for name, tensor in tensors.items() if name in COUNTERS and tensor.numel == 1}
    average = {name: tensor for name, tensor in tensors.items() if name not in counters}
    return AverageState(average, counters=counters) if counters and average else None


def nameless_error(what: str, tensor: str | None = None) -> Unsupported:
    """The error for an average that is a list."""
    return Unsupported(
        f"the average under {printable(what)} is a list of tensors without names",
        tensor=tensor,
        expected="a state dict",
        hint="load it with the trainer that wrote it, and save the state dict of the averaged model",
    )


def trained_notes(trained: Mapping[str, Any]) -> list[Note]:
    """A note about the model of the training in the state of its average."""
    text = f"{TRAINED}* beside the average, the model as the training left it, is not in this component"
    return [Note("info", "trained-beside", text)] if trained else []


def begun_notes(counters: Mapping[str, Tensor]) -> list[Note]:
    """A warning if an average has not begun, by its counters: what it holds then is a copy of the model."""
    told = (tensor for name, tensor in counters.items() if name in TELLING)
    unbegun = next((counter for counter in told if counter.numel == 1 and not any(element_bytes(counter))), None)
    return [] if unbegun is None else [unbegun_note(unbegun.name, "False" if unbegun.dtype.kind == "bool" else "0")]


def unbegun_note(counter: str, said: object) -> Note:
    """The warning about an average of which a ``counter`` says 0, or False."""
    what = f"{counter} is {said}: the average has not begun"
    return Note("warning", "average-not-begun", f"{what}, and these are weights of the model from when it was made or last copied")


def notes_of_counters(nodes: Mapping[str, Any], reader: LocalReader, path: Path) -> list[Note]:
    """The same of counters in a file of torch.save, which may be plain numbers there."""
    if (plain := next(((name, node) for name, node in nodes.items() if isinstance(node, int) and not node), None)) is not None:
        return [unbegun_note(*plain)]
    held = {name: local for name, node in nodes.items() if (local := reader.read(node)) is not None}
    return begun_notes(assemble([RankState(0, path, held)], 1, (), ReadOptions()).tensors) if held else []
