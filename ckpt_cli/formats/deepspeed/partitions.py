"""From the partitions of all ranks to parameters: where each lies in the flat vectors. Pure integers, no I/O.

Stages 1 and 2 and BF16_Optimizer, for the n_i elements of the parameters of a group and the gaps a_i behind them
(``parameter_alignment``)::

    total = sum(n_i + a_i)         part = 2 * ceil(total / (2 * ranks))         parameter i begins at sum(n_j + a_j for j < i)

The vectors of the ranks, each of ``part`` elements, make one line; what is behind ``total`` is cut off (BF16_Optimizer keeps it).
Stage 3: every parameter is cut into ``ceil(n / ranks)`` elements per rank, and a vector holds these one after the other.

Source: DeepSpeed 0.14 to 0.19, ``runtime/zero/stage_1_and_2.py``, ``stage3.py`` and ``runtime/bf16_optimizer.py``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_cli.boxes import Shape
from ckpt_cli.errors import Inconsistent, MissingShard, MixedWorldSizes, reading
from ckpt_cli.files.folders import is_folder
from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.files.torch_file import StoredTensor
from ckpt_cli.formats.assembly import ranks_of
from ckpt_cli.formats.deepspeed.model_states import ModelStates
from ckpt_cli.formats.deepspeed.optimizer_states import FP32, OptimizerStates
from ckpt_cli.formats.flat import FlatRange, ranges_of_line
from ckpt_cli.tensors.plain_values import equal

EXPERT_NAME = re.compile(r"(?P<before>.*\.deepspeed_experts\.)(?P<number>[0-9]{1,6})(?P<after>\..*)", re.ASCII)
MIXED = "files from two saves may be mixed"
SWAPPED = "offloaded_tensors"
"""Where DeepSpeed puts copies of its swap files, in the folder of a step."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in flat vectors: its shape (None if only another file says it) and its ranges by slot, out of those of ``ranks`` ranks.

    ``scalars`` and ``values`` are one for all parameters of its group; ``odd`` are slots that do not hold a number per element.
    """

    name: str
    numel: int
    shape: Shape | None
    ranges: Mapping[str, tuple[FlatRange, ...]]
    ranks: int
    scalars: Mapping[str, StoredTensor]
    values: Mapping[str, Any]
    odd: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A group of the optimizer: its options, and its parameters in the order of storage."""

    options: Mapping[str, Any]
    parameters: tuple[Parameter, ...]


def parameter_groups(model: ModelStates, ranks: Sequence[OptimizerStates], experts: Mapping[str, int]) -> tuple[ParameterGroup, ...]:
    """The parameters of one model parallel rank. ``ranks`` are its data parallel ranks, in order; ``experts`` is `expert_counts`.

    Raises MissingShard, MixedWorldSizes, Inconsistent, each with the file.
    """
    first = ranks[0]
    for other in ranks[1:]:
        with reading(other.path):
            _check_alike(first, other)
    with reading(first.path):
        placed = _by_slices(first, ranks) if model.groups is None else _by_shapes(model, model.groups, experts, ranks)
        names = [parameter.name for group in placed for parameter in group]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise Inconsistent("the optimizer holds this parameter twice", tensor=twice, hint=MIXED)
    return tuple(
        ParameterGroup(options, tuple(parameter for member in members for parameter in placed[member]))
        for options, members in zip(first.options, first.members, strict=True)
    )


def _check_alike(first: OptimizerStates, other: OptimizerStates) -> None:
    for what, mine, its in (
        ("the ZeRO stage", first.stage, other.stage),
        ("the number of partitions", len(first.partitions), len(other.partitions)),
        ("the number of ranks", first.counts, other.counts),
        ("the gaps between parameters", first.alignments, other.alignments),
        ("the parameter groups", first.members, other.members),
        ("the step that the optimizer has counted", first.step, other.step),
    ):
        if mine != its:
            raise Inconsistent(f"{what} differs from that in {first.path.name}", hint=MIXED)
    if not equal(list(first.options), list(other.options)) or not equal(first.scaling, other.scaling):
        raise Inconsistent(f"options of the optimizer, or the loss scale, differ from those in {first.path.name}", hint=MIXED)
    for mine_, its_ in zip(first.partitions, other.partitions, strict=True):
        if {slot: vector.dtype for slot, vector in mine_.vectors.items()} != {slot: vector.dtype for slot, vector in its_.vectors.items()}:
            raise Inconsistent(f"dtypes or slots of the optimizer differ from those in {first.path.name}", hint=MIXED)


