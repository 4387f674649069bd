"""Which nested keys of a DCP folder are a model: groups, their names, and the one level that is removed.

Every trainer nests its state dicts in its own way; the first rule of `MODELS` that finds tensors names the model. Exactly
that prefix is removed, never more: with accelerate a Hugging Face name "model.layers.0..." is stored as "model.model.layers.0...".
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_cli.errors import Inconsistent
from ckpt_cli.formats.dcp.metadata import Catalog, CatalogObject, CatalogTensor
from ckpt_cli.formats.dcp.swapped import CURRENT, second_tensors
from ckpt_cli.formats.megatron.signs import refuse_unfinished
from ckpt_cli.formats.sets.parts import PART, refuse_twice, with_parts
from ckpt_cli.formats.torch_files.average_states import state_of
from ckpt_cli.formats.torch_files.averages import AVERAGE, is_average_name, named_as, split_average
from ckpt_cli.formats.torch_files.matrices import OF_OPTIMIZERS
from ckpt_cli.formats.trainers import TRAINERS
from ckpt_cli.formats.training_state_names import is_state_key, is_trainer_key


@dataclass(frozen=True, slots=True)
class Nesting:
    """The path of nested keys above a model's tensors, the trainer that nests like this, and a wrapper that every name also has."""

    prefix: tuple[str, ...]
    writer: str
    wrapper: str = ""


def _rules() -> tuple[Nesting, ...]:
    """The nestings of all trainers, the deepest first."""
    nested: dict[tuple[str, str], list[str]] = {}
    for trainer in TRAINERS:
        for keys in trainer.keys:
            nested.setdefault((keys, trainer.wrapper), []).append(trainer.name)
    rules = [Nesting(tuple(keys.split(".")), ", ".join(dict.fromkeys(names)), wrapper) for (keys, wrapper), names in nested.items()]
    return tuple(sorted(rules, key=lambda rule: -len(rule.prefix)))


MODELS = _rules()
CONTAINER = re.compile(r"app(_state)?|state|trainer|model_state|state_dict|model|module|model_state_dict|checkpoint|ckpt")
"""Keys above a state dict that do not say which model it is."""

MODEL = re.compile(r"(.+_)?(model|ema|net|network|module|policy|actor|critic|reward|value|generator|discriminator|student|teacher)(_.+)?")
"""Keys that name a model of its own, not a part of one."""

FLAT = "keys at the top level"

PLACE = re.compile(r"[0-9]{1,6}", re.ASCII)
"""The place of a state dict in a list."""

