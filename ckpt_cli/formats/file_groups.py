"""The state dicts in one file of ``torch.save``: the model, averages of its weights that a trainer keeps beside it, and others.

=================================  ======================================================================================
who                                where the average is
=================================  ======================================================================================
DiT, SiT, diffusion trainers       ``ema``
torchvision, k-diffusion           ``model_ema``: a state dict, or one of torch's ``AveragedModel``
timm                               ``state_dict_ema``
RT-DETR, YOLO-like                 ``ema``: a dict with ``module`` and ``updates``
ema-pytorch                        ``ema``: ``ema_model.*`` beside ``online_model.*``
Lightning callbacks                ``callbacks``: a dict per callback, with one of these keys
Lightning 2.6, WeightAveraging     ``state_dict`` itself; the weights of the training are ``current_model_state``
mmengine, EMAHook                  ``state_dict`` itself; the weights of the training are ``ema_state_dict``
latent diffusion, LitEma           in the state dict itself: ``model_ema.*``, names without dots
fairseq                            ``extra_state``: ``ema``
=================================  ======================================================================================
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_cli.errors import CorruptFile, Undecidable, Unsupported
from ckpt_cli.formats.dtensor import Local, LocalReader
from ckpt_cli.formats.state_dict import holds_storage
from ckpt_cli.names import few
from ckpt_cli.pickle_nodes import Call, Global, as_dict, describe
from ckpt_cli.torchfile import unwrap

MAX_LEVELS = 4
MODEL_KEYS = ("state_dict", "model", "module", "model_state_dict")
EMA_KEYS = ("ema", "ema_model", "model_ema", "ema_state_dict", "state_dict_ema")
"""What is looked for first; others that speak of an EMA follow in the order of the file."""

AVERAGE = re.compile(
    r"(\w+_)?ema(_[\w.]+|[0-9.]+)?|(\w+_)?swa(_\w+)?|(model_)?(avg|averaged?)(_model|_weights)?(_state(_dict)?)?", re.IGNORECASE
)
INSIDE = (*MODEL_KEYS, "ema_model", "shadow", "params", "ema")
"""Keys of an average's own dict below which its tensors are."""

HOLDERS = ("callbacks", "extra_state")
COUNTERS = frozenset({"n_averaged", "num_updates", "updates", "steps", "step", "initted", "decay", "optimization_step"})
"""Numbers that an average keeps about itself."""

NO_MODEL = re.compile(
    r"opt|.*optim.*|.*sched.*|.*rng.*|.*random.*|.*scaler.*|loops|callbacks|train.*|args|config|hyper_parameters|extra_state|data.*|loss.*|"
    r"step|global_step|epoch|iteration|best.*",
    re.IGNORECASE,
)
"""Keys beside averages under which no model is."""

NO_GROUP = re.compile(r"optim.*|.*optimizer.*|(lr_)?sched.*|rng.*|.*random.*|dataloader.*|callbacks|loops|extra_state", re.IGNORECASE)
"""Keys beside a model whose dicts are not the model."""

NAMELESS = ("shadow_params", "ema_weights", "collected_params")
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}", re.ASCII)
MAX_DEPTH = 4
MAX_LOOKED_AT = 100
MAX_STARTS = 16
"""Beginnings of names that are tried as the prefix of the model beside its average."""


def model_entries(root: object, keys: tuple[str, ...], reader: LocalReader) -> tuple[Mapping[Any, Any], dict[Any, Any]]:
    """The dict of tensors in a file, and what stands beside it: going down through ``keys`` that hold a dict, or the only group.

    Tensors beside such a key (a random state, a loss) do not make a state dict of what is around it. Raises CorruptFile,
    Undecidable.
    """
    above: dict[Any, Any] = {}
    node = root
    for _ in range(MAX_LEVELS):
        entries = as_dict(node)
        if entries is None:
            raise CorruptFile(f"the file holds {describe(node)}, not a state dict", expected="a dict of tensors")
        inner = next((key for key in keys if as_dict(entries.get(key)) is not None), None)
        if inner is None:
            inner = sole_group(entries, reader)
        elif _has_named_matrix(entries, reader):
            inner = None
        if inner is None:
            return entries, above
        above |= {key: value for key, value in entries.items() if key != inner}
        node = entries[inner]
    raise CorruptFile("the state dict is nested too deeply")


