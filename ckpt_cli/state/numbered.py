"""Optimizers that number their parameters: what the parameters may be, and which number is which of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_cli.boxes import Shape
from ckpt_cli.discover.open import OpenedComponent
from ckpt_cli.errors import Inconsistent, Undecidable
from ckpt_cli.formats.optimizer_state import RankEntries, is_inside
from ckpt_cli.formats.registry import format_of
from ckpt_cli.hub.classes.tying import ties_embeddings
from ckpt_cli.hub.tied_names import tied_pair
from ckpt_cli.names import few, plural, printable, stripped_names
from ckpt_cli.state.parameter_order import name_parameters
from ckpt_cli.state.slot_shapes import Slots, check_shapes, fits, is_cut, is_whole, shapes_of
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.equality import same_values
from ckpt_cli.tensors.tensor import Tensor


def candidates_of(model: OpenedComponent) -> dict[str, Tensor]:
    """What the parameters may be, in the order of the model: floating tensors, each storage once, a tied output head left out."""
    component = model.component
    clean = stripped_names(component.tensors)
    floats = {clean[name]: t for name, t in component.tensors.items() if t.dtype.kind == "float" and t.alias_of is None}
    pair = tied_pair(list(floats)) if ties_embeddings(model.assets.config) else None
    if pair is not None and same_values(floats[pair[0]], floats[pair[1]]):
        del floats[pair[0]]
    return floats


def check_order(component: Component) -> None:
    """Raise Undecidable for formats that do not keep the order of the model."""
    kept = format_of(component).keeps_order
    if not (kept and component.ordered):
        why = "the metadata of the model does not record" if kept else f"{component.format} files do not record"
        raise Undecidable(
            f"the optimizer numbers its parameters, and {why} their order",
            path=component.root,
            expected="a sharded model, or one in a file of torch.save, beside the optimizer",
        )


def belongs(slot: str, tensor: Tensor, parameter: Tensor) -> bool:
    """Whether a state can be a parameter's: one number, or of a shape that fits and as much cut into shards."""
    if is_inside(slot):
        return is_whole(slot, tensor, parameter.shape)
    return tensor.shape == () or (fits(slot, tensor.shape, parameter.shape) and is_cut(tensor) == is_cut(parameter))


def named_by_shapes(slots: Slots, candidates: Mapping[str, Tensor], groups: Sequence[Sequence[int]]) -> dict[int, str] | None:
    """Number -> name by `name_parameters`; None if slots of one parameter have different shapes, which tell nothing then."""
    known: dict[int, Shape] = {}
    for (parameter, slot), tensor in slots.items():
        if tensor.shape and not is_inside(slot):
            # Whether it is cut counts like a dimension.
            shape = (int(is_cut(tensor)), *tensor.shape)
            if known.setdefault(int(parameter), shape) != shape:
                return None
    return name_parameters({name: (int(is_cut(t)), *t.shape) for name, t in candidates.items()}, groups, known)


def recorded_names(entries: RankEntries) -> dict[int, str] | None:
    """Number -> name where the groups record the names of their parameters (``param_names`` of torch >= 2.6)."""
    names: dict[int, str] = {}
    for group in entries.groups:
        listed = group.get("param_names")
        if not isinstance(listed, list) or len(listed) != len(group["params"]) or not all(isinstance(name, str) for name in listed):
            return None
        names |= dict(zip(map(int, group["params"]), listed, strict=True))
    return names if len(set(names.values())) == len(names) else None


def renamed(entries: RankEntries, names: Mapping[int, str]) -> RankEntries:
    """Entries with names in place of numbers."""
    return replace(
        entries,
        tensors={(names[int(parameter)], slot): local for (parameter, slot), local in entries.tensors.items()},
        values={(names[int(parameter)], slot): value for (parameter, slot), value in entries.values.items()},
        groups=[{**group, "params": [names[int(parameter)] for parameter in group["params"]]} for group in entries.groups],
    )


