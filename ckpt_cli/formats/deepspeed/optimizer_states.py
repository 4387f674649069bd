"""A file of DeepSpeed's optimizer states: one rank's partitions of the fp32 weights and of the moments, as flat vectors.

Stages 1 and 2 and BF16_Optimizer: ``single_partition_of_fp32_groups`` (a vector per group) and ``base_optimizer_state`` (torch's state by
group; a list over groups with ``elastic_checkpoint``). Stage 3: ``fp32_flat_groups`` (a vector per *sub-group*) and
``optimizer_state_dict``, whose groups list the sub-groups. BF16_Optimizer has no ``zero_stage``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, reading
from ckpt_cli.files.pickle_nodes import Call, as_dict, attributes
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import StoredTensor, TorchFile
from ckpt_cli.formats.deepspeed.model_states import ModelStates, check_stem
from ckpt_cli.names import check_name
from ckpt_cli.tensors.plain_values import ValueReader

STATE = "optimizer_state_dict"
FP32 = "fp32"
"""The slot of the weights themselves, beside ``exp_avg`` and others."""

STAGE = ("deepspeed.runtime.zero.config", "ZeroStageEnum")
LOSS_SCALERS = ("deepspeed.runtime.fp16.loss_scaler", "LossScaler", "DynamicLossScaler")


@dataclass(frozen=True, slots=True)
class Partition:
    """One rank's vectors of a group (at stage 3 of a sub-group), by slot; ``scalars`` and ``values`` are one for all its parameters."""

    vectors: Mapping[str, StoredTensor]
    scalars: Mapping[str, StoredTensor]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """What the file of one rank holds. ``stage`` is None for BF16_Optimizer.

    ``counts``: ranks among which each group is partitioned; ``paddings``: what the last vector lacks, per group; ``alignments``: gaps
    behind each parameter, per group; ``options``: the parameter groups; ``members``: the partitions of each of them; ``slices``: name ->
    (elements, first element in this rank's vector) per group, only right where parameters were not shuffled.
    """

    rank: int
    path: Path
    stage: int | None
    partitions: tuple[Partition, ...]
    counts: tuple[int, ...]
    paddings: tuple[int, ...] | None
    alignments: tuple[tuple[int, ...], ...] | None
    options: tuple[Mapping[str, Any], ...]
    members: tuple[tuple[int, ...], ...]
    slices: tuple[Mapping[str, tuple[int, int]], ...]
    scaling: Mapping[str, Any]

    @property
    def step(self) -> float | None:
        """What the optimizer has counted: a tensor, or a number beside the moments or in the options. None if it keeps no count."""
        for part in self.partitions:
            if (stored := part.scalars.get("step")) is not None and (number := stored_number(stored)) is not None:
                return number
        counted = (held.get("step") for held in (*(part.values for part in self.partitions), *self.options))
        return next((float(number) for number in counted if isinstance(number, (int, float)) and not isinstance(number, bool)), None)


def stored_number(stored: StoredTensor) -> float | None:
    """The value of a 0-dimensional tensor of torch's default dtype; None for others, and for NaN."""
    if stored.dtype.code != "F32":
        return None
    (value,) = struct.unpack(">f" if stored.swapped else "<f", stored.storage.source.read(stored.offset, 4))
    return float(value) if value == value else None


def read_optimizer_states(path: Path, rank: int, files: Files) -> OptimizerStates:
    """The file of one rank. Raises CorruptFile for anything malformed, Inconsistent for a renamed file."""
    file = files.parsed(path, TorchFile)
    with reading(path):
        check_stem(file, path)
        entries = as_dict((as_dict(file.root) or {}).get(STATE))
        if entries is None:
            raise CorruptFile("this is no file of DeepSpeed's optimizer states", expected=f"a dict with the key {STATE}")
        return _Reader(file, entries).read(rank, path)


