"""An optimizer as tensors by parameter and slot, and what optimizer.json says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_cli.errors import Inconsistent
from ckpt_cli.formats.optimizer_state import NamedState
from ckpt_cli.names import stripped_names
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import unequal_copies
from ckpt_cli.tensors.plain_values import unrepresented
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
        tensors[name] = replace(tensor, name=name)
        state.setdefault(clean[parameter], {})[slot] = {"tensor": name}
    for (parameter, slot), value in held.values.items():
        state.setdefault(clean[parameter], {})[slot] = value
    groups = [{**_without_names(group), "params": [clean[parameter] for parameter in group["params"]]} for group in held.groups]
    return Optimizer(layout, tensors, {"layout": layout, "param_groups": groups, "state": state}, tuple(notes), assumed)


def _without_names(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group without the names that torch >= 2.6 records; the output has its own."""
    return {key: value for key, value in group.items() if key != "param_names"}
