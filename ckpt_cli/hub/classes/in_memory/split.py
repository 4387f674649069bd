"""Tensors that are one on the hub and several in memory, as those that loading makes of them: q, k and v of a joined projection.

The other way round than `joined`: a rule of saving that joins what the class holds apart is undone, step by step from its last one.
Loading cuts into equal parts (``Chunk``, which transformers reverts to ``Concatenate``), so nothing else is done here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from ckpt_cli.errors import CkptError
from ckpt_cli.hub.classes.names import hub_tensors, rotated_for, unknown_operations
from ckpt_cli.hub.classes.rules import Conversion, HubRules
from ckpt_cli.hub.config import Config
from ckpt_cli.name_patterns import pattern_of
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.views import interleaved, sliced

UNDONE = (["Concatenate"], ["PermuteForRope", "Concatenate"], ["Concatenate", "Interleave"])
"""The operations of saving that are undone here, in their order."""


def split_tensors(tensors: Mapping[str, Tensor], rules: HubRules, config: Config, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Tensors by their names in memory, with those cut that are several there, if any of these is ``wanted`` by its name.

    What saving would not put together again, under the same name and in the same shape, stays as it is.
    """
    joins = [] if unknown_operations(rules) else [rule for rule in rules.conversions if _is_undone(rule)]
    found: dict[str, tuple[Conversion, tuple[str, ...]]] = {}
    for name in tensors if joins else ():
        for rule in joins:
            parts = _parts(name, rule)
            if parts and not any(part in tensors for part in parts) and all(_is_known(part, rules) for part in parts):
                found[name] = (rule, parts)
                break
    if not any(wanted(part) for _, parts in found.values() for part in parts):
        return dict(tensors)
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        made = _cut(tensor, *found[name], config) if name in found else None
        result |= made if made is not None and _is_saved_as(made, name, tensor, rules, config) else {name: tensor}
    return result


def _is_undone(rule: Conversion) -> bool:
    joined = next((operation for operation in rule.operations if operation["name"] == "Concatenate"), {})
    sources, targets = rule.renaming.sources, rule.renaming.targets
    several = len(targets) == 1 and len(sources) > 1 and not any("*" in text for text in (*sources, *targets))
    return several and [each["name"] for each in rule.operations] in UNDONE and joined.get("num_shards_attribute") is None


def _parts(name: str, rule: Conversion) -> tuple[str, ...]:
    """The names in memory of what a rule of saving makes a tensor of, in their order; none if it makes no such tensor."""
    target = rule.renaming.targets[0]
    start = "" if target.startswith(".") else r"(?:^|(?<=\.))"
    match = re.search(rf"{start}{re.escape(target)}(?!\w)", name)
    if match is None:
        return ()
    return tuple(name[: match.start()] + source.replace("\\", "") + name[match.end() :] for source in rule.renaming.sources)


def _is_known(name: str, rules: HubRules) -> bool:
    """Whether the class has a tensor of this name in memory, as far as its names are known."""
    return not rules.native or pattern_of(name)[0] in rules.native


def _cut(tensor: Tensor, rule: Conversion, parts: tuple[str, ...], config: Config) -> dict[str, Tensor] | None:
    """The tensors that a rule of saving makes this one of; None where it cannot be cut so."""
    made = {"": tensor}
    try:
        for operation in reversed(rule.operations):
            if operation["name"] == "Interleave":
                made = {name: interleaved(each, operation["dim"], inverse=not operation["inverse"]) for name, each in made.items()}
            elif operation["name"] == "Concatenate":
                axis, count = operation["dim"] % len(tensor.shape), len(parts)
                size, rest = divmod(tensor.shape[axis], count)
                if rest or tensor.dtype.values > 1:
                    return None
                whole = made[""]
                made = {part: sliced(whole, axis, number * size, (number + 1) * size) for number, part in enumerate(parts)}
            else:
                turned = operation.get("permute_layer_names")
                heads = {part: turned is None or any(word in part for word in turned) for part in parts}
                made = {
                    name: rotated_for(each, config, operation.get("subconfig_key"), inverse=not operation["inverse"]) if heads[name] else each
                    for name, each in made.items()
                }
    except (CkptError, IndexError, ZeroDivisionError):
        return None
    return {name: replace(each, name=name) for name, each in made.items()}


def _is_saved_as(parts: Mapping[str, Tensor], name: str, whole: Tensor, rules: HubRules, config: Config) -> bool:
    """Whether saving makes one tensor of these parts, of the shape and under the name that the whole one has on the hub."""
    try:
        made, kept = hub_tensors(parts, rules, config), hub_tensors({name: whole}, rules, config)
    except CkptError:
        return False
    return made.keys() == kept.keys() and all(made[each].shape == kept[each].shape for each in made)