class _Reader:
    def __init__(self, file: TorchFile, entries: Mapping[Any, Any]) -> None:
        self.file = file
        self.entries = entries
        self.values = ValueReader(file)

    def read(self, rank: int, path: Path) -> OptimizerStates:
        entries, stage = self.entries, self._stage()
        own = entries.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
        if not isinstance(own, list):
            raise CorruptFile("the file has no partitions of fp32 weights", expected="what DeepSpeed's ZeRO or BF16_Optimizer writes")
        masters = [self._vector(node) for node in own]
        base = entries.get(STATE if stage == 3 else "base_optimizer_state")
        states, options, members = self._base(base, len(masters))
        counts = entries.get("partition_count")
        counts = [counts] * len(masters) if isinstance(counts, int) else counts
        paddings, alignments = entries.get("group_paddings"), entries.get("param_alignment_paddings")
        return OptimizerStates(
            rank,
            path,
            stage,
            tuple(self._partition(master, state) for master, state in zip(masters, states, strict=True)),
            _numbers(counts, len(masters), "partition_count"),
            None if paddings is None else _numbers(paddings, len(masters), "group_paddings"),
            None
            if alignments is None
            else tuple(_numbers(group, None, "param_alignment_paddings") for group in _list(alignments, len(masters))),
            options,
            members,
            _slices(entries, len(masters)),
            self._scaling(),
        )

    def _stage(self) -> int | None:
        node = self.entries.get("zero_stage")
        if node is None:
            return None
        if isinstance(node, Call) and node.is_(*STAGE) and len(node.args) == 1:
            node = node.args[0]
        if node not in (1, 2, 3) or isinstance(node, bool):
            raise CorruptFile("the ZeRO stage is not 1, 2 or 3")
        return int(node)

    def _vector(self, node: object) -> StoredTensor:
        stored = self.file.tensor(node)
        if stored is None or len(stored.shape) != 1:
            raise CorruptFile("a partition is no vector")
        return stored

    def _base(self, base: object, count: int) -> tuple[list[Mapping[Any, Any]], tuple[Mapping[str, Any], ...], tuple[tuple[int, ...], ...]]:
        """The state of each partition, and the options and partitions of each parameter group."""
        plain = tuple((index,) for index in range(count))
        if base is None:
            return [{} for _ in range(count)], ({},) * count, plain
        if isinstance(base, list):
            return [as_dict(state) or {} for state in _list(base, count)], ({},) * count, plain
        held = as_dict(base) or {}
        by_number, groups = as_dict(held.get("state")), held.get("param_groups")
        if by_number is None or not isinstance(groups, list):
            raise CorruptFile("the optimizer has no state or no groups")
        states: list[Mapping[Any, Any]] = [as_dict(by_number.get(index)) or {} for index in range(count)]
        if set(by_number) - set(range(count)):
            raise CorruptFile("the optimizer has states of partitions that are not there")
        options = [self.values.read(group) for group in groups]
        if not all(isinstance(group, dict) for group in options):
            raise CorruptFile("a parameter group of the optimizer is no dict")
        members = tuple(_numbers(group.get("params"), None, "params") for group in options)
        if sorted(index for each in members for index in each) != list(range(count)):
            raise CorruptFile("the groups of the optimizer do not list every partition once")
        return states, tuple({key: value for key, value in group.items() if key != "params"} for group in options), members

    def _partition(self, master: StoredTensor, state: Mapping[Any, Any]) -> Partition:
        vectors, scalars, values = {FP32: master}, {}, {}
        for slot, node in state.items():
            stored = self.file.tensor(node)
            if check_name(slot) == FP32 or "." in slot:
                raise CorruptFile(f"a state of the optimizer is called {slot[:100]}")
            if stored is None:
                values[slot] = self.values.read(node)
            elif len(stored.shape) == 1:
                vectors[slot] = stored
            elif stored.shape == ():
                scalars[slot] = stored
            else:
                raise CorruptFile(f"the state {slot[:100]} of a partition is no vector")
        return Partition(vectors, scalars, values)

    def _scaling(self) -> dict[str, Any]:
        """The loss scale and what belongs to it, as values."""
        found: dict[str, Any] = {}
        node = self.entries.get("loss_scaler")
        if isinstance(node, Call) and node.is_(*LOSS_SCALERS) and node.state is not None:
            found["loss_scaler"] = {name: self.values.read(value) for name, value in attributes(node.state).items()}
            found["loss_scale"] = found["loss_scaler"].get("cur_scale")
        for key in ("dynamic_loss_scale", "overflow", "clip_grad"):
            if key in self.entries:
                found[key] = self.values.read(self.entries[key])
        return found


def _list(node: object, count: int) -> Sequence[Any]:
    if not isinstance(node, (list, tuple)) or len(node) != count:
        raise CorruptFile(f"the optimizer has {count} partitions, and lists others", expected="one entry for each")
    return node


def _numbers(node: object, count: int | None, what: str) -> tuple[int, ...]:
    if not isinstance(node, (list, tuple)) or (count is not None and len(node) != count):
        raise CorruptFile(f"{what} does not fit the partitions")
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in node):
        raise CorruptFile(f"{what} holds something that is not a natural number")
    return tuple(node)


def _slices(entries: Mapping[Any, Any], count: int) -> tuple[Mapping[str, tuple[int, int]], ...]:
    listed = entries.get("param_slice_mappings")
    if listed is None:
        return ({},) * count
    slices = []
    for group in _list(listed, count):
        held = {}
        for name, node in (as_dict(group) or {}).items():
            fields = attributes(node.state) if isinstance(node, Call) and node.state is not None else {}
            held[check_name(name)] = _numbers([fields.get("numel"), fields.get("start")], 2, "param_slice_mappings")
        slices.append({name: (pair[0], pair[1]) for name, pair in held.items()})
    return tuple(slices)


def listed_beside(states: ModelStates) -> dict[str, int] | None:
    """The trained parameters and their elements by the copy of BF16_Optimizer's own state that the model states hold.

    None without one, and where it is only a part: it is that of one data rank, so it lists all where nothing is partitioned.
    """
    entries = as_dict(states.entries.get("optimizer")) or {}
    counts, listed = entries.get("partition_count"), entries.get("param_slice_mappings")
    if not isinstance(listed, list) or counts not in (1, [1] * len(listed)):
        return None
    with reading(states.path):
        return {name: elements for group in _slices(entries, len(listed)) for name, (elements, _) in group.items()}
