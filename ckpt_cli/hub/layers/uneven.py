"""Compares the layers of a stack with one another: what lies between layers that are alike, and tensors that one layer alone lacks."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ckpt_cli.hub.config import Config, levels
from ckpt_cli.hub.layers.counts import counts_layers, layer_count
from ckpt_cli.hub.layers.mismatch import Mismatch
from ckpt_cli.hub.layers.stacks import BLOCK, EXPERTS, LISTED, Layers, holes, is_block, is_inner
from ckpt_cli.names import few, plural

LONG = 6
"""The shortest stack in which one layer may be reported as unlike all others: in necks of four layers, each may differ."""

PLACE = re.compile(r"layer|period|interval|every|freq|offset|stride|step|pattern|skip|first|start|ind(ex|ices)|idx|_at$", re.IGNORECASE)
"""In keys of a config, words for places of layers."""


def missing_between(stack: str, layers: Layers) -> Iterator[Mismatch]:
    """What lies between layers that are alike."""
    absent = holes(layers)
    if absent and 2 * len(absent) < len(layers):
        yield from missing_modules(stack, [number for number in absent if _are_alike(layers, number)], len(layers))


def missing_modules(stack: str, numbers: Sequence[int], there: int) -> Iterator[Mismatch]:
    """Numbered modules that a stack must have and lacks, if there are any."""
    if numbers:
        first = ", ".join(map(str, numbers[:3])) + (f" and {len(numbers) - 3} more" if len(numbers) > 3 else "")
        text = f"{stack} has {plural(there, 'module')}, but lacks {first}"
        yield Mismatch("missing-layers", text, tuple(f"{stack}.{number}.*" for number in numbers))


def uneven_layers(stack: str, layers: Layers, config: Config) -> Iterator[Mismatch]:
    """A few layers that lack what at least as many others have, with nothing in its place."""
    kinds = Counter(frozenset(leaves) for leaves in layers.values())
    poorer = {
        number: fuller
        for number, leaves in sorted(layers.items())
        if (fuller := next((kind for kind, count in kinds.most_common() if leaves < kind and count >= kinds[frozenset(leaves)]), None))
    }
    lost = next((number for number, fuller in poorer.items() if _is_lost(layers, number, fuller, config)), None)
    odd = [number for number, fuller in poorer.items() if not _may_differ(layers, number, fuller)]
    few_of_many = 4 * len(poorer) <= len(layers) or len(layers) < BLOCK
    is_uneven = odd and few_of_many and len(poorer[odd[0]]) >= BLOCK and not _are_regular(list(poorer), len(layers))
    if lost is not None or (is_uneven and (len(layers) >= LONG or _are_the_models(layers, config))):
        number = lost if lost is not None else odd[0]
        absent, count = sorted(poorer[number] - layers[number]), kinds[poorer[number]]
        text = f"{stack}.{number} lacks {few(absent, 3)}, which {count} of the {len(layers)} layers have"
        lacking = tuple(f"{stack}.{number}.{leaf}" for leaf in absent[:LISTED]) if lost is not None else ()
        yield Mismatch("missing-layers" if lacking else "uneven-layers", text, lacking)


def _are_the_models(layers: Layers, config: Config) -> bool:
    """Whether a short stack is as long as the config says, if there is one, and its layers are no stages of layers, which differ."""
    are_stages = any(is_inner(f"0.{leaf.partition(f'{EXPERTS}.')[0]}") for leaves in layers.values() for leaf in leaves)
    return (not config or layer_count(config) == max(layers) + 1) and not are_stages


def _are_regular(numbers: Sequence[int], length: int) -> bool:
    """Whether layers are at regular places, as layers of another kind are, with or without the first and the last."""
    inside = [number for number in numbers if number not in (0, length - 1)]
    return len(inside) > 2 and len({after - before for before, after in itertools.pairwise(inside)}) == 1


def _may_differ(layers: Layers, number: int, fuller: frozenset[str]) -> bool:
    """Whether a layer is the first or the last one, and has whole modules less: a norm, a downsampling, a parameter of its own."""
    if number not in (0, max(layers)):
        return False
    modules = {leaf.rpartition(".")[0] for leaf in layers[number]}
    around = {module.rpartition(".")[0] for module in modules if module.count(".")}
    lacking = {leaf.rpartition(".")[0] for leaf in fuller - layers[number] if leaf.endswith((".weight", ".bias"))}
    return all(module not in modules and (not module.count(".") or module.rpartition(".")[0] not in around) for module in lacking)


def _is_lost(layers: Layers, number: int, fuller: frozenset[str], config: Config) -> bool:
    """Whether one layer lost tensors, rather than being built without them.

    No class of transformers has, between two layers that are alike, a single one with parts of modules missing: first and last layers
    differ, and those at regular places. Of a short stack nothing is known, and a config may list the layers that differ.
    """
    absent = fuller - layers[number]
    if len(layers) < LONG or len(fuller) < BLOCK or any(frozenset(layers.get(beside, ())) != fuller for beside in (number - 1, number + 1)):
        return False
    if sum(not absent <= leaves for leaves in layers.values() if len(leaves & fuller) * 2 > len(fuller)) > 1:
        return False
    siblings = all(any(leaf.startswith(_around(name)) for leaf in layers[number]) for name in absent)
    return siblings and not any(_names_layer(level, number, len(layers)) for level in levels(config))


def _around(leaf: str) -> str:
    """The common prefix of a module's siblings: "mlp." for mlp.down_proj.weight, nothing for a norm's weight."""
    parts = leaf.split(".")
    return f"{parts[0]}." if len(parts) > 2 else ""


def _names_layer(level: Mapping[str, object], number: int, count: int) -> bool:
    """Whether an entry of a config may be about this very layer: a list of its kinds or of numbers, an interval, an offset."""
    for key, value in level.items():
        if isinstance(value, (list, tuple)) and 0 < len(value) <= count:
            if len(value) == count and value.count(value[number]) < count:
                return True
            if any(type(item) is int and item in (number, number + 1) for item in value):
                return True
        if PLACE.search(key) and not counts_layers(key) and type(value) is int and value in (number, number + 1):
            return True
    return False


def _are_alike(layers: Layers, hole: int) -> bool:
    """Whether the layers around a hole are blocks with the same tensors; between others there may be a module without any."""
    before = max((number for number in layers if number < hole), default=None)
    after = min((number for number in layers if number > hole), default=None)
    return before is not None and after is not None and is_block(layers, before) and layers[before] == layers[after]
