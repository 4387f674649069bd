"""Flat parameters of FSDP1: one per wrapped module, cut over the ranks, without names or sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt_cli.discover.open import OpenedComponent
from ckpt_cli.discover.optimizers.files import OptimizerFiles
from ckpt_cli.dtypes import Dtype
from ckpt_cli.errors import Inconsistent, MissingShard, Undecidable, reading
from ckpt_cli.files.torch_file import StoredTensor
from ckpt_cli.formats.assembly import ranks_of, tiled
from ckpt_cli.formats.flat import FlatRange, range_pieces
from ckpt_cli.formats.optimizer_state import NamedState, RankEntries, is_inside
from ckpt_cli.names import plural
from ckpt_cli.state.fsdp1_units import find_units, unproved
from ckpt_cli.state.numbered import candidates_of
from ckpt_cli.state.optimizer_tensors import Optimizer, compared, optimizer_of
from ckpt_cli.state.slot_shapes import Slots, is_cut
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Piece, Tensor

SAVED_WHOLE = "save the optimizer with FSDP.optim_state_dict or get_optimizer_state_dict in the training script"
"""What helps where flat parameters cannot be divided."""


def _flat_candidates(model: OpenedComponent) -> dict[str, Tensor]:
    """What flat parameters are made of: sharded tensors where there are any, since the others are buffers."""
    floats = candidates_of(model)
    cut = {name: tensor for name, tensor in floats.items() if is_cut(tensor)}
    return cut or floats


def is_flat(ranks: Sequence[RankEntries]) -> bool:
    """Whether the states are parts of flat vectors: plain tensors of one dimension, none of them whole."""
    tensors = [local for entries in ranks for (_, slot), local in entries.tensors.items() if slot != "step"]
    return bool(tensors) and all(isinstance(local, StoredTensor) and len(local.shape) <= 1 for local in tensors)


def of_flat(ranks: Sequence[RankEntries], listed: OptimizerFiles, model: OpenedComponent, notes: Sequence[Note]) -> Optimizer:
    notes = list(notes)
    if listed.missing:
        text = f"{ranks_of(listed.missing, listed.world_size)} missing from the optimizer; other ranks hold replicas of it"
        notes.append(Note("warning", "replicas-only", text))
    if len(ranks[0].groups) > 1:
        raise Undecidable(
            "the flat parameters of FSDP1 are in several groups, and their numbers do not tell which unit comes first",
            path=ranks[0].path,
            hint=SAVED_WHOLE,
        )
    several = next((f"state.{parameter}.{slot}" for entries in ranks for parameter, slot in entries.tensors if is_inside(slot)), None)
    if several is not None:
        raise Undecidable(
            "lists of tensors do not show which part of a flat parameter of FSDP1 each belongs to",
            tensor=several,
            path=ranks[0].path,
            hint=SAVED_WHOLE,
        )
    mesh = model.component.mesh
    parts = mesh.shape[-1] if mesh is not None and len(mesh.shape) == 2 else listed.world_size
    held = {rank % parts for rank in listed.ranks}
    if len(held) < parts:
        raise MissingShard(
            f"{ranks_of(listed.missing, listed.world_size)} missing from the optimizer",
            path=ranks[0].path.parent,
            hint="copy the optimizer's file from the node that wrote it, or leave out --optimizer",
        )
    numbers = [int(parameter) for group in ranks[0].groups for parameter in group["params"]]
    lengths = _lengths(ranks, numbers)
    held_there = _flat_candidates(model)
    names, chosen = list(held_there), list(held_there.values())
    units = find_units(names, [tensor.numel for tensor in chosen], lengths, parts) if lengths else None
    if units is None:
        raise Undecidable(
            f"{plural(len(numbers), 'flat parameter')} of FSDP1 cannot be divided into parameters: no unit sizes, or several, fit",
            path=ranks[0].path,
            expected="sizes that only one way of wrapping the model explains",
            hint=SAVED_WHOLE,
        )
    doubtful = unproved(names, [tensor.numel for tensor in chosen], units, lengths, parts, not any(map(is_cut, chosen)))
    if doubtful is not None:
        raise Undecidable(
            "padded sizes do not show whether this is in a flat parameter of FSDP1",
            tensor=doubtful,
            path=ranks[0].path,
            expected="sizes that prove where every parameter is",
            hint=SAVED_WHOLE,
        )
    slots: Slots = {}
    values: dict[tuple[str, str], Any] = {}
    members: dict[int, list[str]] = {}
    for number, unit in zip(numbers, units, strict=True):
        start = 0
        members[number] = [names[index] for index in unit]
        slots_there = list(dict.fromkeys(slot for entries in ranks for parameter, slot in entries.tensors if parameter == number))
        for index in unit:
            for slot in slots_there:
                key = f"state.{names[index]}.{slot}"
                with reading(ranks[0].path, tensor=key):
                    slots[names[index], slot] = compared(_cut(key, chosen[index], start, ranks, number, slot, parts))
            values |= {(names[index], s): value for (p, s), value in ranks[0].values.items() if p == number}
            start += chosen[index].numel
    groups = [{**group, "params": [name for number in group["params"] for name in members[int(number)]]} for group in ranks[0].groups]
    return optimizer_of("FSDP1 flat parameters", NamedState(slots, values, groups), notes)


def _lengths(ranks: Sequence[RankEntries], numbers: Sequence[int]) -> list[int]:
    """Elements of one rank's part of each flat parameter; empty if ranks differ or some have no state."""
    lengths = []
    for number in numbers:
        found = {
            local.numel
            for entries in ranks
            for (parameter, slot), local in entries.tensors.items()
            if parameter == number and isinstance(local, StoredTensor) and local.shape
        }
        if len(found) != 1:
            return []
        lengths.append(found.pop())
    return lengths


def _cut(key: str, parameter: Tensor, start: int, ranks: Sequence[RankEntries], number: int, slot: str, parts: int) -> Tensor:
    """One parameter's slot: the elements from ``start`` on of the flat vector whose parts the ranks hold; a number is every rank's."""
    shape, pieces, dtypes = parameter.shape, list[Piece](), set[Dtype]()
    for entries in ranks:
        local = entries.tensors.get((number, slot))
        if not isinstance(local, StoredTensor):
            raise Inconsistent(f"rank {entries.rank} lacks it", path=entries.path)
        dtypes.add(local.dtype)
        first = entries.rank % parts * local.numel
        low, high = max(start, first), min(start + parameter.numel, first + local.numel)
        if local.shape == ():
            shape, first, low, high = (), start, start, start + 1
        pieces += range_pieces(FlatRange(local, low - first, low - start, high - low, entries.rank), shape)
    if len(dtypes) > 1:
        raise Inconsistent("the ranks disagree about the dtype")
    return tiled(key, dtypes.pop(), shape, pieces, "sharded" if shape else "replicated", f"flat x{parts}")
