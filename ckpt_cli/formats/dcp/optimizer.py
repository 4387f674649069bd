"""The optimizer in a DCP folder: states by parameter name, whichever way the keys were nested or flattened."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError, CorruptFile, Unsupported, reading
from ckpt_cli.files.source import Files
from ckpt_cli.formats.dcp.groups import groups_of
from ckpt_cli.formats.dcp.items import ItemReader, assembled
from ckpt_cli.formats.dcp.metadata import Catalog, CatalogTensor, names_in, read_catalog
from ckpt_cli.formats.dcp.state import is_alone, is_optimizer, put, tensor_value, with_lists
from ckpt_cli.formats.optimizer_state import POINT, TRAIN_MODE, Group, Held, NamedState, TrainMode, regrouped
from ckpt_cli.names import check_name, few, plural
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.reading import elements
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.urls import is_remote

Key = tuple[str, str]
"""A parameter's name and a slot."""

LOOKED = 3
"""So many counters of steps are read in each file, and options of so many groups: there may be a group for every parameter."""

PREFIXES = ("model.", "module.")
"""Wrappers that some trainers put around the model; the model's own names tell whether they belong to a name."""


def read_dcp_optimizer(roots: Sequence[Path], files: Files) -> NamedState | None:
    """The optimizer of a folder (of one or several nodes). None if there is none. Raises Unsupported if there are several."""
    catalog = read_catalog(roots, files)
    reader = ItemReader(roots, files)
    found: dict[tuple[str, ...], list[tuple[str, tuple[str, ...], CatalogTensor]]] = {}
    for entry in catalog.tensors.values():
        split = _split(entry.path)
        if split is not None:
            found.setdefault(split[0], []).append((split[1], split[2], entry))
    if not found:
        return None
    if len(found) > 1:
        listed = few([".".join(prefix) for prefix in found])
        raise Unsupported(f"the folder holds several optimizers: {listed}", path=roots[0], hint="extract the state without --optimizer")
    prefix, held = next(iter(found.items()))
    reader.check_files(entry for _, _, entry in held)
    tensors: dict[Key, Tensor] = {}
    values: dict[Key, Any] = {}
    groups: dict[int, Group] = {}
    options: dict[str, dict[str, Any]] = {}
    nested: dict[Key, dict[Any, Any]] = {}
    lists: dict[tuple[int, str], dict[Any, Any]] = {}

    def add(kind: str, rest: tuple[str, ...], keys: Sequence[str | int], value: Any) -> None:
        if kind == "state" and len(rest) > 2:
            put(nested.setdefault(_parameter(rest[:2]), {}), keys[2 - len(rest) :], value)
        elif kind == "state":
            values[_parameter(rest)] = value
        elif len(rest) == 2 and rest[0].isdecimal():
            groups.setdefault(int(rest[0]), {})[rest[1]] = value
        elif len(rest) > 2 and rest[0].isdecimal():
            put(lists.setdefault((int(rest[0]), rest[1]), {}), keys[2 - len(rest) :], value)
        else:
            name, option = _parameter(rest)
            options.setdefault(name, {})[option] = value

    for kind, rest, entry in held:
        with reading(roots[0], tensor=entry.name):
            if kind == "state":
                name, slot = _parameter(rest)
                tensors[check_name(name), slot] = assembled(f"state.{name}.{slot}", entry, reader)
                if len(rest) > 2:
                    add(kind, rest, entry.keys, Held(slot))
            else:
                add(kind, rest, entry.keys, tensor_value(entry, reader))
    for thing in catalog.objects.values():
        split = _split(thing.path)
        if split is not None and split[0] == prefix and thing.stored is not None:
            add(split[1], split[2], thing.keys, reader.value(thing.stored))
    values |= {key: with_lists(inner) for key, inner in nested.items()}
    for (index, option), inner in lists.items():
        groups.setdefault(index, {})[option] = with_lists(inner)
    listed_groups = [groups[index] for index in sorted(groups)] or regrouped(options)
    for group in listed_groups:
        if not isinstance(group.setdefault("params", []), list) or not all(type(name) in (str, int) for name in group["params"]):
            raise CorruptFile("a parameter group of the optimizer lists no parameters", path=roots[0])
    models = groups_of(catalog)
    others = _others(catalog, {id(entry) for group in models[:1] for entry in group.tensors.values()}, reader)
    names = _renamed([name for name, _ in tensors], set(models[0].tensors) if models else set())
    for group in listed_groups:
        group["params"] = [names.get(name, name) for name in group["params"]]
    return NamedState(
        {(names.get(name, name), slot): tensor for (name, slot), tensor in tensors.items()},
        {(names.get(name, name), slot): value for (name, slot), value in values.items()},
        listed_groups,
        others,
    )