def _check_ranks(count: int, ranks: Sequence[OptimizerStates]) -> None:
    """The files of all ranks among which a group is partitioned, and no others."""
    there = {states.rank for states in ranks}
    name = ranks[0].path.name
    if len(ranks) > count or max(there) >= count:
        raise MixedWorldSizes(
            f"{name} was written by {count} ranks, and there are files of {max(len(ranks), max(there) + 1)}",
            path=ranks[0].path.parent,
            expected="files of one save",
            hint="files of an older save by more ranks may be left in the folder: move them to another one",
        )
    missing = tuple(itertools.islice((rank for rank in range(count) if rank not in there), 13))
    if missing:
        wanted = re.sub(r"zero_pp_rank_[0-9]+_", f"zero_pp_rank_{missing[0]}_", name)
        few = missing[:12]
        subject = ranks_of(few, count) if len(missing) <= 12 else f"ranks {', '.join(map(str, few))} and more of {count} are"
        raise MissingShard(f"{subject} missing", path=ranks[0].path.parent, expected=str(ranks[0].path.parent / wanted))


# -- by the shapes in the model states -----------------------------------------------------------------------------------


def _by_shapes(
    model: ModelStates, groups: Sequence[Mapping[str, Shape]], experts: Mapping[str, int], ranks: Sequence[OptimizerStates]
) -> list[list[Parameter]]:
    first = ranks[0]
    if len(groups) != len(first.partitions):
        text = f"the optimizer has {len(first.partitions)} partitions, param_shapes of the model states has {len(groups)}"
        raise Inconsistent(text, hint=MIXED)
    placed = []
    for index, shapes in enumerate(groups):
        count = first.counts[index]
        if first.stage == 3:
            _check_ranks(count, ranks)
            placed.append(list(_partitioned(shapes, index, ranks)))
        elif any(EXPERT_NAME.fullmatch(name) for name in shapes) and count < len(ranks):
            placed.append(list(_of_experts(shapes, index, experts, _blocks(count, ranks, data_before_experts(model)))))
        else:
            _check_ranks(count, ranks)
            placed.append(list(_on_line(shapes, index, ranks)))
    return placed