def sole_group(entries: Mapping[Any, Any], reader: LocalReader) -> Any | None:
    """The key of the only group of tensors in a dict, if it holds more than the loose tensors beside it (a step, a queue).

    None if there is no group, or if the tensors beside it may be the model. Raises Undecidable if there are several groups and
    nothing else.
    """
    if all(as_dict(node) is None for node in entries.values()) or _has_named_matrix(entries, reader):
        return None
    sizes: dict[Any, int] = {}
    loose = 0
    for key, node in entries.items():
        inner = as_dict(node)
        if inner is not None and not NO_GROUP.fullmatch(str(key)) and not _is_average(key, node):
            sizes[key] = sum(_elements(reader.read(value)) for value in inner.values())
        elif inner is None:
            loose += _elements(reader.read(node))
    groups = [key for key, size in sizes.items() if size > loose]
    if len(groups) > 1:
        raise Undecidable(
            f"several groups of tensors could be the model: {few([str(key) for key in groups])}",
            expected="one of them",
            hint="save the one that is meant on its own",
        )
    return groups[0] if groups else None


def _has_named_matrix(entries: Mapping[Any, Any], reader: LocalReader) -> bool:
    """Whether a matrix has the name of a module's weight: what lies beside groups is a state dict as well."""
    named = (node for key, node in entries.items() if "." in str(key) and as_dict(node) is None)
    return any((local := reader.read(node)) is not None and len(local.shape) > 1 for node in named)


def _elements(local: Local | None) -> int:
    return 0 if local is None else math.prod(local.shape)


@dataclass(frozen=True, slots=True)
class FileGroup:
    """A state dict of a file: ``entries`` by name; ``beside`` are the entries around it, which are no weights of its.

    ``node`` is set instead of entries for what is no dict; ``why`` says something about it that a user should know.
    """

    name: str
    key: str
    entries: Mapping[Any, Any] = field(default_factory=dict)
    beside: Mapping[Any, Any] = field(default_factory=dict)
    node: Any = None
    why: str | None = None


def file_groups(root: Any, component: str, entries: Mapping[Any, Any], above: Mapping[Any, Any]) -> list[FileGroup]:
    """The state dicts of a file, the main one first: that of ``component`` ("ema" for a file that is called so).

    ``entries`` is the dict of the main one's tensors, ``above`` what stands around it.
    """
    if component == "ema":
        return [FileGroup(component, "", _own(entries), above)]
    averages = dict(_averages(_levels(root, entries)))
    swapped = _swapped(root, averages)
    if swapped is not None:
        return swapped
    split = split_average(entries)
    if split is not None:
        return [FileGroup(component, "", split[0], above), FileGroup("ema", "", split[1], above)]
    groups: list[FileGroup] = []
    for key, node in averages.items():
        taken = {component, *(group.name for group in groups)}
        own = key if NAME.fullmatch(key) and key not in taken else f"average_{len(groups)}"
        name = "ema" if "ema" not in taken and "ema" in key.lower() else own
        inner, around = _average(node)
        groups.append(FileGroup(name, key, node=node) if inner is None else FileGroup(name, key, _own(inner), around))
    for key, node in _others(_levels(root, entries), entries):
        taken = {component, *(group.name for group in groups)}
        groups.append(FileGroup(key if NAME.fullmatch(key) and key not in taken else f"other_{len(groups)}", key, _average(node)[0] or {}))
    rest = {key: node for key, node in entries.items() if key not in averages}
    if groups and not any(holds_storage(node) and not NO_MODEL.fullmatch(str(key)) for key, node in rest.items()):
        # The file holds nothing but averages.
        return groups
    return [FileGroup(component, "", _own(rest) if _is_averaged_model(rest) else rest, above), *groups]