Path = tuple[str, ...]

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one group, by their names without its prefix; objects among them, by their whole names.

    ``key`` is their place in the folder; ``counters`` are numbers that an average keeps about itself, ``trained`` the model beside it.
    """

    name: str
    writer: str
    tensors: Mapping[str, CatalogTensor]
    objects: Mapping[str, CatalogObject]
    key: str = ""
    counters: Mapping[str, CatalogTensor] = field(default_factory=dict)
    trained: Mapping[str, CatalogTensor] = field(default_factory=dict)

    @property
    def holds_weights(self) -> bool:
        """Whether there may be weights among them: counters and metrics have no dimension."""
        return any(tensor.shape for tensor in self.tensors.values())


def groups_of(catalog: Catalog) -> list[Group]:
    """The groups that may hold weights: the model first.

    Raises Inconsistent if two keys get the same name, MissingShard for a step of Megatron that is not finished.
    """
    refuse_unfinished((*catalog.tensors, *catalog.objects))
    found: list[Group] = []
    taken: set[str] = set()
    for rule in MODELS:
        inside = {key: t for key, t in catalog.tensors.items() if _is_below(t, rule.prefix)}
        if inside:
            found.append(_group(catalog, "model", rule.writer, inside, _only_state_dict(inside, rule.prefix), rule.wrapper))
            taken |= set(inside)
            for prefix, second in list(second_tensors(catalog.tensors, rule.prefix).items())[:1]:
                found.append(_second(second, prefix, rule.wrapper))
                taken |= set(second)
            break
    kept = {below for tensor in catalog.tensors.values() if len(tensor.shape) > 1 for below in _of_trainer(tensor)}
    modules = {below for tensor in catalog.tensors.values() if _is_of_module(tensor) for below in _below_state_keys(tensor)}
    nested = [
        (prefix, inside)
        for top in dict.fromkeys(tensor.path[0] for tensor in catalog.tensors.values() if len(tensor.path) > 1)
        for prefix, inside in _state_dicts(
            {
                key: tensor
                for key, tensor in catalog.tensors.items()
                if key not in taken and _is_below(tensor, (top,)) and not _is_training_state(tensor, kept, modules)
            },
            (top,),
        )
    ]
    # A group's name becomes the name of a component and of a folder; what cannot be one gets a number.
    names = {group.name for group in found}
    named: list[Group] = []
    for prefix, inside in nested:
        name = _name_of(prefix, alone=len(nested) == 1 and not found)
        name = name if NAME.fullmatch(name) else "other"
        name = next(free for free in (name, *(f"{name}_{number}" for number in range(2, len(nested) + 3))) if free not in names)
        names.add(name)
        named.append(_group(catalog, name, "", inside, prefix))
    named = _joined(named, found)
    # Groups with matrices come first: of two groups, counters are not the model either.
    found += sorted(named, key=lambda group: (not _has_matrix(group.tensors), _rank(group.name)))
    # A module may be called loops: its vectors belong to its matrices.
    tops = {_words(tensor)[0] for tensor in catalog.tensors.values() if len(tensor.path) == 1 and _is_weight(tensor)}
    flat = {key: t for key, t in catalog.tensors.items() if len(t.path) == 1 and not _is_flat_state(t, modules, tops)}
    if flat:
        first = (not found or found[0].writer == "") and not _is_loose(flat, named)
        group = _group(catalog, "model" if first and "model" not in names else "flat", FLAT, flat, ())
        found = [group, *found] if first else [*found, group]
    return _with_averages(found)


def _with_averages(groups: list[Group]) -> list[Group]:
    """The groups, with each average among the tensors of a model, under a prefix, as a group of its own after them.

    The state of an average beside the model is that average: what is left out of it is said where it is read.
    """
    names, models, averages = {group.name for group in groups}, list[Group](), list[Group]()
    main = {} if not groups or is_average_name(groups[0].name) else groups[0].tensors
    for index, each in enumerate(groups):
        group = replace(each, tensors=named_as(each.tensors, main)) if is_average_name(each.name) else each
        whole = is_average_name(group.name) or (index > 0 and state_of(group.tensors) is not None)
        split = None if whole else split_average(group.tensors)
        name = "ema" if index == 0 else f"{group.name}_ema"
        if split is None or name in names:
            models.append(group)
            continue
        models.append(replace(group, tensors=split.model))
        averages.append(replace(group, name=name, tensors=split.average, objects={}, counters=split.counters, trained=split.trained))
    return [*models, *averages]


def _joined(groups: Sequence[Group], found: Sequence[Group]) -> list[Group]:
    """The groups with those as one that are parts of one model by their names, unless it was ``found`` already. Raises PartOfSet."""
    by_name = {group.name: group for group in groups}
    made: list[Group] = []
    for stem, names in with_parts([*(group.name for group in found), *by_name]).items():
        if names[0] not in by_name:
            continue
        group = replace(by_name[names[0]], name=stem)
        for part in map(by_name.__getitem__, names[1:]):
            refuse_twice(group.tensors, part.tensors, names)
            group = replace(group, tensors={**group.tensors, **part.tensors}, objects={**group.objects, **part.objects})
        made.append(group)
    return made


def _words(tensor: CatalogTensor) -> list[str]:
    """All keys of a tensor, those within a name too."""
    return ".".join(tensor.path).split(".")


def _below_state_keys(tensor: CatalogTensor) -> list[Path]:
    """The paths of the keys above a tensor that are called like training state; of a name without keys above it, its first part."""
    keys = tensor.path[:-1] or tuple(_words(tensor)[:1])
    return [keys[: depth + 1] for depth, key in enumerate(keys) if is_state_key(key)]


def _is_weight(tensor: CatalogTensor) -> bool:
    """Whether a tensor is a module's, whatever that is called: a matrix of floats that is no slot of an optimizer."""
    return len(tensor.shape) > 1 and _is_no_slot(tensor)


