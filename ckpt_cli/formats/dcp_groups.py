"""Which of the nested keys of a DCP folder are a model: groups, their names, and the one level that goes away.

Every trainer nests its state dicts in its own way; the first rule of `MODELS` that finds tensors names the model. Exactly
that prefix is removed, never more: with accelerate a Hugging Face name "model.layers.0..." is stored as "model.model.layers.0...".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_cli.errors import Inconsistent
from ckpt_cli.formats.dcp_megatron import refuse_megatron
from ckpt_cli.formats.dcp_metadata import Catalog, CatalogObject, CatalogTensor


@dataclass(frozen=True, slots=True)
class Rule:
    """The path of nested keys above a model's tensors, who nests like that, and a wrapper that every name has as well."""

    prefix: tuple[str, ...]
    writer: str
    wrapper: str = ""


MODELS = (
    Rule(("state", "model"), "composer, llm-foundry", wrapper="model."),
    Rule(("app", "model"), "prime-rl"),
    Rule(("state_dict",), "Lightning Trainer"),
    Rule(("fsdp_checkpoint", "model"), "RLinf"),
    Rule(("model",), "accelerate, Lightning Fabric, OLMo-core, VeOmni"),
)
NO_WEIGHTS = re.compile(
    r"optim(izer)?s?(_.*)?|optimizer_states?|lr_schedulers?|schedulers?|dataloader|train_state|trainer_state|rng(_.*)?|loops|callbacks|extra_state"
)
"""Groups beside a model that hold no weights."""

FLAT = "keys at the top level"

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one group, by the name that they have without its prefix; objects that lie among them, by their whole name."""

    name: str
    writer: str
    tensors: Mapping[str, CatalogTensor]
    objects: Mapping[str, CatalogObject]


def groups_of(catalog: Catalog) -> list[Group]:
    """The groups that may hold weights: the model first. Raises Inconsistent if two keys get the same name, Unsupported for Megatron."""
    refuse_megatron((*catalog.tensors, *catalog.objects))
    found: list[Group] = []
    taken: set[str] = set()
    for rule in MODELS:
        depth = len(rule.prefix)
        inside = {key: t for key, t in catalog.tensors.items() if len(t.path) > depth and t.path[:depth] == rule.prefix}
        if inside:
            found.append(_group(catalog, "model", rule.writer, inside, rule.prefix, rule.wrapper))
            taken |= set(inside)
            break
    flat = {key: t for key, t in catalog.tensors.items() if len(t.path) == 1 and not NO_WEIGHTS.fullmatch(t.path[0].split(".")[0])}
    loose = bool(flat) and not found and _is_loose(catalog, flat)
    if flat and not loose:
        found.append(_group(catalog, "model" if not found else "flat", FLAT, flat, ()))
    taken |= set(flat)
    nested: dict[str, dict[str, CatalogTensor]] = {}
    for key, tensor in catalog.tensors.items():
        if key not in taken and len(tensor.path) > 1 and not any(NO_WEIGHTS.fullmatch(part) for part in tensor.path[:2]):
            nested.setdefault(tensor.path[0], {})[key] = tensor
    # A group's name becomes the name of a component and of a folder; what cannot be one is never offered.
    names = {group.name for group in found}
    for name, tensors in nested.items():
        if NAME.fullmatch(name):
            found.append(_group(catalog, name if name not in names else f"{name}_2", "", tensors, (name,)))
    if loose:
        # Groups with matrices come first: of two groups, counters are not the model either.
        found.sort(key=lambda group: not any(len(tensor.shape) > 1 for tensor in group.tensors.values()))
        found.append(_group(catalog, "flat" if "flat" not in nested else "flat_2", FLAT, flat, ()))
    return found


def _is_loose(catalog: Catalog, flat: Mapping[str, CatalogTensor]) -> bool:
    """Whether tensors at the top level (a step, a queue) only lie beside a group that is the model."""
    named = any("." in tensor.path[0] for tensor in flat.values()) and any(len(tensor.shape) > 1 for tensor in flat.values())
    sizes: dict[str, int] = {}
    for tensor in catalog.tensors.values():
        if len(tensor.path) > 1 and not any(NO_WEIGHTS.fullmatch(part) for part in tensor.path[:2]):
            sizes[tensor.path[0]] = sizes.get(tensor.path[0], 0) + math.prod(tensor.shape)
    return not named and max(sizes.values(), default=0) > sum(math.prod(tensor.shape) for tensor in flat.values())


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
        beside = {key: thing for key, thing in beside.items() if len(thing.path) == 1 and not NO_WEIGHTS.fullmatch(thing.path[0])}
    return Group(name, writer, {names[key]: tensor for key, tensor in inside.items()}, beside)