def chosen_group(groups: list[FileGroup], name: str | None) -> FileGroup:
    """The group of a name, or the main one. Raises Unsupported for an average that has no names."""
    group = groups[0] if name is None else next((group for group in groups if group.name == name), groups[0])
    if group.node is not None:
        pairs = as_dict(group.node) or {}
        if isinstance(group.node, (list, tuple)) or any(isinstance(pairs.get(key), (list, tuple)) for key in NAMELESS):
            raise Unsupported(
                f"the average under {group.key} is a list of tensors without names",
                expected="a state dict",
                hint="load it with the trainer that wrote it, and save the state dict of the averaged model",
            )
        raise Unsupported(f"the average under {group.key} is {describe(group.node)}, not a state dict", hint="save its state dict")
    return group


def without_averages(entries: Mapping[Any, Any]) -> dict[Any, Any]:
    """The entries of a trainer's file without state dicts and averages, also of those that callbacks keep.

    Empty for a file that is a state dict itself.
    """
    kept: dict[Any, Any] = {}
    for key, node in entries.items():
        if (key in MODEL_KEYS and as_dict(node) is not None) or _is_average(key, node) or _is_state_dict(key, node):
            continue
        inner = as_dict(node) if key in HOLDERS else None
        kept[key] = node if inner is None else {name: _without(each) for name, each in inner.items() if not _is_average(name, each)}
    wrapped = any(as_dict(entries.get(key)) is not None for key in MODEL_KEYS)
    alone = len(kept) == len(entries) or any(_is_tensor(node) and not NO_MODEL.fullmatch(str(key)) for key, node in kept.items())
    return kept if wrapped or not alone else {}


def _without(node: Any) -> Any:
    inner = as_dict(node)
    return node if inner is None else {key: value for key, value in inner.items() if not _is_average(key, value)}


