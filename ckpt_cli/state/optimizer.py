"""The optimizer's state merged per parameter, out of whatever layout training left it in.

======================================  =============================================================================
layout                                  how a parameter is identified
======================================  =============================================================================
names (DCP, EasyR1, VeOmni, accelerate) the state names it; `slot_shapes`: every shape fits the parameter
numbers, whole shapes (FSDP2, verl, ..) `parameter_order`: the order of the model, every shape checked
numbers, flat parts (FSDP1)             `fsdp1_units`: the only division into units that fits all sizes
======================================  =============================================================================

Everything else is refused, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ckpt_cli.discover.beside.homes import asset_homes, doubtful_homes
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.discover.open import OpenedComponent, describe_place, reading_options
from ckpt_cli.discover.optimizers.files import OptimizerFiles, find_optimizer_files, optimizer_folders, other_optimizers, owned_files
from ckpt_cli.errors import CkptError, Inconsistent, MissingShard, NotFound, reading
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import StoredTensor
from ckpt_cli.formats.assembly import RankState, assemble
from ckpt_cli.formats.base import Match, ReadOptions, ShardOrder
from ckpt_cli.formats.optimizer_state import Group, NamedState, Parameter, RankEntries, numbered_entries, read_entries
from ckpt_cli.formats.rank_files.reader import check_rank_files
from ckpt_cli.formats.registry import format_of, recognise
from ckpt_cli.hub.assets import find_assets
from ckpt_cli.names import few, stripped_names
from ckpt_cli.state.fsdp1 import is_flat, of_flat
from ckpt_cli.state.numbered import (
    assumed_names,
    belongs,
    candidates_of,
    check_alike_recorded,
    check_order,
    check_recorded,
    check_some_recorded,
    named_by_shapes,
    named_numbers,
    order_notes,
    recorded_names,
    renamed,
    undecided,
)
from ckpt_cli.state.optimizer_tensors import Optimizer, compared, optimizer_of, other_notes
from ckpt_cli.state.slot_shapes import Slots, check_shapes, is_cut, slot_notes
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.plain_values import equal


def read_optimizer(found: Found, place: Place, files: Files, shard_order: ShardOrder) -> Optimizer:
    """The optimizer of a component.

    Raises NotFound if there is none, Undecidable if its parameters cannot be told, IncompleteError if parts of it are missing.
    """
    described = partial(describe_place, found, place.name, files, None, shard_order)
    homes = [place.home, *place.more_homes, found.path, place.match.files[0].parent]
    number = place.match.number
    folders = [match for folder in optimizer_folders(homes, number) for match in recognise(folder)]
    for match in (*folders, place.match):
        state = format_of(match).optimizer(match, files)
        if state is not None:
            return _of_save(state, match, files, described)
    owned = format_of(place.match).optimizer_files(place.match, files)
    listed = owned_files(owned) if owned is not None else find_optimizer_files(homes, number)
    if listed is None:
        others = [name for names in other_optimizers(homes, number).values() for name in names]
        text = f": {few(others, 3)} {'is' if len(others) == 1 else 'are'} of another model by number" if others else ""
        known = f"optimizer_{number}/, optimizer_{number}.bin or optimizer_{number}_rankR.bin"
        raise NotFound(
            f"this checkpoint holds no optimizer state of {place.name} in a known form{text}",
            path=found.path,
            expected=known if number else "optim_world_size_W_rank_R.pt, optimizer.bin, or an optimizer in a DCP folder",
            hint="leave out --optimizer",
        )
    listed = listed.of_at_least(place.match.world_size or max(place.match.ranks, default=-1) + 1)
    ranks = [read_entries(rank, path, files) for rank, path in sorted(listed.ranks.items())]
    notes = [*_check_groups(ranks), *other_notes([name for entries in ranks for name in entries.others])]
    if all(isinstance(parameter, str) for entries in ranks for parameter in _parameters(entries)):
        config = find_assets(asset_homes(found, place), doubtful=doubtful_homes(found, place)).config
        slots = _by_name(ranks, listed, reading_options(config, shard_order))
        names = {str(name): str(name) for entries in ranks for name in _parameters(entries)}
        values = {key: value for entries in reversed(ranks) for key, value in entries.values.items()}
        everything = replace(ranks[0], values=values, groups=_united(ranks))
        notes += slot_notes(slots, described, ranks[0].path.parent, _without_placements(ranks) if listed.world_size > 1 else ())
        return optimizer_of("by name", _named(slots, everything, names), notes)
    model = described()
    if listed.world_size > 1 and is_flat(ranks):
        check_order(model.component)
        return of_flat(ranks, listed.of_at_least(model.component.world_size or 1), model, notes)
    return _of_numbers(ranks, listed, model, shard_order, notes)


def optimizer_notes(found: Found, place: Place, files: Files, asked: bool) -> list[Note]:
    """What is said of the optimizers of other models that were saved together; ``asked``: this component was asked for by name."""
    if format_of(place.match).optimizer_files(place.match, files) is not None:
        return []  # numbers in the names of files are ranks
    homes = [place.home, *place.more_homes, found.path, place.match.files[0].parent]
    notes = []
    for number, names in other_optimizers(homes, place.match.number).items():
        owner = next((other.name for other in found.places if other.match.number == number), None)
        text = f"{few(names, 3)} {'holds the optimizer' if len(names) == 1 else 'hold optimizers'} of another model and"
        text += f" {'is' if len(names) == 1 else 'are'} not written" + (
            f": --type {owner} --optimizer takes it" if owner is not None else ""
        )
        notes.append(Note("info" if asked and owner is not None else "warning", "other-optimizers", text))
    return notes


# -- by name ---------------------------------------------------------------------------------------------------------


def _of_save(state: NamedState, match: Match, files: Files, described: Callable[[], OpenedComponent]) -> Optimizer:
    """An optimizer that a format keeps by parameter; ``described`` gives the model."""
    root, kind = match.root, format_of(match).display.removeprefix("torch ")
    # An optimizer in a folder of its own may be of two saves where the weights are of one.
    doubts = [*format_of(match).doubts(match, files), *other_notes(state.others)]
    for tensor in state.tensors.values():
        compared(tensor)
    with reading(root):
        entries = numbered_entries(state, root)
    if entries is None:
        return optimizer_of(f"{kind}, by name", state, [*doubts, *slot_notes(dict(state.tensors), described, root)])
    slots = {(str(int(parameter)), slot): tensor for (parameter, slot), tensor in state.tensors.items()}
    groups = [[int(parameter) for parameter in group["params"]] for group in entries.groups]
    model, layout, notes, assumed = described(), f"{kind}, by recorded names", list[Note](), 0
    names = recorded_names(entries)
    if names is not None:
        by_name = {(names[int(number)], slot): tensor for (number, slot), tensor in slots.items()}
        check_recorded(names, by_name, root, model)
    else:
        check_order(model.component)
        names, layout = named_numbers(slots, groups, model), f"{kind}, by the order of parameters"
        if names is None:
            raise undecided(groups, root)
        check_some_recorded(names, entries)
        # Parameters that were never stepped have no state, and so no name that could be wrong.
        stepped = {int(number) for number, _ in slots}
        kept = {number: name for number, name in names.items() if number in stepped}
        assumed = assumed_names(kept, model)
        notes = order_notes(assumed, kept)
    texts = {str(number): name for number, name in names.items()}
    return optimizer_of(layout, _named(slots, entries, texts), [*doubts, *notes], assumed)


def _named(slots: Slots, entries: RankEntries, names: Mapping[str, str]) -> NamedState:
    """The state of numbers or names, with the ``names`` of all parameters in place of them."""
    return NamedState(
        {(names[parameter], slot): tensor for (parameter, slot), tensor in slots.items()},
        {(names[str(parameter)], slot): value for (parameter, slot), value in entries.values.items()},
        [{**group, "params": [names[str(parameter)] for parameter in group["params"]]} for group in entries.groups],
    )


def _by_name(ranks: Sequence[RankEntries], listed: OptimizerFiles, options: ReadOptions) -> Slots:
    """Whole tensors of every parameter (a number as text) and slot."""
    states = [
        RankState(
            entries.rank,
            entries.path,
            {f"{parameter}\0{slot}": local for (parameter, slot), local in entries.tensors.items()},
            fingerprint=entries.fingerprint,
        )
        for entries in ranks
    ]
    try:
        check_rank_files(states, listed.world_size)
        assembled = assemble(states, listed.world_size, listed.missing, options)
    except CkptError as error:
        error.tensor = error.tensor and "state." + error.tensor.replace("\0", ".")
        error.path = error.path or str(ranks[0].path.parent)
        if isinstance(error, MissingShard):
            error.hint = error.hint or "copy the optimizer's file from the node that wrote it, or leave out --optimizer"
        raise
    slots: Slots = {}
    for key, tensor in assembled.tensors.items():
        parameter, _, slot = key.partition("\0")
        slots[parameter, slot] = replace(tensor, name=f"state.{parameter}.{slot}", alias_of=None)
    for place, tensor in slots.items():
        try:
            compared(tensor)
        except Inconsistent:
            # What has not the shape of its parameter, as placements of other slots give it, is no replica.
            whole = [other.shape for (parameter, _), other in slots.items() if parameter == place[0] and is_cut(other)]
            named = stripped_names([place[0]])[place[0]]
            check_shapes({place: tensor}, {named: max(whole, key=math.prod)} if whole else {}, ranks[0].path.parent)
            raise
    return slots


def _without_placements(ranks: Sequence[RankEntries]) -> set[tuple[str, str]]:
    """The parameters and slots of tensors of which the files say nothing but their shape."""
    held = (item for entries in ranks for item in entries.tensors.items())
    return {(str(parameter), slot) for (parameter, slot), local in held if isinstance(local, StoredTensor)}


def _parameters(entries: RankEntries) -> list[Parameter]:
    listed = [parameter for group in entries.groups for parameter in group["params"]]
    return list(dict.fromkeys([*listed, *(parameter for parameter, _ in (*entries.tensors, *entries.values))]))


def _check_groups(ranks: Sequence[RankEntries]) -> list[Note]:
    """Notes about options that differ between ranks. Raises Inconsistent for plain values, or numbers of parameters, that do."""
    first = ranks[0]
    for entries in ranks[1:]:
        for key in entries.values.keys() & first.values.keys():
            if not equal(entries.values[key], first.values[key]):
                raise Inconsistent(
                    f"ranks {first.rank} and {entries.rank} hold different values",
                    tensor=f"state.{key[0]}.{key[1]}",
                    path=entries.path,
                    hint="files from two saves may be mixed",
                )
        numbered = any(isinstance(parameter, int) for parameter in _parameters(first))
        if numbered and [group["params"] for group in entries.groups] != [group["params"] for group in first.groups]:
            raise Inconsistent(
                f"the parameter groups of ranks {first.rank} and {entries.rank} list different parameters",
                path=entries.path,
                hint="files from two saves may be mixed",
            )
    different = [entries.rank for entries in ranks if not _same_options(entries, first)]
    if not different:
        return []
    text = f"the parameter groups of ranks {few([str(rank) for rank in different])} differ from those of rank {first.rank}"
    return [Note("warning", "param-groups-differ", f"{text}, which were used")]


def _same_options(entries: RankEntries, first: RankEntries) -> bool:
    """Whether groups have equal options; which parameters they list may depend on the rank (pipeline stages)."""
    own, others = ([{key: value for key, value in group.items() if key != "params"} for group in e.groups] for e in (entries, first))
    return equal(own, others)


def _united(ranks: Sequence[RankEntries]) -> list[Group]:
    """The groups of all ranks: pipeline stages list parameters of their own."""
    groups = [{**group, "params": list(group["params"])} for group in ranks[0].groups]
    united: list[dict[Parameter, None]] = [dict.fromkeys(group["params"]) for group in groups]
    for entries in ranks[1:]:
        if len(entries.groups) != len(groups):
            raise Inconsistent("the ranks have different numbers of parameter groups", path=entries.path)
        for known, more in zip(united, entries.groups, strict=True):
            known.update(dict.fromkeys(more["params"]))
    return [{**group, "params": list(known)} for group, known in zip(groups, united, strict=True)]


# -- by number -------------------------------------------------------------------------------------------------------


def _of_numbers(
    ranks: Sequence[RankEntries], listed: OptimizerFiles, model: OpenedComponent, shard_order: ShardOrder, notes: Sequence[Note]
) -> Optimizer:
    options = reading_options(model.assets.config, shard_order)
    recorded = recorded_names(ranks[0])
    if recorded is not None:
        return _of_recorded(recorded, ranks, listed, model, options, notes)
    check_order(model.component)
    groups = [[int(parameter) for parameter in group["params"]] for group in ranks[0].groups]
    candidates = candidates_of(model)
    cut = {name: tensor for name, tensor in candidates.items() if is_cut(tensor)}
    if len(groups) == 1 and len(groups[0]) == len(cut):
        candidates = cut
    if len(groups) == 1 and len(groups[0]) == len(candidates):
        # With one name for each number the names come first: they tell whether a tensor is an expert's.
        names: dict[int, str] | None = dict(zip(groups[0], candidates, strict=True))
        slots = _by_name([renamed(entries, names or {}) for entries in ranks], listed, options)
        if not all(belongs(slot, tensor, candidates[name]) for (name, slot), tensor in slots.items()):
            names = None
    else:
        slots = _by_name(ranks, listed, options)
        names = named_by_shapes(slots, candidates, groups)
        slots = {(names[int(parameter)], slot): tensor for (parameter, slot), tensor in slots.items()} if names else {}
    if names is not None:
        own = {name: name for name in names.values()}
        known = _named(slots, renamed(ranks[0], names), own)
        check_some_recorded(names, ranks[0])
        stepped_names = {name for name, _ in slots}
        kept = {number: name for number, name in names.items() if name in stepped_names}
        assumed = assumed_names(kept, model)
        return optimizer_of("by the order of parameters", known, [*notes, *order_notes(assumed, kept)], assumed)
    raise undecided(groups, ranks[0].path)


def _of_recorded(
    names: Mapping[int, str],
    ranks: Sequence[RankEntries],
    listed: OptimizerFiles,
    model: OpenedComponent,
    options: ReadOptions,
    notes: Sequence[Note],
) -> Optimizer:
    check_alike_recorded(names, ranks)
    slots = _by_name([renamed(entries, names) for entries in ranks], listed, options)
    check_recorded(names, slots, ranks[0].path, model)
    own = {name: name for name in names.values()}
    return optimizer_of("by recorded names", _named(slots, renamed(ranks[0], names), own), notes)


# -- FSDP1: flat parameters ------------------------------------------------------------------------------------------
