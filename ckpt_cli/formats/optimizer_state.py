"""The entries of an optimizer's state, as a file has them.

``torch.optim`` writes ``{"state": {parameter: {slot: tensor}}, "param_groups": [{..., "params": [parameter]}]}``, where a parameter
is a number or a name; DCP's flattened form has keys ``state.<name>.<slot>`` and ``param_groups.<name>.<option>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, Unsupported, reading
from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import StoredTensor, TorchFile
from ckpt_cli.formats.rank_files.dtensor import DistributedLocal, Local, LocalReader, ShardedLocal
from ckpt_cli.formats.torch_files.matrices import dimensions_of
from ckpt_cli.names import check_name, few, plural
from ckpt_cli.tensors.plain_values import Unrepresented, ValueReader, equal, to_json
from ckpt_cli.tensors.tensor import Tensor

OPTIMIZER = re.compile(r"optim(izer)?s?(_\w+)?")
"""The key above an optimizer's state: optim, optimizer_0, optimizer_state_dict, ..."""

TRAIN_MODE, POINT = "train_mode", "z"
"""The option of a schedule-free optimizer that says which weights the model holds, and the slot that the others are computed with."""

INSIDE = "."
"""Between a slot and the place in it of a tensor that is one of several there, such as ``Q.0``: slots of files have none."""

Parameter = int | str
Group = dict[str, Any]
"""Options of a parameter group, and its "params"."""


@dataclass(frozen=True, slots=True)
class Held:
    """Stands in a plain value for a tensor that is kept under a slot of its own: ``Q.0`` for the first of the list ``Q``."""

    slot: str


@dataclass(frozen=True, slots=True)
class NamedState:
    """An optimizer whose state is whole and by name: tensors and plain values by (name, slot), and the groups.

    Where a slot has lists or dicts of tensors (SOAP, PSGD, Shampoo), the value of the slot is these with `Held` in place of the tensors.
    ``others`` are names of what the optimizer keeps besides, such as the slow weights of Lookahead.
    """

    tensors: Mapping[tuple[str, str], Tensor]
    values: Mapping[tuple[str, str], Any]
    groups: Sequence[Group]
    others: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class RankEntries:
    """What one rank's file holds: tensors and plain values by parameter and slot, the parameter groups, names of what else there is."""

    rank: int
    path: Path
    tensors: Mapping[tuple[Parameter, str], Local]
    values: Mapping[tuple[Parameter, str], Any]
    groups: Sequence[Group]
    fingerprint: object = None
    others: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TrainMode:
    """A schedule-free optimizer that was saved in train mode: ``betas`` are those of its groups, as far as these say any.

    The weights of the model are then y, at which gradients are taken. Those to be used are x = y.lerp(z, 1 - 1/beta): what ``eval()``
    of such an optimizer makes of them.
    """

    betas: frozenset[float]

    @classmethod
    def of(cls, groups: Iterable[Mapping[Any, Any]]) -> TrainMode | None:
        """What the options of groups say; None if none of them is in train mode."""
        training = [group for group in groups if group.get(TRAIN_MODE) is True]
        return cls(frozenset(beta for group in training if (beta := _beta(group)) is not None)) if training else None


def _beta(group: Mapping[Any, Any]) -> float | None:
    """The first of an optimizer's betas, or its momentum, if it has no betas."""
    betas = group.get("betas")
    beta = betas[0] if isinstance(betas, (tuple, list)) and betas else group.get("momentum")
    return beta if isinstance(beta, float) and 0 < beta < 1 else None


def train_mode_in(file: TorchFile) -> TrainMode | None:
    """Whether a file of `torch.save` has a schedule-free optimizer in train mode, by its groups and the names of slots."""
    found = []
    for entries in states_of_optimizers(file.root):
        groups, state = entries["param_groups"], as_dict(entries.get("state")) or {}
        if isinstance(groups, list) and any(POINT in (as_dict(slots) or {}) for slots in state.values()):
            found += [options for group in groups if (options := as_dict(group)) is not None]
    return TrainMode.of(found)


def states_of_optimizers(root: Any) -> Iterator[Mapping[Any, Any]]:
    """The states of optimizers with groups: a file's own, or one or several below a key."""
    above = as_dict(root) or {}
    held = [above, *(node for key, node in above.items() if isinstance(key, str) and OPTIMIZER.fullmatch(key))]
    for node in held:
        entries = as_dict(node) or {}
        several = node if isinstance(node, list) else [] if "param_groups" in entries or node is above else entries.values()
        yield from (each for each in map(as_dict, [node, *several]) if each is not None and "param_groups" in each)


def holds_optimizer(path: Path, files: Files) -> bool:
    """Whether a file of `torch.save` has optimizer state, at the top or below a key."""
    above = as_dict(files.parsed(path, TorchFile).root) or {}
    return "param_groups" in above or bool(optimizers_in(above))