def _others(catalog: Catalog, weights: Container[int], reader: ItemReader) -> list[str]:
    """The names of what an optimizer keeps beside its groups and the states of parameters; nothing is empty."""
    tensors = [entry.path for entry in catalog.tensors.values() if id(entry) not in weights and _is_beside(entry.path)]
    things = [thing for thing in catalog.objects.values() if _is_beside(thing.path) and thing.stored is not None]
    return [".".join(path) for path in (*tensors, *(thing.path for thing in things if thing.stored and reader.value(thing.stored) != {}))]


def _is_beside(path: Sequence[str]) -> bool:
    return is_optimizer(path) and not is_alone(path) and _split(path) is None


def train_mode_of(roots: Sequence[Path], files: Files) -> TrainMode | None:
    """Whether a folder holds a schedule-free optimizer in train mode, by the options of its first groups and the names of slots."""
    if not names_in(roots, files, TRAIN_MODE):
        return None
    catalog, reader = read_catalog(roots, files), ItemReader(roots, files)
    stepped = {split[0] for entry in catalog.tensors.values() if (split := _split(entry.path)) and _parameter(split[2])[1] == POINT}
    groups: dict[tuple[tuple[str, ...], str], dict[str, Any]] = {}
    for thing in catalog.objects.values():
        split = _split(thing.path)
        if split is None or split[1] != "param_groups" or split[0] not in stepped or thing.stored is None:
            continue
        name, option = _parameter(split[2])
        if option in (TRAIN_MODE, "betas", "momentum") and ((split[0], name) in groups or len(groups) < LOOKED):
            groups.setdefault((split[0], name), {})[option] = reader.value(thing.stored)
    return TrainMode.of(groups.values())


def step_notes(catalog: Catalog, reader: ItemReader) -> list[Note]:
    """A warning if the states of an optimizer in one file have counted none of the steps that those in another have.

    An item does not record its step, but the counters of parameters are spread over the files. In a store they are not looked at.
    """
    counted: dict[tuple[str, ...], dict[str, list[int]]] = {}
    for entry in catalog.tensors.values():
        split = _split(entry.path)
        if split is None or split[1] != "state" or math.prod(entry.shape) != 1 or _parameter(split[2])[1] != "step":
            continue
        file = next((places[0].file for places in entry.chunks.values()), None)
        if file is None:
            continue  # the metadata says nowhere where it is
        steps = counted.setdefault(split[0], {}).setdefault(file, [])
        if is_remote(reader.path(file)):
            return []
        if len(steps) < LOOKED:
            # What is damaged or missing there is told by whoever needs it.
            with contextlib.suppress(CkptError):
                count = float(elements(assembled(entry.name, entry, reader))[0])
                steps += [int(count)] if count.is_integer() else []
    notes = []
    for by_file in counted.values():
        named = {file: set(steps) for file, steps in by_file.items() if steps}
        commonest = next((step for step, _ in Counter(step for steps in named.values() for step in steps).most_common(1)), None)
        odd_file = next((file for file, steps in named.items() if commonest not in steps), None)
        if commonest is None or odd_file is None:
            continue
        agreeing = next((file for file, steps in named.items() if commonest in steps and steps.isdisjoint(named[odd_file])), None)
        if agreeing is not None:
            text = f"the optimizer has counted {plural(commonest, 'step')} in {agreeing} and {max(named[odd_file]):,} in {odd_file}"
            notes.append(Note("warning", "step-differs", f"{text}: if the files are from different saves, the result mixes them"))
    return notes


def _split(path: Sequence[str]) -> tuple[tuple[str, ...], str, tuple[str, ...]] | None:
    """The prefix of an optimizer's key, "state" or "param_groups", and what follows; flattened keys are one part of the path."""
    if not is_optimizer(path):
        return None
    for index, part in enumerate(path):
        for kind in ("state", "param_groups"):
            # composer puts everything below a key "state".
            if part == kind and index > 0 and is_optimizer(path[:index]):
                return tuple(path[:index]), kind, tuple(path[index + 1 :])
            if part.startswith(f"{kind}."):
                return tuple(path[:index]), kind, (part.removeprefix(f"{kind}."), *path[index + 1 :])
    return None


def _parameter(rest: Sequence[str]) -> Key:
    """Parameter and slot (or option) of what follows "state": parts of the path, or one text in the flattened form."""
    if len(rest) > 1:
        return rest[0], ".".join(rest[1:])
    name, _, last = rest[0].rpartition(".") if rest else ("", "", "")
    return name, last


def _renamed(names: Sequence[str], model: set[str]) -> dict[str, str]:
    """Names without the prefix that the model's own tensors lack."""
    for prefix in PREFIXES:
        short = {name: name.removeprefix(prefix) for name in names}
        if not set(names) <= model and all(n.startswith(prefix) for n in names) and set(short.values()) <= model:
            return short
    return {}