def _is_of_module(tensor: CatalogTensor) -> bool:
    """The same, and of names of several parts without keys above them any floats but single numbers: ``scheduler.betas`` of a model.

    What trainers keep under such keys is below them, and is of other numbers (random states are bytes).
    """
    is_alone = len(tensor.path) == 1 and "." in tensor.path[0]
    return len(tensor.shape) > (0 if is_alone else 1) and _is_no_slot(tensor)


def _is_no_slot(tensor: CatalogTensor) -> bool:
    return tensor.dtype.kind == "float" and OF_OPTIMIZERS.isdisjoint(_words(tensor))


def _is_training_state(tensor: CatalogTensor, kept: Container[Path], modules: Container[Path]) -> bool:
    """Whether a tensor belongs to an optimizer or the like by the keys above it, or to a trainer's state without matrices.

    ``modules`` are paths below which matrices of a model are, although they end in such a key: a module may be called opt.
    """
    return any(below not in modules for below in _below_state_keys(tensor)) or any(below not in kept for below in _of_trainer(tensor))


def _is_of_trainer(key: str) -> bool:
    return is_state_key(key) or is_trainer_key(key)


def _is_flat_state(tensor: CatalogTensor, modules: Container[Path], tops: Container[str]) -> bool:
    """The same of a tensor at the top level; ``tops`` are first parts of names with matrices."""
    first = _words(tensor)[0]
    return any(below not in modules for below in _below_state_keys(tensor)) or (
        is_trainer_key(first) and len(tensor.shape) < 2 and first not in tops
    )


def _of_trainer(tensor: CatalogTensor) -> list[Path]:
    """The paths of the keys above a tensor under which trainers keep their own state."""
    if any(map(is_state_key, tensor.path[:-1])):
        return []
    return [tensor.path[: depth + 1] for depth, key in enumerate(tensor.path[:-1]) if is_trainer_key(key)]


def _has_matrix(tensors: Mapping[str, CatalogTensor]) -> bool:
    return any(len(tensor.shape) > 1 for tensor in tensors.values())


def _is_loose(flat: Mapping[str, CatalogTensor], groups: Sequence[Group]) -> bool:
    """Whether tensors at the top level (a step, a queue) are only beside a group that is the model."""
    if any("." in tensor.path[0] for tensor in flat.values()) and _has_matrix(flat):
        return False
    sizes = (sum(math.prod(tensor.shape) for tensor in group.tensors.values()) for group in groups)
    return max(sizes, default=0) > sum(math.prod(tensor.shape) for tensor in flat.values())


def _is_below(tensor: CatalogTensor, prefix: Path) -> bool:
    return len(tensor.path) > len(prefix) and tensor.path[: len(prefix)] == prefix


def _only_state_dict(inside: Mapping[str, CatalogTensor], prefix: Path) -> Path:
    """The place of the only state dict below a prefix: further down if all of its tensors are there, in one dict with dotted names."""
    parents = {tensor.path[:-1] for tensor in inside.values()}
    deeper = next(iter(parents)) if len(parents) == 1 else prefix
    return deeper if any("." in tensor.path[-1] for tensor in inside.values()) else prefix


def _state_dicts(inside: Mapping[str, CatalogTensor], prefix: Path) -> list[tuple[Path, dict[str, CatalogTensor]]]:
    """The state dicts below a top-level key.

    Names of several parts ("layers.0.weight") tell a state dict from a dict of modules. Several of them are models of their own
    where all have a name of one, or lie in one list of models with the same tensors; else they are parts of one model.
    """
    if not inside:
        return []
    parents = list(dict.fromkeys(tensor.path[:-1] for tensor in inside.values() if "." in tensor.path[-1]))
    outer = [parent for parent in parents if not any(parent != other and parent[: len(other)] == other for other in parents)]
    copies = len(outer) > 1 and all(PLACE.fullmatch(parent[-1]) for parent in outer) and _are_alike(inside, outer)
    whole = all(any(tensor.path[: len(parent)] == parent for parent in outer) for tensor in inside.values())
    if not whole or not outer or (len(outer) > 1 and not copies and not all(any(map(MODEL.fullmatch, parent[1:])) for parent in outer)):
        return [(_only_state_dict(inside, prefix), dict(inside))]
    return [(parent, {key: tensor for key, tensor in inside.items() if _is_below(tensor, parent)}) for parent in outer]