def optimizers_in(above: Mapping[Any, Any]) -> list[str]:
    """The keys of a file under which optimizers are, by their names: settings are no state (``optimizer_name``, ``optim_args``)."""
    return [key for key, node in above.items() if isinstance(key, str) and OPTIMIZER.fullmatch(key) and not _is_setting(node)]


def _is_setting(node: object) -> bool:
    """Whether a node is plain, a single number, or a dict of what is plain."""
    entries = as_dict(node)
    if entries is None:
        return isinstance(node, (str, int, float)) or dimensions_of(node) == 0
    return bool(entries) and all(value is None or isinstance(value, (str, int, float)) for value in entries.values())


def _optimizer_in(above: Mapping[Any, Any]) -> str | None:
    """The key of the only optimizer of a file; None if there is none. Raises Unsupported if there are several."""
    keys = optimizers_in(above)
    own = {id(above[key]): key for key in reversed(keys) if "param_groups" in (as_dict(above[key]) or {})}
    if len(own) > 1:
        listed = few([key for key in keys if key in own.values()])
        raise Unsupported(f"the file holds several optimizers: {listed}", expected="one optimizer", hint="leave out --optimizer")
    return next(iter((*own.values(), *keys)), None)


def read_entries(rank: int, path: Path, files: Files) -> RankEntries:
    """The entries of one file; the state may lie below a key of its own.

    Raises CorruptFile if it is not an optimizer's, Unsupported if it is that of several.
    """
    file = TorchFile(files.source(path))
    with reading(path):
        root = file.root
        above = as_dict(root) or {}
        key = _optimizer_in(above) if "state" not in above else None
        root = root if key is None else above[key]
        root = root[0] if isinstance(root, list) and len(root) == 1 else root
        entries = as_dict(root)
        _refuse_several(root)
        if entries is None:
            raise CorruptFile("the file holds no optimizer state", expected='a dict with "state" and "param_groups"')
        values = ValueReader(file)
        flattened = any(isinstance(key, str) and key.startswith(("state.", "param_groups.")) for key in entries)
        state, groups = _flattened(entries, values) if flattened else _nested(entries, values)
        _check_parameters(state, groups)
        reader = LocalReader(file, rank)
        tensors: dict[tuple[Parameter, str], Local] = {}
        plain: dict[tuple[Parameter, str], Any] = {}
        slots = ValueReader(file, reader.read)
        for (parameter, slot), node in state.items():
            with reading(path, tensor=f"state.{parameter}.{slot}"):
                held: dict[str, Local] = {}
                value = parted(slots.read(node), slot, held)
            tensors |= {(parameter, place): local for place, local in held.items()}
            if value != Held(slot):
                plain[parameter, slot] = value
        return RankEntries(rank, path, tensors, plain, groups, file.fingerprint, _others(entries, flattened))


def _others(entries: Mapping[Any, Any], flattened: bool) -> list[str]:
    """The names of what an optimizer keeps beside its groups and the states of parameters; nothing is empty."""
    known = ("state.", "param_groups.") if flattened else ("state", "param_groups")
    held = {str(key): node for key, node in entries.items() if node is not None and as_dict(node) != {} and node not in ([], ())}
    return [key for key in held if not (key.startswith(known) if flattened else key in known)]


