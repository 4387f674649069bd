"""The state dicts in one file of ``torch.save``: the model, averages of its weights that a trainer keeps beside it, and others."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_cli.errors import Unsupported
from ckpt_cli.files.pickle_nodes import as_dict, describe
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.rank_files.dtensor import LocalReader
from ckpt_cli.formats.torch_files.average_states import state_of
from ckpt_cli.formats.torch_files.averages import (
    EMA_KEYS,
    MODEL_KEYS,
    NAMELESS,
    averaged_alone,
    is_average,
    named_as,
    named_tensors,
    split_average,
    telling,
)
from ckpt_cli.formats.torch_files.counters import nameless_error, trained_notes
from ckpt_cli.formats.torch_files.masters import masters_beside
from ckpt_cli.formats.torch_files.matrices import OF_OPTIMIZERS, dimensions_of, is_integer, is_optimizer, is_tensor
from ckpt_cli.formats.torch_files.state_dict import holds_storage, is_array
from ckpt_cli.formats.torch_files.swapped import ALGORITHMS, COMPOSER, second_model, swapped_in
from ckpt_cli.formats.torch_files.way_down import SeveralGroups, Way, way_down
from ckpt_cli.formats.training_state_names import is_record_key, is_state_key, is_statistics_key
from ckpt_cli.formats.unused.search import DataSearch, Unused
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

HOLDERS = ("callbacks", "extra_state")
MEANT = ("all", "both", "main", "regular")
"""What ``--type`` gives a meaning of its own."""

OTHER_MODEL = re.compile(
    r"(?!.*(head|proj|projector|projection|layer)s?$)(.+[._-])?(model|ema|average|swa|net|network|module|policy|actor|critic|q|value|reward|ref|reference|target|disc|discriminator|"
    r"student|teacher|loss|lora|adapter|state|best|last|[dg]|net[dg]|gan)([._-].+|_?[0-9]+)?|callbacks|extra_state",
    re.IGNORECASE,
)
"""Keys of models of their own beside the one that is meant. A generator is one only in GANs."""

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True)
class FileGroup:
    """A state dict of a file: ``entries`` by name; ``beside`` are the entries around it, which are not its weights.

    ``node`` is set instead of entries for something that is not a dict; ``why`` is a note for the user. ``known`` is all that
    is in a state dict beside the model, for the notes of the group; ``counters`` are an average's own that tell whether it has begun, and
    ``trained`` is the model of the training that its state holds as well.
    """

    name: str
    key: str
    entries: Mapping[Any, Any] = field(default_factory=dict)
    beside: Mapping[Any, Any] = field(default_factory=dict)
    node: Any = None
    why: str | None = None
    known: Mapping[Any, Any] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)
    trained: Mapping[Any, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its key in the file, and the option that selects it, or what it is instead of a state dict."""
        if self.node is not None:
            return f"{self.key or self.name}, which has no names and is not read ({describe(self.node)})"
        return f"{self.key or self.name} (--type {self.name})"


def groups_of(file: TorchFile, component: str, reader: LocalReader, asked: str | None = None) -> tuple[Way, list[FileGroup]]:
    """The state dicts of a file, the main one first, and the way to that one. Raises CorruptFile, SeveralGroups.

    A component other than "ema" means the model: the group is chosen afterwards, but where nothing tells the main one, which then is the
    one that was ``asked`` for.
    """
    main = "ema" if component == "ema" else "model"
    keys = (*EMA_KEYS, *MODEL_KEYS) if main == "ema" else MODEL_KEYS
    try:
        way = way_down(file.root, keys, reader)
    except SeveralGroups as several:
        if asked in several.averages and several.keys:
            # Whichever of the models is taken first, the average is beside it.
            way = way_down(file.root, keys, reader, several.keys[0])
            groups = file_groups(way, main)
            if any(group.key == asked for group in groups):
                return way, [replace(group, name=asked or group.name) if group.key == asked else group for group in groups]
        if asked not in several.keys:
            raise
        way = way_down(file.root, keys, reader, asked)
        first, *others = file_groups(way, main)
        return way, [replace(first, name=asked), *others]
    return way, file_groups(way, main)