def _are_alike(inside: Mapping[str, CatalogTensor], outer: Sequence[Path]) -> bool:
    """Whether the state dicts of one list of models have the same names and shapes; those of blocks are parts of one model."""
    lists = {parent[:-1] for parent in outer}
    if len(lists) > 1 or not any(MODEL.fullmatch(part.removesuffix("s")) for part in outer[0][:-1]):
        return False
    held = [{(t.path[len(parent) :], tuple(t.shape)) for t in inside.values() if _is_below(t, parent)} for parent in outer]
    return all(each == held[0] for each in held)


def _name_of(prefix: Path, *, alone: bool) -> str:
    """The last key above a state dict that says which model it is; of a list with the place in it, but for the first.

    >>> _name_of(("emas", "0"), alone=False), _name_of(("app", "emas", "2"), alone=False)
    ('emas', 'emas_2')
    """
    number = int(prefix[-1]) if len(prefix) > 1 and PLACE.fullmatch(prefix[-1]) else 0
    telling = [part for part in prefix if not CONTAINER.fullmatch(part) and not PLACE.fullmatch(part)]
    name = telling[-1] if telling else "model" if len(prefix) > 1 or alone else prefix[-1]
    return f"{name}_{number}" if number else name


def _rank(name: str) -> int:
    """Models first, then what acts in reinforcement learning, averages last."""
    return 0 if name == "model" else 1 if name in ("policy", "actor") else 3 if "ema" in name else 2


def _group(
    catalog: Catalog, name: str, writer: str, inside: Mapping[str, CatalogTensor], prefix: tuple[str, ...], wrapper: str = ""
) -> Group:
    depth = len(prefix)
    names = {key: ".".join(tensor.path[depth:]) for key, tensor in inside.items()}
    if wrapper and all(short.startswith(wrapper) for short in names.values()):
        names = {key: short.removeprefix(wrapper) for key, short in names.items()}
    if len(set(names.values())) != len(names):
        twice = next(short for short in names.values() if list(names.values()).count(short) > 1)
        raise Inconsistent(f"two entries of group {name} have the same name without their prefix", tensor=twice)
    beside = {key: thing for key, thing in catalog.objects.items() if thing.path[:depth] == prefix}
    if not prefix:
        # What lies one level down is another group's, and some objects beside the weights are a trainer's.
        beside = {key: thing for key, thing in beside.items() if len(thing.path) == 1 and not _is_of_trainer(thing.path[0])}
    return Group(name, writer, {names[key]: tensor for key, tensor in inside.items()}, beside, ".".join(prefix))


def _second(inside: Mapping[str, CatalogTensor], prefix: Path, wrapper: str) -> Group:
    """The second model of composer's EMA, whose parameters and buffers are two dicts."""
    names = {key: ".".join(tensor.path[len(prefix) + 1 :]) for key, tensor in inside.items()}
    wrapped = all(name.startswith(wrapper) for name in names.values())
    tensors = {names[key].removeprefix(wrapper if wrapped else ""): tensor for key, tensor in inside.items()}
    return Group(CURRENT, "", tensors, {}, ".".join(prefix))


def may_be_the_model(group: Group, main: Group) -> bool:
    """Whether a group beside the chosen model could also be the model: nothing in its name says otherwise."""
    if is_average_name(group.name) and group.key == main.key:
        return False  # It was among the tensors of the model.
    if main.writer in ("", FLAT):
        return True
    telling = [part for part in group.key.split(".") if not CONTAINER.fullmatch(part)]
    return not any(AVERAGE.fullmatch(part) or (MODEL.fullmatch(part) and not PART.fullmatch(part)) for part in telling)