def parted(value: Any, place: str, held: dict[str, Any]) -> Any:
    """A value with `Held` for each tensor in it; ``held`` gets these under their places, which begin with ``place``.

    Raises CorruptFile if two of them have one place: keys may be numbers, or have dots.
    """
    if isinstance(value, (StoredTensor, DistributedLocal, ShardedLocal, Tensor)):
        if place in held:
            raise CorruptFile(f"a state of the optimizer has a name that cannot be told from others: {place[:100]!r}")
        held[place] = value
        return Held(place)
    if isinstance(value, dict):
        # What is below a key that is lost is lost with it.
        return {k: None if isinstance(k, Unrepresented) else parted(v, f"{place}{INSIDE}{k}", held) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(parted(item, f"{place}{INSIDE}{index}", held) for index, item in enumerate(value))
    return value


def is_inside(slot: str) -> bool:
    """Whether a slot is a place in a list or a dict of tensors, which need not have the shape of the parameter."""
    return INSIDE in slot


def _refuse_several(root: Any) -> None:
    """Raise Unsupported for a list of optimizers, or a dict of lists of them, as torchao's CPUOffloadOptimizer writes."""
    above = as_dict(root)
    lists = [root] if above is None else [] if "param_groups" in above else list(above.values())
    several = [each for held in lists if isinstance(held, list) for each in held if "param_groups" in (as_dict(each) or {})]
    if several:
        raise Unsupported(
            f"the file holds the states of {plural(len(several), 'optimizer')}, each with numbers of its own: nothing tells whose they are",
            expected='one optimizer: a dict with "state" and "param_groups"',
            hint="leave out --optimizer",
        )


def numbered_entries(state: NamedState, path: Path) -> RankEntries | None:
    """The plain values and groups of a state whose parameters are numbers (as text in its names); None if they are names.

    Raises CorruptFile if numbers and names are mixed, or if a state belongs to no group.
    """
    listed = [parameter for group in state.groups for parameter in group["params"]]
    keys = [*(key for key in state.tensors if not is_inside(key[1])), *state.values]
    digits = all(name.isascii() and name.isdecimal() for name, _ in keys)
    if not any(type(parameter) is int for parameter in listed) and (listed or not keys or not digits):
        return None
    if not digits or not all(type(parameter) is int for parameter in listed):
        raise CorruptFile("the optimizer's parameters are numbers and names")
    numbers: dict[tuple[Parameter, str], Any] = {(int(name), slot): None for name, slot in keys}
    if len(numbers) < len(keys):
        raise CorruptFile("the optimizer has two states of one parameter")
    _check_parameters(numbers, state.groups)
    return RankEntries(0, path, {}, {(int(name), slot): value for (name, slot), value in state.values.items()}, state.groups)


def _check_parameters(state: Mapping[tuple[Parameter, str], Any], groups: Sequence[Group]) -> None:
    """Every state must belong to a parameter that one group lists, and all parameters be numbers or all names."""
    listed = [parameter for group in groups for parameter in group["params"]]
    known = set(listed)
    if len(known) < len(listed):
        raise CorruptFile("a parameter is in two groups of the optimizer")
    if len({type(parameter) for parameter in listed}) > 1:
        raise CorruptFile("the optimizer's groups list numbers and names")
    if not listed and any(isinstance(parameter, int) for parameter, _ in state):
        raise CorruptFile("the optimizer has numbered states and no parameter groups")
    mixed = next((f"{parameter}.{slot}" for parameter, slot in state if "\0" in f"{parameter}{slot}"), None)
    if mixed is not None:
        raise CorruptFile(f"a state of the optimizer has a name that cannot be told from others: {mixed[:100]!r}")
    dotted = next((slot for _, slot in state if INSIDE in slot), None)
    if dotted is not None:
        raise Unsupported(
            f"the optimizer calls a state {dotted[:100]!r}: with a dot in it, it cannot be told from a tensor in a list or dict",
            expected="names such as exp_avg (torchrec's have the name of a table in front)",
            hint="leave out --optimizer",
        )
    stray = next((parameter for parameter, _ in state if parameter not in known), None) if listed else None
    if stray is not None:
        raise CorruptFile(f"the optimizer has a state of parameter {str(stray)[:100]}, which no group lists")


def _nested(entries: Mapping[Any, Any], values: ValueReader) -> tuple[dict[tuple[Parameter, str], Any], list[Group]]:
    state, groups = as_dict(entries.get("state")), entries.get("param_groups")
    if state is None or not isinstance(groups, list):
        raise CorruptFile("the file holds no optimizer state", expected='a dict with "state" and "param_groups"')
    found: dict[tuple[Parameter, str], Any] = {}
    for parameter, slots in state.items():
        held = as_dict(slots)
        if type(parameter) not in (int, str) or held is None:
            raise CorruptFile("an entry of the optimizer's state belongs to no parameter")
        found |= {(parameter, check_name(slot)): node for slot, node in held.items()}
    read = []
    for group in groups:
        options = values.read(group)
        if not isinstance(options, dict) or not isinstance(options.get("params"), list):
            raise CorruptFile("a parameter group lists no parameters")
        if not all(type(parameter) in (int, str) for parameter in options["params"]):
            raise CorruptFile("a parameter group lists something that is neither a number nor a name")
        read.append(options)
    return found, read


def _flattened(entries: Mapping[Any, Any], values: ValueReader) -> tuple[dict[tuple[Parameter, str], Any], list[Group]]:
    state: dict[tuple[Parameter, str], Any] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, node in entries.items():
        kind, _, rest = check_name(key).partition(".")
        name, _, last = rest.rpartition(".")
        if kind == "state" and name:
            state[name, last] = node
        elif kind == "param_groups" and name:
            options.setdefault(name, {})[last] = values.read(node)
    return state, regrouped(options)


def regrouped(options: Mapping[str, Mapping[str, Any]]) -> list[Group]:
    """Parameter groups of options that are given per parameter: parameters with equal options are one group."""
    groups: list[Group] = []
    # Equal settings have one text, so that each is compared with few: there may be a group for every parameter.
    alike: dict[str, list[tuple[dict[str, Any], Group]]] = {}
    for name, own in options.items():
        settings = {key: value for key, value in own.items() if key != "params"}
        candidates = alike.setdefault(json.dumps(to_json(settings), sort_keys=True), [])
        same = next((group for known, group in candidates if equal(known, settings)), None)
        if same is None:
            groups.append({**settings, "params": [name]})
            candidates.append((settings, groups[-1]))
        else:
            same["params"].append(name)
    return groups
