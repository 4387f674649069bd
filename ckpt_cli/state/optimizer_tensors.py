"""An optimizer as tensors by parameter and slot, and what optimizer.json says of it.

What JSON has no form of is an object of one key there: ``{"tensor": name}``, ``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}``,
``{"float": "inf"}``, and ``{"values": {"dtype", "shape", "numbers"}}`` for a small tensor of which no file has the bytes alone.
docs/state.md builds them again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_cli.discover.optimizers.mixed_saves import MOST_PARAMETERS, most_steps
from ckpt_cli.errors import CorruptFile, Inconsistent, Unsupported
from ckpt_cli.formats.optimizer_state import Held, NamedState, is_inside
from ckpt_cli.names import few, plural, stripped_names
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import unequal_copies
from ckpt_cli.tensors.plain_values import MAX_IN_JSON, TensorValue, Unrepresented, unrepresented
from ckpt_cli.tensors.reading import element_bytes
from ckpt_cli.tensors.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Optimizer:
    """``tensors`` by output name ``state.<parameter>.<slot>``; ``content`` is what optimizer.json says; ``layout`` in words.

    ``assumed`` counts parameters whose names only the order of the model gives; ``lost`` lists what could not be represented.
    """

    layout: str
    tensors: dict[str, Tensor]
    content: dict[str, Any]
    notes: tuple[Note, ...] = ()
    assumed: int = 0

    @property
    def lost(self) -> list[str]:
        return [f"{name} of the optimizer: {what}" for name, what in unrepresented(self.content)]


def compared(tensor: Tensor) -> Tensor:
    """The tensor, after its replicas were compared. Raises Inconsistent if they differ."""
    for piece, copy in unequal_copies(tensor) if tensor.check_copies else ():
        raise Inconsistent(
            f"ranks {piece.rank} and {copy.rank} hold different values of what should be replicas",
            tensor=tensor.name,
            hint="files from two saves may be mixed, or each rank has its own part: block scales of 8-bit codes, experts cut by hand",
        )
    return tensor


def optimizer_of(layout: str, held: NamedState, notes: Sequence[Note], assumed: int = 0) -> Optimizer:
    """The result, with names that lack the wrappers of training."""
    listed = [name for group in held.groups for name in group["params"]]
    clean = stripped_names(dict.fromkeys([*listed, *(name for name, _ in (*held.tensors, *held.values))]))
    tensors: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    for (parameter, slot), tensor in held.tensors.items():
        name = f"state.{clean[parameter]}.{slot}"
        if name in tensors:
            raise CorruptFile("two states of the optimizer have one name", tensor=name, hint="leave out --optimizer")
        tensors[name] = replace(tensor, name=name)
        if not is_inside(slot):
            state.setdefault(clean[parameter], {})[slot] = {"tensor": name}
    for (parameter, slot), value in held.values.items():
        state.setdefault(clean[parameter], {})[slot] = _built(value, f"state.{clean[parameter]}")
    groups = [{**_options(group), "params": [clean[parameter] for parameter in group["params"]]} for group in held.groups]
    notes = [*notes, *_lost_notes(state)]
    return Optimizer(layout, tensors, {"layout": layout, "param_groups": groups, "state": state}, tuple(notes), assumed)


def other_notes(others: Sequence[str]) -> list[Note]:
    """A warning for what an optimizer keeps of no parameter, which has no place in the output."""
    if not others:
        return []
    names = few(list(dict.fromkeys(others)))
    return [Note("warning", "unread-states", f"{names}: what the optimizer keeps beside the states of parameters is not written")]


def steps_of(optimizer: Optimizer) -> int | None:
    """How many steps an optimizer has taken, by its parameters or its groups; None if it does not count them."""
    counted = [tensor for name, tensor in optimizer.tensors.items() if name.endswith(".step") and tensor.numel == 1]
    counts = [TensorValue(tensor.dtype, (), bytes(element_bytes(tensor))) for tensor in counted[:MOST_PARAMETERS]]
    held = [*optimizer.content["state"].values(), *optimizer.content["param_groups"]]
    return most_steps([*counts, *(slots.get("step") for slots in held)])


def _lost_notes(state: Mapping[str, Any]) -> list[Note]:
    """A warning for states of parameters that are in no output: a training cannot go on from it as from the original."""
    lost = list(unrepresented(state))
    if not lost:
        return []
    kinds = few(list(dict.fromkeys(what for _, what in lost)), 3)
    text = f"{plural(len(lost), 'state')} of the optimizer cannot be read, and no output has them: {kinds}"
    return [Note("warning", "unread-states", f"{text}; first: {lost[0][0]}")]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group, whose tuples become lists, without the names that torch >= 2.6 records; the output has its own."""
    options = {key: value for key, value in group.items() if key not in ("param_names", "params")}
    return {key: _built(list(value) if isinstance(value, tuple) else value, "") for key, value in options.items()}


def _built(value: Any, owner: str) -> Any:
    """A value of which JSON can be made, and of that the value again; ``owner`` begins the names of its tensors."""
    if isinstance(value, Held):
        return {"tensor": f"{owner}.{value.slot}"}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, TensorValue) and math.prod(value.shape) > MAX_IN_JSON:
        return Unrepresented(f"a tensor of shape {list(value.shape)}, which is larger than optimizer.json takes")
    if isinstance(value, TensorValue) and value.shape:
        try:
            numbers = value.numbers()
        except Unsupported:
            return Unrepresented(f"a tensor of dtype {value.dtype.torch} by value")
        return {"values": {"dtype": value.dtype.torch, "shape": list(value.shape), "numbers": numbers}}
    if isinstance(value, tuple):
        return {"tuple": [_built(item, owner) for item in value]}
    if isinstance(value, list):
        return [_built(item, owner) for item in value]
    if isinstance(value, dict):
        return {"dict": [[key, _built(item, owner)] for key, item in value.items()]}
    return value
