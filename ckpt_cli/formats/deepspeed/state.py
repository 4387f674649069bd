"""What a DeepSpeed save holds besides its model: counters, scheduler, loss scale, the optimizer by parameter, and the caller's own state.

What a caller passes as ``client_state`` lies in the dict of the model states, beside ``module``, as in a trainer's single file: the state
dicts in it (averages of the weights, a teacher) are found as in one.
"""

from __future__ import annotations

from typing import Any

from ckpt_cli.errors import Gap, Inconsistent, Unsupported, reading
from ckpt_cli.files.source import Files
from ckpt_cli.formats.assembly import RankState, assemble
from ckpt_cli.formats.base import Match, RankValues, ReadOptions
from ckpt_cli.formats.deepspeed.flat_tensors import tensor_of
from ckpt_cli.formats.deepspeed.model_states import MODULE, WEIGHTS, ModelStates
from ckpt_cli.formats.deepspeed.optimizer_states import FP32
from ckpt_cli.formats.deepspeed.partitions import MIXED
from ckpt_cli.formats.deepspeed.save import Save
from ckpt_cli.formats.deepspeed.stage_0 import stage_0_optimizer
from ckpt_cli.formats.deepspeed.universal import universal_optimizer
from ckpt_cli.formats.deepspeed.weights import check_agreement, slot_tensors, stored_weights
from ckpt_cli.formats.optimizer_state import Group, NamedState
from ckpt_cli.formats.placeholders import placeholders
from ckpt_cli.formats.rank_files.dtensor import LocalReader
from ckpt_cli.formats.torch_files.counters import notes_of_counters
from ckpt_cli.formats.torch_files.groups import FileGroup, chosen_group, file_groups, notes_of_group, without_averages
from ckpt_cli.formats.torch_files.state_dict import left_out_notes, read_state
from ckpt_cli.formats.torch_files.way_down import Way
from ckpt_cli.names import few, plural
from ckpt_cli.tensors.component import Component, Leaf, Note
from ckpt_cli.tensors.plain_values import ValueReader, equal
from ckpt_cli.tensors.tensor import Tensor

MAIN = "model"


def training_values(save: Save) -> dict[str, Any]:
    """Everything in the model states that speaks neither of weights nor of the setting, and the loss scale, as values."""
    state = _values(save.first)
    for mp in list(save.models)[1:]:
        # Each stage or rank of the model may have been given its own: what differs from the first one's has the rank behind its name.
        others = _values(save.model_of(mp))
        state |= {f"{key}_mp_rank_{mp:02d}": value for key, value in others.items() if not equal(value, state.get(key))}
    for ranks in save.optimizers.values():
        return {**state, **{key: value for key, value in ranks[0].scaling.items() if key not in state}}
    return state


def own_values(save: Save) -> dict[int, RankValues]:
    """What data parallel ranks were given that differs from rank to rank, at stage 3, where each has model states; empty if none."""
    ranks = next(iter(save.models.values()))
    if len(save.models) > 1 or len(ranks) < 2:
        return {}
    held = {rank: _values(states) for rank, states in ranks.items()}
    first = held[min(held)]
    names = dict.fromkeys(key for own in held.values() for key in own)
    differing = [key for key in names if not all(key in own and equal(own[key], first.get(key)) for own in held.values())]
    if not differing:
        return {}
    return {
        rank: RankValues({key: own[key] for key in differing if key in own}, dict.fromkeys(differing, ranks[rank].path))
        for rank, own in held.items()
    }


def _values(states: ModelStates) -> dict[str, Any]:
    """What a file of model states has of training state, as values."""
    reader = ValueReader(states.file)
    with reading(states.path):
        kept = without_averages({**_given(states), MODULE: {}})
        return {str(key): reader.read(node) for key, node in kept.items() if node is not None}


def written_by(save: Save) -> int | None:
    """How many ranks wrote the save: data parallel ones, times those that share a model (in a pipeline, too)."""
    sizes = [save.first.number(name) for name in ("dp_world_size", "mp_world_size")]
    return sizes[0] * (sizes[1] or 1) if sizes[0] else None


def client_groups(states: ModelStates) -> tuple[Way, list[FileGroup]]:
    """The model, of which nothing is said here, and the state dicts that the caller kept beside it."""
    way = Way((_given(states), {}), (MODULE,))
    return way, [FileGroup(MAIN, ""), *(group for group in file_groups(way, MAIN) if group.name != MAIN)]


def client_notes(save: Save) -> list[Note]:
    """Notes about what is beside the model: other state dicts, and matrices that are left out."""
    way, groups = client_groups(save.first)
    return notes_of_group(save.first.path.name, way, groups, groups[0])


