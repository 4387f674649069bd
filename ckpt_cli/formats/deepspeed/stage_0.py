"""Saves without partitions (stage 0): the optimizer's state lies beside the module, and its fp32 weights have no names.

In bf16 and fp16 training DeepSpeed (``runtime/fp16/unfused_optimizer.py``) keeps ``fp32_groups``: the fp32 weights of each parameter group
in the order in which the caller passed them. With several groups no file says that order, so a name is found by shape and values: the
module holds the same weights, rounded. With experts, ``expp_rank_E_...`` holds all of it for the experts of rank E.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, Inconsistent, MissingShard, Undecidable, Unsupported, reading
from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.base import WEIGHTS_16
from ckpt_cli.formats.deepspeed.agreement import agrees
from ckpt_cli.formats.deepspeed.flat_tensors import bytes_of, tensor_of
from ckpt_cli.formats.deepspeed.model_states import check_stem
from ckpt_cli.formats.deepspeed.partitions import EXPERT_NAME, expert_counts
from ckpt_cli.formats.deepspeed.save import Save
from ckpt_cli.formats.deepspeed.weights import stored_weights
from ckpt_cli.formats.optimizer_state import Group, NamedState
from ckpt_cli.names import few, plural
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import same_after_cast, same_values
from ckpt_cli.tensors.plain_values import ValueReader
from ckpt_cli.tensors.tensor import Tensor

CERTAIN = 8
"""How many parameters must fit at one place only, for the order to be proved."""

EXPERT_GROUP = re.compile(r"ep_size_(?P<size>[0-9]{1,6})", re.ASCII)
"""How DeepSpeed calls a group of experts."""

SMALL = 1 << 16
"""Elements up to which all are compared; of larger tensors samples are enough to tell them apart."""


@dataclass(slots=True)
class Masters:
    """The fp32 weights by name, and ``places``: (file, group, position) -> name. ``doubtful`` are names that values do not tell."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    is_flat: bool = False
    is_lost: bool = False
    places: dict[tuple[Path, int, int], str] = field(default_factory=dict)
    doubtful: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[Note]:
        if self.is_flat:
            text = "the fp32 weights are in vectors without names and sizes (fp32_groups_flat): those of the module were taken"
            return [Note("warning", "no-masters", text)]
        if self.is_lost:
            text = "the optimizer that keeps the fp32 weights lacks them (fp32_groups): those of the training's dtype were taken"
            return [Note("warning", "no-masters", text)]
        if not self.doubtful:
            return []
        text = f"the fp32 weights of {few(self.doubtful, 3)} cannot be told apart: those of the training's dtype were taken"
        return [Note("warning", "nameless-masters", text)]


def optimizer_entries(save: Save, files: Files) -> Sequence[tuple[Path, TorchFile, Mapping[Any, Any]]]:
    """The optimizers beside the module, or those of the ranks of experts. Empty if there are none."""
    found = []
    for path in save.names.expert_optimizer.values() or [save.first.path]:
        file = files.parsed(path, TorchFile)
        with reading(path):
            check_stem(file, path)
            entries = as_dict((as_dict(file.root) or {}).get("optimizer"))
            if entries is not None:
                found.append((path, file, entries))
    return found


def read_masters(save: Save, files: Files) -> Masters:
    """The fp32 weights with their names; none if training was in fp32. Raises CorruptFile."""
    found = Masters()
    stored = {
        name: tensor for name, tensor in stored_weights(save).items() if name not in save.first.buffers and tensor.dtype.kind == "float"
    }
    aliases = set[str]()
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in stored.items():
        if seen.setdefault(bytes_of(tensor), name) != name:
            aliases.add(name)
    stored = {name: tensor for name, tensor in stored.items() if name not in aliases}
    optimizers = optimizer_entries(save, files)
    found.is_flat = any("fp32_groups_flat" in entries for _, _, entries in optimizers)
    blocks = {path: rank for rank, path in save.names.expert_optimizer.items()}
    for path, file, entries in optimizers:
        groups = entries.get("fp32_groups")
        if groups is None:
            # An optimizer without fp32 weights is torch's own state alone.
            found.is_lost |= "optimizer_state_dict" in entries and not found.is_flat
            continue
        with reading(path):
            masters = _masters(file, groups)
            _check_counts(masters, as_dict(entries.get("optimizer_state_dict")) or entries)
            own = _of_block(stored, blocks.get(path, 0), _expert_sizes(optimizers) or {max(blocks.values(), default=0) + 1})
            names = _in_order(masters, own) or _by_values(masters, own, found)
            for (group, position), name in names.items():
                found.places[path, group, position] = name
                found.tensors.setdefault(name, masters[group][position])
    _check_experts(stored, found, save, max(_expert_sizes(optimizers), default=None))
    return found