def check_recorded(names: Mapping[int, str], slots: Slots, path: Path, model: OpenedComponent) -> None:
    """Raise Inconsistent unless the model has the parameters that groups name, in shapes that their states fit."""
    shapes = shapes_of(model)
    unknown = sorted(name for name in stripped_names(names.values()).values() if name not in shapes)
    if unknown:
        raise Inconsistent(
            f"the optimizer names parameters that the model lacks: {few(unknown)}",
            path=path,
            hint="the optimizer may belong to another model",
        )
    check_shapes(slots, shapes, path)


def named_numbers(slots: Slots, groups: Sequence[Sequence[int]], model: OpenedComponent) -> dict[int, str] | None:
    """Number -> name for states that are whole, by the order of the model and by shapes; None if these do not tell."""
    candidates = candidates_of(model)
    cut = {name: tensor for name, tensor in candidates.items() if is_cut(tensor)}
    if len(groups) == 1 and len(groups[0]) == len(cut):
        candidates = cut
    if len(groups) == 1 and len(groups[0]) == len(candidates):
        names = dict(zip(groups[0], candidates, strict=True))
        return names if all(belongs(slot, tensor, candidates[names[int(number)]]) for (number, slot), tensor in slots.items()) else None
    return named_by_shapes(slots, candidates, groups)


def assumed_names(names: Mapping[int, str], model: OpenedComponent) -> int:
    """How many numbers only the order of the model gives names to: the shapes of those are alike, and no file proves which is which."""
    shapes = {name: (is_cut(tensor), tensor.shape) for name, tensor in candidates_of(model).items()}
    count = Counter(shapes.values())
    return sum(count[shapes[name]] > 1 for name in names.values())


def order_notes(assumed: int, names: Mapping[int, str]) -> list[Note]:
    """What is said of numbers whose names are assumed (`assumed_names`)."""
    if not assumed:
        return []
    text = f"parameters are numbered, not named: that the numbers go in the order of the model is assumed ({assumed} of {len(names)} have"
    return [Note("info", "assumed-order", f"{text} the shape of another one)")]


def check_some_recorded(names: Mapping[int, str], entries: RankEntries) -> None:
    """Raise Inconsistent if a group records other names of its parameters than the order of the model gives them.

    Names in some groups only, or the same name for two parameters, do not tell all of them; what they tell must still be so.
    """
    listed = [(group["params"], group["param_names"]) for group in entries.groups if isinstance(group.get("param_names"), list)]
    said = [pair for numbers, own in listed for pair in zip(numbers, own, strict=False) if isinstance(pair[1], str)]
    count = Counter(name for _, name in said)
    recorded, clean = stripped_names(dict.fromkeys(count)), stripped_names(dict.fromkeys(names.values()))
    for number, name in said:
        if count[name] == 1 and recorded[name] != clean[names[int(number)]]:
            raise Inconsistent(
                f"parameter {number} is recorded as {printable(name)}, and in the order of the model it is {printable(names[int(number)])}",
                path=entries.path,
                hint="the optimizer may belong to another model",
            )


def check_alike_recorded(names: Mapping[int, str], ranks: Sequence[RankEntries]) -> None:
    """Raise Inconsistent if the ranks record different names for a number."""
    for entries in ranks[1:]:
        if recorded_names(entries) != names:
            raise Inconsistent(
                f"the parameter groups of ranks {ranks[0].rank} and {entries.rank} record different names",
                path=entries.path,
                hint="files from two saves may be mixed",
            )


def undecided(groups: Sequence[Sequence[int]], path: Path) -> Undecidable:
    """The error for numbers that nothing tells."""
    return Undecidable(
        f"the optimizer numbers {plural(sum(map(len, groups)), 'parameter')}, and their shapes do not tell which is which",
        path=path,
        expected="the parameters of the model in its order, each of the same shape",
        hint="save the optimizer with names (get_optimizer_state_dict of torch.distributed.checkpoint)",
    )