def client_component(match: Match, save: Save, options: ReadOptions) -> Component:
    """A state dict that the caller kept. Ranks that have one of this name must have the same, which is compared before it is written.

    Raises Gap for one of the placeholders that stage 3 leaves, and what reading a state dict raises.
    """
    states: list[RankState] = []
    notes: list[Note] = []
    leaves: tuple[Leaf, ...] = ()
    for held in (held for ranks in save.models.values() for held in ranks.values()):
        way, groups = client_groups(held)
        group = next((group for group in groups if group.name == match.group), None)
        if group is None:
            continue
        with reading(held.path):
            reader = LocalReader(held.file, len(states))
            tensors, leaves = read_state(chosen_group([group], None).entries, reader, held.path)
            empty = placeholders({name: local.shape for name, local in tensors.items()}) if save.is_stage_3 else []
            if empty:
                text = f"{group.key} has empty placeholders in place of weights, and no other file holds them"
                hint = "average the gathered parameters (deepspeed.zero.GatheredParameters) before saving"
                raise Gap(text, tensor=empty[0], hint=hint)
            notes += notes_of_counters(group.counters, reader, held.path)
        states.append(RankState(len(states), held.path, tensors))
        notes += notes_of_group(held.path.name, way, groups, group)
    assembled = assemble(states, len(states), (), options)
    return Component(
        name=match.component,
        format=match.format,
        root=match.root,
        tensors=assembled.tensors,
        files=tuple(state.path for state in states),
        leaves=leaves,
        notes=(*dict.fromkeys(notes), *assembled.notes, *left_out_notes(leaves)),
        writer=save.writer,
        step=save.first.number("global_steps"),
    )


def _given(states: ModelStates) -> dict[Any, Any]:
    """What speaks neither of weights nor of the setting: counters, and what the caller gave."""
    return {key: node for key, node in states.entries.items() if key not in WEIGHTS}


def named_optimizer(save: Save, files: Files) -> NamedState | None:
    """The optimizer by parameter. None if there is none. Raises Undecidable for one whose parameters cannot be told."""
    if save.names.parameters:
        return universal_optimizer(save, files)
    if not save.optimizers:
        return None if save.is_partitioned else stage_0_optimizer(save, files)
    odd = sorted({slot for held in save.groups.values() for group in held for p in group.parameters for slot in p.odd})
    if odd:
        text = f"{few(odd, 3)}: the optimizer keeps something else than a number per element, which only the library that wrote it can read"
        raise Unsupported(text, path=next(iter(save.optimizers.values()))[0].path, hint="leave out --optimizer")
    if not save.is_stage_3:
        check_agreement(slot_tensors(save), stored_weights(save), save)
    _check_slots(save)
    slots = dict.fromkeys(slot for held in save.groups.values() for group in held for p in group.parameters for slot in p.ranges)
    tensors: dict[tuple[str, str], Tensor] = {}
    for slot in slots:
        if slot != FP32:
            tensors |= {(name, slot): tensor for name, tensor in slot_tensors(save, slot).items()}
    values: dict[tuple[str, str], Any] = {}
    groups: list[Group] = []
    for held in save.groups.values():
        for index, group in enumerate(held):
            names = [parameter.name for parameter in group.parameters]
            if index < len(groups):
                groups[index]["params"] = list(dict.fromkeys([*groups[index]["params"], *names]))
            else:
                groups.append({**group.options, "params": names})
            for parameter in group.parameters:
                for slot, stored in parameter.scalars.items():
                    tensors.setdefault((parameter.name, slot), tensor_of(f"state.{parameter.name}.{slot}", stored))
                for slot, value in parameter.values.items():
                    values.setdefault((parameter.name, slot), value)
    return NamedState(tensors, values, groups)


def _check_slots(save: Save) -> None:
    """Raise Inconsistent if the optimizer keeps less of a group in one stage or rank of the model than in another.

    Those of one stage are compared where they are read. A group that was never trained has no state.
    """
    first: dict[int, tuple[int, set[str]]] = {}
    for mp, held in save.groups.items():
        for index, group in enumerate(held):
            kept = {slot for p in group.parameters[:1] for slot in (*p.ranges, *p.scalars, *p.values)} - {FP32}
            other, theirs = first.setdefault(index, (mp, kept)) if kept else (mp, kept)
            if kept != theirs:
                lacks, has = (mp, other) if theirs - kept else (other, mp)
                path, slots = save.optimizers[lacks][0].path, few(sorted(kept ^ theirs))
                text = f"the optimizer keeps {slots} of group {index} in model parallel rank {has}, and not in rank {lacks}"
                raise Inconsistent(text, path=path, expected="one optimizer for all parts of the model", hint=MIXED)


def steps_of_optimizer(save: Save) -> list[Note]:
    """A warning if the optimizer has counted other steps than the model states. (That its ranks agree is checked where they are read.)"""
    step = next((ranks[0].step for ranks in save.optimizers.values()), None)
    steps, skipped = save.first.number("global_steps"), save.first.number("skipped_steps") or 0
    if step is not None and steps is not None and step != steps - skipped:
        counted = plural(int(step), "step") if step.is_integer() else f"{step:g} steps"
        text = f"the optimizer has counted {counted}, {save.first.path.name} says {steps - skipped}"
        return [Note("warning", "step-differs", f"{text}: they may be of different saves, or the optimizer was started anew")]
    return []
