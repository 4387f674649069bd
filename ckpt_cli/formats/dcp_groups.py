"""Which of the nested keys of a DCP folder are a model: groups, their names, and the one level that goes away.

Every trainer nests its state dicts in its own way; the first rule of `MODELS` that finds tensors names the model. Exactly
that prefix is removed, never more: with accelerate a Hugging Face name "model.layers.0..." is stored as "model.model.layers.0...".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_cli.errors import Inconsistent
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
    """The groups that may hold weights: the model first. Raises Inconsistent if two keys get the same name."""
    found: list[Group] = []
    taken: set[str] = set()
    for rule in MODELS:
        depth = len(rule.prefix)
        inside = {key: t for key, t in catalog.tensors.items() if len(t.path) > depth and t.path[:depth] == rule.prefix}
        if inside:
            found.append(_group(catalog, "model", rule.writer, inside, rule.prefix, rule.wrapper))
            taken |= set(inside)
            break
    flat = {key: t for key, t in catalog.tensors.items() if len(t.path) == 1 and not NO_WEIGHTS.fullmatch(t.path[0])}
    if flat:
        found.append(_group(catalog, "model" if not found else "flat", FLAT, flat, ()))
        taken |= set(flat)
    nested: dict[str, dict[str, CatalogTensor]] = {}
    for key, tensor in catalog.tensors.items():
        if key not in taken and not any(NO_WEIGHTS.fullmatch(part) for part in tensor.path[:2]):
            nested.setdefault(tensor.path[0], {})[key] = tensor
    # A group's name becomes the name of a component and of a folder; what cannot be one is never offered.
    names = {group.name for group in found}
    for name, tensors in nested.items():
        if NAME.fullmatch(name):
            found.append(_group(catalog, name if name not in names else f"{name}_2", "", tensors, (name,)))
    return found


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
