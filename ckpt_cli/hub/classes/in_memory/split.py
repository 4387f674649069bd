"""Tensors that are one on the hub and several in memory, as those that loading makes of them: q, k and v of a joined projection.

The other way round than `joined`: a rule of saving that joins or turns what the class has in memory is undone, step by step from its last
one. Loading cuts into equal parts or into those of the class: ``Concatenate`` is what both ``Chunk`` and ``Split`` of transformers become.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from ckpt_cli.boxes import Shape
from ckpt_cli.errors import CkptError
from ckpt_cli.hub.classes.names import hub_tensors, rotated_for, unknown_operations
from ckpt_cli.hub.classes.rules import Conversion, HubRules
from ckpt_cli.hub.config import Config
from ckpt_cli.name_patterns import pattern_of
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.views import interleaved, sliced

UNDONE = (["Concatenate"], ["PermuteForRope", "Concatenate"], ["Concatenate", "Interleave"], ["PermuteForRope"])
"""The operations of saving that are undone here, in their order."""

SizeOf = Callable[[str, int], int | None]
"""How long the tensor of a name in memory is along a dimension, None where that is not known."""


def split_tensors(
    tensors: Mapping[str, Tensor], rules: HubRules, config: Config, wanted: Callable[[str], bool], size_of: SizeOf
) -> dict[str, Tensor]:
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
        made = _cut(tensor, *found[name], config, size_of) if name in found else None
        result |= made if made is not None and _is_saved_as(made, name, tensor, rules, config) else {name: tensor}
    return result


def _is_undone(rule: Conversion) -> bool:
    operations = [each["name"] for each in rule.operations]
    joined = next((each for each in rule.operations if each["name"] == "Concatenate"), {})
    sources, targets = rule.renaming.sources, rule.renaming.targets
    if operations not in UNDONE or joined.get("num_shards_attribute") is not None:
        return False
    return len(targets) == 1 and (len(sources) > 1) == bool(joined) and not any("*" in text for text in (*sources, *targets))


def _parts(name: str, rule: Conversion) -> tuple[str, ...]:
    """The names in memory of what a rule of saving makes a tensor of, in their order; none if it makes no such tensor.

    Rules replace the first place that matches, also within a word: ``attn.q_proj`` in ``self_attn.q_proj``.
    """
    target = rule.renaming.targets[0]
    before, found, after = name.partition(target)
    if not found or (target[-1:].isalnum() and after[:1].isalnum()):
        return ()
    return tuple(before + source.replace("\\", "") + after for source in rule.renaming.sources)


def _is_known(name: str, rules: HubRules) -> bool:
    """Whether the class has a tensor of this name in memory, as far as its names are known."""
    return not rules.native or pattern_of(name)[0] in rules.native


def _cut(tensor: Tensor, rule: Conversion, parts: Sequence[str], config: Config, size_of: SizeOf) -> dict[str, Tensor] | None:
    """The tensors that a rule of saving makes this one of; None where it cannot be cut so."""
    made = [tensor]
    try:
        for operation in reversed(rule.operations):
            inverse = not operation.get("inverse", False)
            if operation["name"] == "Interleave":
                made = [interleaved(each, operation["dim"], inverse=inverse) for each in made]
            elif operation["name"] == "Concatenate":
                axis = operation["dim"] % len(tensor.shape)
                ends = _ends(parts, axis, tensor.shape, size_of)
                made = [sliced(each, axis, start, end) for each in made for start, end in pairwise(ends)]
            else:
                key, turned = operation.get("subconfig_key"), operation.get("permute_layer_names")
                # The same words as in saving, which looks for them in the pattern of each.
                rotates = [turned is None or any(word in source for word in turned) for source in rule.renaming.sources]
                made = [rotated_for(each, config, key, inverse=inverse) if r else each for each, r in zip(made, rotates, strict=True)]
    except (CkptError, ValueError, ZeroDivisionError):
        return None
    return None if tensor.dtype.values > 1 else {part: replace(each, name=part) for part, each in zip(parts, made, strict=True)}


def _ends(parts: Sequence[str], axis: int, shape: Shape, size_of: SizeOf) -> list[int]:
    """Where the parts of a tensor of this shape begin and end along a dimension. Raises ValueError where that is not known."""
    sizes = [size_of(part, axis) for part in parts]
    length, equal = shape[axis], shape[axis] // len(parts)
    if all(size in (None, equal) for size in sizes):
        sizes = [equal] * len(parts)
    known = [size for size in sizes if size is not None]
    if len(known) == len(parts) - 1:
        known = [length - sum(known) if size is None else size for size in sizes]
    if len(known) != len(parts) or sum(known) != length or min(known) < 0:
        raise ValueError(f"{length} is not cut into {sizes}")
    return [0, *accumulate(known)]


def _is_saved_as(parts: Mapping[str, Tensor], name: str, whole: Tensor, rules: HubRules, config: Config) -> bool:
    """Whether saving makes one tensor of these parts, of the shape and under the name that the whole one has on the hub."""
    try:
        made, kept = hub_tensors(parts, rules, config), hub_tensors({name: whole}, rules, config)
    except CkptError:
        return False
    return made.keys() == kept.keys() and all(made[each].shape == kept[each].shape for each in made)