def file_groups(way: Way, component: str) -> list[FileGroup]:
    """The state dicts of a file, the main one first: that of ``component`` ("ema" for a file that is called so)."""
    entries, above = way.entries, way.above
    if component == "ema":
        if named_tensors(entries)[0] is None:
            return [FileGroup(component, "", beside=above, node=entries)]
        return [replace(_of_average(component, "", entries, by_name=True), beside=above)]
    found = _averages(way)
    averages = {key: node for key, (node, _) in found.items()}
    swapped = _of_swapped(way, averages)
    if swapped is not None:
        return swapped
    split = split_average(entries)
    if split is not None:
        counters = telling(split.counters)
        average = FileGroup("ema", "", split.average, above, counters=counters, trained=split.trained)
        return [FileGroup(component, "", split.model, above), average]
    groups: list[FileGroup] = []
    for key, node in averages.items():
        taken = {component, *MEANT, *(group.name for group in groups)}
        own = key if NAME.fullmatch(key) and key not in taken else f"average_{len(groups)}"
        name = "ema" if "ema" not in taken and "ema" in key.lower() else own
        inner, around = named_tensors(node)
        group = _group_beside(name, key, node, named_as(inner, entries) if inner is not None else None, around, by_name=True)
        if any(_is_within(group, other) for other in groups):
            continue  # what a callback keeps and puts into the file as well
        groups.append(replace(group, counters=group.counters or telling(around) or telling(found[key][1])))
    known = {id(node) for each in (entries, *(group.known for group in groups)) for node in each.values()}
    for key, node in _others(way, known):
        taken = {component, *MEANT, *(group.name for group in groups)}
        name = key if NAME.fullmatch(key) and key not in taken else f"other_{len(groups)}"
        groups.append(_group_beside(name, key, node, *named_tensors(node)))
    rest = {key: node for key, node in entries.items() if key not in averages or averages[key] is not node}
    arrays = bool(way.keys) and any(map(is_array, rest.values()))
    if groups and not arrays and not any(holds_storage(node) and not _is_no_model(key) for key, node in rest.items()):
        # The file holds nothing but averages. Arrays under a model's key are a model that cannot be read: nothing takes its place.
        return groups
    if state_of(rest) is not None:
        return [replace(_of_average(component, "", rest), beside=above), *groups]
    if named_tensors(rest)[0] is None and not any(map(is_tensor, rest.values())):
        return [FileGroup(component, "", beside=above, node=rest), *groups]
    return _with_second([FileGroup(component, "", rest, above), *groups], way)


def _is_within(other: FileGroup, group: FileGroup) -> bool:
    """Whether all of another state dict is in this one too."""
    held = {id(node) for node in group.entries.values()}
    return bool(other.entries) and all(id(node) in held for node in other.entries.values())


def _may_be_a_part(other: FileGroup, group: FileGroup) -> bool:
    """Whether a state dict may be a part of the model that lies beside the rest: of no name of a model, and with other names in it.

    Under another of the usual keys of the model it may be the model itself.
    """
    if other.entries and other.key in MODEL_KEYS:
        return True
    if not other.entries or OTHER_MODEL.fullmatch(other.key.rpartition(".")[2]):
        return False
    return set(other.entries).isdisjoint(group.entries)


def _group_beside(
    name: str, key: str, node: Any, inner: Mapping[Any, Any] | None, around: Mapping[Any, Any], *, by_name: bool = False
) -> FileGroup:
    if inner is None:
        return FileGroup(name, key, node=node)
    return replace(_of_average(name, key, inner, by_name=by_name), beside=around, known={**around, **inner})


def _of_average(name: str, key: str, entries: Mapping[Any, Any], *, by_name: bool = False) -> FileGroup:
    """A state dict as the weights in it, if it is the state of an average; ``by_name`` says that it is one, whatever the names in it."""
    state = state_of(entries)
    if state is None:
        return FileGroup(name, key, averaged_alone(entries), counters=telling(entries)) if by_name else FileGroup(name, key, entries)
    return FileGroup(name, key, state.average, counters=telling(state.counters), trained=state.trained)