def _levels(root: Any, entries: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
    """The dicts on the way from the top of a file down to the model's."""
    levels: list[Mapping[Any, Any]] = []
    level = as_dict(root)
    while level is not None and len(levels) < MAX_DEPTH:
        levels.append(level)
        if level is entries:
            break
        inside = (as_dict(level.get(key)) for key in MODEL_KEYS)
        level = next((inner for inner in inside if inner is not None), None)
    return levels


def _averages(levels: list[Mapping[Any, Any]]) -> Iterator[tuple[str, Any]]:
    """Keys and nodes of averages: beside the model, and what callbacks keep."""
    found: dict[str, Any] = {}
    for level in levels:
        for key in sorted(level, key=lambda key: EMA_KEYS.index(key) if key in EMA_KEYS else len(EMA_KEYS)):
            if _is_average(key, level[key]):
                found.setdefault(key, level[key])
        for holder in HOLDERS:
            for key, node in (as_dict(level.get(holder)) or {}).items():
                inner = {key: node, **(as_dict(node) or {})}
                for name, value in inner.items():
                    if _is_average(name, value) and as_dict(value) is not None:
                        found.setdefault(name, value)
    yield from found.items()


def _others(levels: list[Mapping[Any, Any]], entries: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Other state dicts beside the model: a teacher, a discriminator, a value head."""
    for level in levels:
        if level is not entries:
            for key, node in level.items():
                if (
                    isinstance(key, str)
                    and key not in MODEL_KEYS
                    and as_dict(node) is not entries
                    and not _is_average(key, node)
                    and _is_state_dict(key, node)
                ):
                    yield key, node


def _is_state_dict(key: object, node: Any) -> bool:
    """Whether something beside a model holds weights: tensors of one dimension or more by name, and no training state by its own name."""
    if not isinstance(key, str) or NO_MODEL.fullmatch(key) or as_dict(node) is None:
        return False
    held = list((_average(node)[0] or {}).items())[:MAX_LOOKED_AT]
    return any(isinstance(name, str) and _is_tensor(each) and not _is_scalar(each) for name, each in held)


def _is_scalar(node: Any) -> bool:
    """Whether a tensor has no dimension, as counters and metrics have."""
    inner = unwrap(node) if isinstance(node, Call) else node
    return isinstance(inner, Call) and len(inner.args) > 2 and inner.args[2] == ()


def _is_average(key: object, node: Any) -> bool:
    return isinstance(key, str) and AVERAGE.fullmatch(key) is not None and not _is_tensor(node) and holds_storage(node)


def _is_tensor(node: Any) -> bool:
    """Whether a node is a tensor itself: a parameter may have such a name."""
    return isinstance(node, Call) and isinstance(node.target, Global) and node.target.name.startswith("_rebuild")


def _average(node: Any) -> tuple[Mapping[Any, Any] | None, dict[Any, Any]]:
    """The named tensors of an average, and what stands beside them; None if there are no names."""
    around: dict[Any, Any] = {}
    for _ in range(MAX_DEPTH):
        entries = as_dict(node)
        if entries is None:
            return None, {}
        inner = next((key for key in INSIDE if as_dict(entries.get(key)) is not None), None)
        if inner is None:
            return (None if any(isinstance(entries.get(key), (list, tuple)) for key in NAMELESS) else entries), around
        around |= {key: value for key, value in entries.items() if key != inner}
        node = entries[inner]
    return None, {}


def _own(entries: Mapping[Any, Any]) -> dict[Any, Any]:
    """The averaged tensors alone: without counters, and of ema-pytorch's pair of models the averaged one."""
    held = {key: node for key, node in entries.items() if key not in COUNTERS}
    pair = {key.removeprefix("ema_model."): node for key, node in held.items() if isinstance(key, str) and key.startswith("ema_model.")}
    return pair if pair and any(isinstance(key, str) and key.startswith("online_model.") for key in held) else held


def _swapped(root: Any, averages: Mapping[str, Any]) -> list[FileGroup] | None:
    """Savers that put the average in the place of the model, so that it is what gets loaded."""
    entries = as_dict(root) or {}
    meta = as_dict(entries.get("meta")) or {}
    average = as_dict(entries.get("state_dict"))
    if average is None:
        return None
    if as_dict(entries.get("current_model_state")) is not None and "averaging_state" in entries:
        who, key = "Lightning's WeightAveraging", "current_model_state"
    elif "mmengine_version" in meta and "ema_state_dict" in averages:
        who, key = "mmengine's EMAHook", "ema_state_dict"
    else:
        return None
    beside = {name: node for name, node in entries.items() if name not in ("state_dict", key)}
    why = f"state_dict holds averaged weights ({who}); those that training goes on with are in {key}: --type current"
    model = FileGroup("model", "state_dict", average, beside, why=why)
    current = _own(as_dict(entries[key]) or {})
    return [model, FileGroup("ema", "state_dict", average, beside), FileGroup("current", key, current, beside)]


def split_average(entries: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]] | None:
    """An average in the state dict of the model, under a prefix: the model without it, and the average under the model's names.

    Only if every tensor of the average has a partner in the model; LitEma leaves the dots out of its names.
    """
    names = [name for name in entries if isinstance(name, str)]
    firsts = dict.fromkeys(name.partition(".")[0] for name in names if "." in name)
    averages = list(itertools.islice((first for first in firsts if AVERAGE.fullmatch(first)), MAX_STARTS))
    for prefix in (f"{first}.{module}" for first in averages for module in ("", "module.")):
        inside = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        averaged = {name: short for name, short in inside.items() if short not in COUNTERS}
        others = [name for name in names if name not in inside]
        partners = _partners(list(averaged.values()), others) if averaged else None
        if partners is not None:
            model = {name: node for name, node in entries.items() if name not in inside}
            return model, {partners[short]: entries[name] for name, short in averaged.items()}
    return None


def _partners(shorts: list[str], others: list[str]) -> dict[str, str] | None:
    """The model's name for each name of an average, None unless all have one of their own."""
    for written in (str, lambda name: name.replace(".", "")):
        starts = dict.fromkeys(f"{name.split('.')[0]}." for name in others)
        for start in ("", *itertools.islice(starts, MAX_STARTS)):
            known = {written(name.removeprefix(start)): name for name in others if name.startswith(start)}
            if len(known) == sum(name.startswith(start) for name in others) and all(short in known for short in shorts):
                return {short: known[short] for short in shorts}
    return None


def _is_averaged_model(entries: Mapping[Any, Any]) -> bool:
    """Whether this is the state dict of torch's ``AveragedModel``: a counter, and the model under ``module``."""
    return "n_averaged" in entries and all(isinstance(key, str) and key.startswith("module.") for key in entries if key != "n_averaged")