def _on_line(shapes: Mapping[str, Shape], index: int, ranks: Sequence[OptimizerStates]) -> Iterator[Parameter]:
    """Stages 1 and 2: the vectors of all ranks are one line."""
    gaps = ranks[0].alignments[index] if ranks[0].alignments is not None else (0,) * len(shapes)
    if len(gaps) != len(shapes):
        raise Inconsistent(f"group {index} has {len(shapes)} parameters, and gaps behind {len(gaps)}", hint=MIXED)
    total = sum(math.prod(shape) for shape in shapes.values()) + sum(gaps)
    part = 2 * -(-total // (2 * len(ranks)))
    lengths: list[set[int]] = []
    for place, states in enumerate(ranks):
        needed = min(max(total - place * part, 0), part)
        lengths.append({needed, part})
        _check_lengths(states, index, {needed, part}, total)
        length = states.partitions[index].vectors[FP32].numel
        if states.paddings is not None and states.paddings[index] not in (part - length, part - needed):
            raise Inconsistent(f"group_paddings says {states.paddings[index]}, and {part - length} elements are missing", path=states.path)
    start = 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        count = math.prod(shape)
        slots = _slots(index, ranks, lengths)
        ranges = {slot: ranges_of_line(start, count, part, [states.partitions[index].vectors[slot] for states in ranks]) for slot in slots}
        yield _parameter(name, count, shape, ranges, index, ranks)
        start += count + gap


def _blocks(count: int, ranks: Sequence[OptimizerStates], data_first: bool) -> list[Sequence[OptimizerStates]]:
    """The ranks among which a group of experts is partitioned, by the number of the experts that they hold."""
    if len(ranks) % count or {states.rank for states in ranks} != set(range(len(ranks))):
        raise MissingShard(
            f"experts are partitioned among {count} ranks each, and there are files of {len(ranks)} ranks",
            path=ranks[0].path.parent,
            expected="the files of all ranks",
        )
    blocks = len(ranks) // count
    return [ranks[block * count : (block + 1) * count] if data_first else ranks[block::blocks] for block in range(blocks)]


def _of_experts(
    shapes: Mapping[str, Shape], index: int, experts: Mapping[str, int], blocks: Sequence[Sequence[OptimizerStates]]
) -> Iterator[Parameter]:
    """Experts, under the numbers that they have on their rank. Layers of one group may have different numbers of experts."""
    for block, ranks in enumerate(blocks):
        for parameter in _on_line(shapes, index, ranks):
            fields = EXPERT_NAME.fullmatch(parameter.name)
            if fields is None:
                raise Inconsistent("a group of experts holds a parameter of none", tensor=parameter.name)
            of_layer = experts.get(fields["before"], 0)
            local, number = of_layer // len(blocks), int(fields["number"])
            if of_layer % len(blocks) or number >= local:
                text = f"the optimizer holds expert {number} of each of {len(blocks)} ranks, and there are files of {of_layer} experts"
                raise Inconsistent(text, tensor=parameter.name, hint=MIXED)
            yield replace(parameter, name=f"{fields['before']}{block * local + number}{fields['after']}")


def expert_counts(names: Iterable[str]) -> dict[str, int]:
    """How many experts each MoE layer has, by what precedes the number in the names of their tensors."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        if (fields := EXPERT_NAME.fullmatch(name)) is not None:
            numbers.setdefault(fields["before"], set()).add(int(fields["number"]))
    return {before: len(held) for before, held in numbers.items()}


def data_before_experts(model: ModelStates) -> bool:
    """Whether neighbouring ranks hold the same experts; else those do whose numbers have the same remainder."""
    return (as_dict(model.entries.get("ds_config")) or {}).get("use_data_before_expert_parallelism") is True


def _partitioned(shapes: Mapping[str, Shape], index: int, ranks: Sequence[OptimizerStates]) -> Iterator[Parameter]:
    """Stage 3: a part of every parameter on every rank. The padding at the end of a parameter is uninitialised memory."""
    world = len(ranks)
    total = sum(-(-math.prod(shape) // world) for shape in shapes.values())
    for states in ranks:
        _check_lengths(states, index, {total}, total)
    start = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        part = -(-count // world)
        ranges = {
            slot: tuple(
                FlatRange(states.partitions[index].vectors[slot], start, rank * part, min(part, count - rank * part), rank)
                for rank, states in enumerate(ranks)
                if rank * part < count or not rank
            )
            for slot in _slots(index, ranks, [{total}] * world)
        }
        yield _parameter(name, count, shape, ranges, index, ranks)
        start += part


def _check_lengths(states: OptimizerStates, index: int, allowed: set[int], total: int) -> None:
    vector = states.partitions[index].vectors[FP32]
    if vector.numel not in allowed:
        raise Inconsistent(
            f"{FP32} of group {index} has {vector.numel} elements",
            path=states.path,
            expected=f"{' or '.join(map(str, sorted(allowed)))}, as the shapes in the model states say ({total} in all)",
            hint=_offloaded(states.path.parent) if states.stage == 3 and not vector.numel else MIXED,
        )


def _offloaded(folder: Path) -> str:
    """What is said of a group that stage 3 left empty, which it does with what it keeps in swap files."""
    what = (
        f"the weights were offloaded to NVMe ({SWAPPED}/),"
        if is_folder(folder / SWAPPED)
        else "the weights may have been offloaded to NVMe,"
    )
    return f"{what} which is not read: load it with DeepSpeed, and write them with save_16bit_model"


def _slots(index: int, ranks: Sequence[OptimizerStates], lengths: Sequence[set[int]]) -> list[str]:
    """The slots with one float per element. Quantised optimizers keep codes, and scales of other lengths.

    Raises Inconsistent for a slot that fits on some ranks only.
    """
    slots = []
    for slot, vector in ranks[0].partitions[index].vectors.items():
        held = [(states, states.partitions[index].vectors[slot].numel, allowed) for states, allowed in zip(ranks, lengths, strict=True)]
        odd = [states for states, count, allowed in held if count not in allowed]
        if odd and len(odd) < len(held) and vector.dtype.kind == "float":
            raise Inconsistent(f"{slot} of group {index} has another length than on other ranks", path=odd[0].path, hint=MIXED)
        if not odd and vector.dtype.kind == "float":
            slots.append(slot)
    return slots


def _parameter(
    name: str, count: int, shape: Shape | None, ranges: Mapping[str, tuple[FlatRange, ...]], index: int, ranks: Sequence[OptimizerStates]
) -> Parameter:
    own = ranks[0].partitions[index]
    return Parameter(
        name, count, shape, ranges, len(ranks), own.scalars, own.values, tuple(slot for slot in own.vectors if slot not in ranges)
    )


# -- by the slices in the optimizer states -------------------------------------------------------------------------------


def _by_slices(first: OptimizerStates, ranks: Sequence[OptimizerStates]) -> list[list[Parameter]]:
    """BF16_Optimizer without ZeRO, as in pipelines: no shapes, but every rank lists the ranges of its vector."""
    placed = []
    for index, count in enumerate(first.counts):
        _check_ranks(count, ranks)
        slots = _slots(index, ranks, [{states.partitions[index].vectors[FP32].numel} for states in ranks])
        slices: dict[str, list[tuple[int, int, int]]] = {}
        for place, states in enumerate(ranks):
            own = states.slices[index]
            end = 0
            for name, (size, start) in sorted(own.items(), key=lambda item: item[1][1]):
                if start < end or start + size > states.partitions[index].vectors[FP32].numel:
                    raise Inconsistent("param_slice_mappings does not fit the partition", path=states.path, tensor=name)
                end = start + size
                slices.setdefault(name, []).append((place, start, size))
        if not slices:
            raise Inconsistent("nothing tells which parameters the partitions hold", expected="param_shapes or param_slice_mappings")
        parameters = []
        for name, held in slices.items():
            ranges: dict[str, tuple[FlatRange, ...]] = {}
            for slot in slots:
                position, listed = 0, []
                for place, start, size in held:
                    listed.append(FlatRange(ranks[place].partitions[index].vectors[slot], start, position, size, place))
                    position += size
                ranges[slot] = tuple(listed)
            parameters.append(_parameter(name, sum(size for _, _, size in held), None, ranges, index, ranks))
        placed.append(parameters)
    return placed