def unused_beside(way: Way, groups: list[FileGroup], group: FileGroup) -> Unused:
    """What is beside a group, may be needed with it, and belongs to no group of the file."""
    held = [node for each in groups for node in (*each.entries.values(), *each.trained.values(), each.node)]
    own = [*group.entries.values()]
    unused = DataSearch(held, own).unused(group.beside) if group.known else Unused()
    if group is groups[0] or not group.known:
        search = DataSearch([*held, *(node for each in groups for node in each.known.values())], own)
        for level in way.beside:
            unused += search.unused(level)
    return unused


def notes_of_group(name: str, way: Way, groups: list[FileGroup], group: FileGroup) -> list[Note]:
    """Notes about a state dict of the file ``name``: what it is, which others there are, and what is left out beside it."""
    notes = [] if group.why is None else [Note("warning", "averaged", group.why)]
    notes += trained_notes(group.trained)
    unused = unused_beside(way, groups, group)
    others = [other for other in groups[1:] if not _is_within(other, group)] if group is groups[0] else []
    others = [other for other in others if not (is_statistics_key(other.key) and other.key in unused.needed)]
    if doubtful := [other for other in others if _may_be_a_part(other, group)]:
        text = f"{name} also holds tensors of {few([other.title for other in doubtful])}, which are not in this component"
        notes.append(Note("warning", "other-groups", text, tuple(other.name for other in doubtful)))
    if known := [other for other in others if other not in doubtful]:
        text = f"{name} also holds {few([other.title for other in known])}"
        notes.append(Note("info", "other-components", text, tuple(other.name for other in known)))
    if masters := masters_beside((group.beside, *way.beside)) if group is groups[0] else []:
        text = f"{few(masters)} may be the weights in fp32 that the optimizer changes: those of the model were read, as training used them"
        notes.append(Note("info", "masters", text))
    return [*notes, *unused.notes]


def chosen_group(groups: list[FileGroup], name: str | None) -> FileGroup:
    """The group of a name, or the main one. Raises Unsupported for an average that has no names."""
    group = groups[0] if name is None else next((group for group in groups if group.name == name), groups[0])
    if group.node is not None:
        pairs = as_dict(group.node) or {}
        if isinstance(group.node, (list, tuple)) or any(isinstance(pairs.get(key), (list, tuple)) for key in NAMELESS):
            raise nameless_error(group.key or group.name)
        text = f"the average under {group.key or group.name} is {describe(group.node)}, not a state dict"
        raise Unsupported(text, hint="save its state dict")
    return group