def _check_experts(stored: Mapping[str, Tensor], found: Masters, save: Save, ranks: int | None) -> None:
    """Every rank of experts has an optimizer of its own: where all are there, experts without fp32 weights are frozen."""
    lacking = [name for name in stored if EXPERT_NAME.fullmatch(name) and name not in found.tensors and name not in found.doubtful]
    held = {_in_all_experts(name) for name in found.tensors}
    partly = next((name for name in lacking if _in_all_experts(name) in held), None)
    there = save.names.expert_optimizer
    missing = next(rank for rank in range(len(there) + 1) if rank not in there)
    if lacking and found.tensors and (ranks is None or missing < ranks):
        wanted = save.root / f"expp_rank_{missing}_mp_rank_00_optim_states.pt"
        text = "the optimizer of the rank that holds this expert is missing, and its fp32 weights with it"
        raise MissingShard(text, path=save.root, tensor=lacking[0], expected=str(wanted))
    if partly is not None:
        text = "no optimizer holds fp32 weights of this expert, and those of others of its layer are there"
        raise Inconsistent(text, path=save.root, tensor=partly, hint=f"--type {WEIGHTS_16} takes those of the module")


def _in_all_experts(name: str) -> tuple[str, str] | None:
    """What the names of one parameter have in common in all experts of a layer; None for a parameter of no expert."""
    fields = EXPERT_NAME.fullmatch(name)
    return None if fields is None else (fields["before"], fields["after"])


def _check_counts(masters: Sequence[Sequence[Tensor]], optimizer: Mapping[Any, Any]) -> None:
    """Raise CorruptFile if the optimizer has other groups, or another number of parameters in one, than there are fp32 weights."""
    listed = optimizer.get("param_groups")
    groups = [as_dict(group) or {} for group in listed] if isinstance(listed, (list, tuple)) else []
    if groups and len(groups) != len(masters):
        text = f"the optimizer has {plural(len(groups), 'group')} of parameters, and fp32 weights of {len(masters)}"
        raise CorruptFile(text, expected="as many of both", hint=f"--type {WEIGHTS_16} takes the weights of the module")
    for held, group in zip(masters, groups, strict=False):
        numbers = group.get("params")
        if isinstance(numbers, (list, tuple)) and len(numbers) != len(held):
            text = f"a group of the optimizer has {plural(len(numbers), 'parameter')}, and {plural(len(held), 'fp32 weight')}"
            raise CorruptFile(text, expected="as many of both", hint=f"--type {WEIGHTS_16} takes the weights of the module")


def _masters(file: TorchFile, groups: object) -> list[list[Tensor]]:
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise CorruptFile("fp32_groups is no list of groups")
    held = []
    for group in groups:
        tensors = [file.tensor(node) for node in group]
        if any(stored is None for stored in tensors):
            raise CorruptFile("fp32_groups holds something that is no tensor")
        held.append([tensor_of("fp32", stored) for stored in tensors if stored is not None])
    return held


def _of_block(stored: Mapping[str, Tensor], block: int, sizes: set[int]) -> dict[str, Tensor]:
    """What the optimizer of one rank of experts holds: the dense part, and its own experts under their global numbers.

    Nothing tells the expert parallelism of each layer where there are several: of such ones every expert may be meant.
    """
    counts, blocks = expert_counts(stored), max(sizes)
    own = {}
    for name, tensor in stored.items():
        fields = EXPERT_NAME.fullmatch(name)
        local = counts[fields["before"]] // blocks if fields is not None and len(sizes) == 1 else 0
        if fields is None or not local or int(fields["number"]) // local == block:
            own[name] = tensor
    return own


def _expert_sizes(optimizers: Sequence[tuple[Path, TorchFile, Mapping[Any, Any]]]) -> set[int]:
    """The numbers of ranks of experts, as the groups of the optimizers are called after them. Empty if they are not."""
    sizes = set()
    for _, _, entries in optimizers:
        groups = (as_dict(entries.get("optimizer_state_dict")) or entries).get("param_groups")
        for group in groups if isinstance(groups, (list, tuple)) else ():
            name = (as_dict(group) or {}).get("name")
            fields = EXPERT_GROUP.fullmatch(name) if isinstance(name, str) else None
            if fields is not None and int(fields["size"]):
                sizes.add(int(fields["size"]))
    return sizes