def unwrapped(entries: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """A file's entries, with those of the only dict around a model and its state among them: composer's ``state``, a ``checkpoint``.

    Of one that has the name of another, the key of that dict stands before its name.
    """
    around = [key for key, node in entries.items() if isinstance(key, str) and _is_around(key, node)]
    if len(around) != 1 or any(as_dict(entries.get(key)) is not None for key in MODEL_KEYS):
        return entries
    others = {key: node for key, node in entries.items() if key != around[0]}
    inner = as_dict(entries[around[0]]) or {}
    return {**others, **{key if key not in others else f"{around[0]}.{key}": node for key, node in inner.items()}}


def _is_around(key: str, node: Any) -> bool:
    """Whether a dict holds a model under a usual key, with something else beside it."""
    inner = as_dict(node) or {}
    return len(inner) > 1 and not is_average(key, node) and not is_state_key(key) and any(as_dict(inner.get(key)) for key in MODEL_KEYS)


def without_averages(entries: Mapping[Any, Any]) -> dict[Any, Any]:
    """The entries of a trainer's file without state dicts and averages, also of those that callbacks keep.

    Empty for a file that is a state dict itself.
    """
    kept: dict[Any, Any] = {}
    for key, node in entries.items():
        if (key in MODEL_KEYS and as_dict(node) is not None) or is_average(key, node):
            continue
        if key not in HOLDERS and _is_state_dict(key, node):
            continue
        inner = as_dict(node) if key in HOLDERS else None
        kept[key] = node if inner is None else {name: _without(each) for name, each in inner.items() if not is_average(name, each)}
    wrapped = any(as_dict(entries.get(key)) is not None for key in MODEL_KEYS)
    alone = len(kept) == len(entries) or any(is_tensor(node) and not _is_no_model(key) for key, node in kept.items())
    return kept if wrapped or not alone else {}


def _without(node: Any) -> Any:
    inner = as_dict(node)
    return node if inner is None else {key: value for key, value in inner.items() if not is_average(key, value)}


def _averages(way: Way) -> dict[str, tuple[Any, Mapping[Any, Any]]]:
    """Keys and nodes of averages, each with the entries it is among: beside the model, and what callbacks keep."""
    found: dict[str, tuple[Any, Mapping[Any, Any]]] = {}
    for level in way.beside:
        for key in sorted(level, key=lambda key: EMA_KEYS.index(key) if key in EMA_KEYS else len(EMA_KEYS)):
            if is_average(key, level[key]):
                found.setdefault(key, (level[key], level))
        for holder in HOLDERS:
            for key, node in (as_dict(level.get(holder)) or {}).items():
                kept = as_dict(node) or {}
                inner = {name: value for name, value in kept.items() if _is_named_average(name, value)}
                # A callback may have the name of an average itself: what it keeps is the average.
                for name, value in (inner or {key: node}).items():
                    if _is_named_average(name, value):
                        found.setdefault(name, (value, kept))
    return found


def _is_named_average(key: object, node: Any) -> bool:
    return is_average(key, node) and as_dict(node) is not None


def _others(way: Way, known: Container[int]) -> Iterator[tuple[str, Any]]:
    """Other state dicts beside the model: a teacher, a discriminator, a value head. ``known``: ids of other groups' tensors."""
    for level in way.beside[:-1]:
        for key, node in level.items():
            if not is_average(key, node) and _is_state_dict(key, node, known):
                yield key, node


def _is_no_model(key: object) -> bool:
    return is_state_key(key) or is_record_key(key)


def _is_state_dict(key: object, node: Any, known: Container[int] = ()) -> bool:
    """Whether something beside a model holds weights by name: no optimizer or the like, and matrices where the key speaks of numbers.

    Integers alone are none: what a sampler or a queue of samples keeps is state. Under a key of state there is a module if a matrix has the
    name of one's: ``sched_net``.
    """
    if not isinstance(key, str) or as_dict(node) is None:
        return False
    inner = {name: each for name, each in (named_tensors(node)[0] or {}).items() if id(each) not in known}
    is_state = is_state_key(key)
    least = 2 if is_state or is_record_key(key) else 1
    held = {name: each for name, each in inner.items() if isinstance(name, str) and not is_integer(each)}
    if is_state:
        held = {name: each for name, each in held.items() if "." in name and OF_OPTIMIZERS.isdisjoint(name.split("."))}
    return not is_optimizer(inner) and any((dimensions_of(each) or 0) >= least for each in held.values())


def _with_second(groups: list[FileGroup], way: Way) -> list[FileGroup]:
    """The groups, with the average of composer's EMA where it stands beside the model."""
    second = next((found for level in way.levels[:-1] if (found := second_model(level.get(ALGORITHMS))) is not None), None)
    if second is None or any(group.name == "ema" for group in groups):
        return groups
    return [*groups, FileGroup("ema", ".".join((ALGORITHMS, *second.keys)), second.entries)]


def _of_swapped(way: Way, averages: Mapping[str, Any]) -> list[FileGroup] | None:
    """The state dicts of savers that store the average in place of the model, so that it is loaded."""
    found = swapped_in(way, averages)
    if found is None:
        return None
    level, place = (way.levels[0], "state_dict") if found.who != COMPOSER else (way.above, ALGORITHMS)
    beside = {name: node for name, node in level.items() if name not in (place, found.key)}
    model = FileGroup("model", found.place, found.average, beside, why=found.why, counters=found.counters)
    return [model, replace(model, name="ema", why=None), FileGroup("current", found.key, found.current, beside)]