def _in_order(masters: Sequence[Sequence[Tensor]], own: Mapping[str, Tensor]) -> dict[tuple[int, int], str] | None:
    """One group mostly holds the parameters in the order of the module: if shapes and values agree with that, and prove it.

    Parameters of equal shapes and values fit everywhere, so that most of the others must fit only at their own place.
    """
    if len(masters) != 1 or len(masters[0]) != len(own):
        return None
    pairs = list(zip(masters[0], own.items(), strict=True))
    if not all(_same(master, weight) for master, (_, weight) in pairs):
        return None
    certain = sum(sum(_same(master, weight) for weight in own.values()) == 1 for master in masters[0])
    if certain < max(len(pairs) // 2, min(len(pairs), CERTAIN)):
        return None
    return {(0, position): name for position, (_, (name, _)) in enumerate(pairs)}


def _by_values(masters: Sequence[Sequence[Tensor]], own: Mapping[str, Tensor], found: Masters) -> dict[tuple[int, int], str]:
    left = dict(own)
    names: dict[tuple[int, int], str] = {}
    rivals: list[list[str]] = []
    for index, group in enumerate(masters):
        for position, master in enumerate(group):
            fits = [name for name, weight in left.items() if _same(master, weight)]
            if not fits:
                raise Undecidable(
                    f"fp32 weights of shape {list(master.shape)} are those of no parameter of the module",
                    expected="the weights of the module in fp32",
                    hint="files from two saves may be mixed",
                )
            names[index, position] = fits[0]
            del left[fits[0]]
            if len(fits) > 1:
                rivals.append(fits)
    by_name = {name: masters[index][position] for (index, position), name in names.items()}
    for fits in rivals:
        held = [by_name[name] for name in fits if name in by_name]
        # One that is left without a master cannot be told from a frozen parameter either.
        if len(held) < len(fits) or not all(same_values(held[0], other) for other in held[1:]):
            found.doubtful += [name for name in fits if name not in found.doubtful]
    return {place: name for place, name in names.items() if name not in found.doubtful}


def _same(master: Tensor, weight: Tensor) -> bool:
    if master.shape != weight.shape:
        return False
    return same_after_cast(master, weight) if master.numel <= SMALL else agrees(master, weight)


# -- the state of the optimizer ------------------------------------------------------------------------------------------


def stage_0_optimizer(save: Save, files: Files) -> NamedState | None:
    """The state of torch's optimizer: under names where the fp32 weights have them, else under numbers, in the order of the parameters."""
    optimizers = optimizer_entries(save, files)
    if not optimizers:
        return None
    masters = read_masters(save, files)
    if masters.is_flat:
        raise Unsupported(
            "the optimizer keeps vectors without names or sizes (fp32_groups_flat)", path=save.first.path, hint="leave out --optimizer"
        )
    if masters.doubtful:
        raise Undecidable(
            f"the optimizer's states of {few(masters.doubtful, 3)} cannot be told apart: they have no names", path=save.first.path
        )
    tensors: dict[tuple[str, str], Tensor] = {}
    values: dict[tuple[str, str], Any] = {}
    groups: list[Group] = []
    for path, file, entries in optimizers:
        with reading(path):
            names = {place[1:]: name for place, name in masters.places.items() if place[0] == path}
            if not names and len(optimizers) > 1:
                raise Unsupported("the optimizers of experts have no names in training without fp32 copies", hint="leave out --optimizer")
            _add_state(file, entries, names, tensors, values, groups)
    return NamedState(tensors, values, groups)


def _add_state(
    file: TorchFile,
    entries: Mapping[Any, Any],
    names: Mapping[tuple[int, int], str],
    tensors: dict[tuple[str, str], Tensor],
    values: dict[tuple[str, str], Any],
    groups: list[Group],
) -> None:
    inner = as_dict(entries.get("optimizer_state_dict")) or entries
    state, listed = as_dict(inner.get("state")), inner.get("param_groups")
    if state is None or not isinstance(listed, list):
        raise CorruptFile("the optimizer has no state or no groups")
    reader = ValueReader(file)
    called: dict[int, str] = {}
    for index, node in enumerate(listed):
        options = reader.read(node)
        if not isinstance(options, dict) or not isinstance(options.get("params"), list):
            raise CorruptFile("a parameter group lists no parameters")
        numbers = options["params"]
        own = [names.get((index, position)) for position in range(len(numbers))] if names else numbers
        if any(name is None for name in own):
            raise CorruptFile("the optimizer has more parameters than fp32 weights")
        called |= {number: str(name) for number, name in zip(numbers, own, strict=True)}
        if index < len(groups):
            groups[index]["params"] = list(dict.fromkeys([*groups[index]["params"], *own]))
        else:
            groups.append({**options, "params": list(own)})
    for number, slots in state.items():
        name = called.get(number)
        held = as_dict(slots)
        if name is None or held is None:
            raise CorruptFile("the optimizer has a state of a parameter that no group lists")
        for slot, node in held.items():
            stored = file.tensor(node)
            if stored is not None:
                tensors.setdefault((name, str(slot)), tensor_of(f"state.{name}.{slot}", stored))
            else:
                values.setdefault((name, str(slot)), reader.read(node))
