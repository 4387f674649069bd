"""Compares the layers that a config counts with the stacks in the names of tensors, of a class that nobody knows.

Which count is of which stack is told by their words (`Count.means`); where they do not tell, and where another number of the config
explains how long a stack is, nothing is said. No class of transformers that is whole is told to lack a layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.config import Config, architecture, writes_texts
from ckpt_cli.hub.layers.counts import Count, layer_count, layer_counts, may_loop, most_layers, tower_of
from ckpt_cli.hub.layers.mismatch import Mismatch
from ckpt_cli.hub.layers.stacks import LISTED, Layers, has_lone_block, holes, is_block, is_inner
from ckpt_cli.names import few, plural, printable

NUMBERED = re.compile(r"[0-9](?![^.])")
"""The end of a part of a name that has a number, as layers have in all ways to name them."""


def no_layers(config: Config, stacks: Mapping[str, Layers], shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    """Tensors of so few numbered modules, whatever their names, that they may be those of a projector or a head alone.

    Where any layer is there, they are compared one by one. A model may have its layers in one tensor each, or use a few again and again.
    A single layer needs no number (``midlayer`` of EAGLE-3).
    """
    if any(is_block(layers, number) for layers in stacks.values() for number in layers):
        return
    wanted = most_layers(config)
    if wanted == 1 and has_lone_block(shapes):
        return
    numbered = {name[: match.end()] for name in shapes for match in NUMBERED.finditer(name)}
    if len(numbered) < wanted and not any(shape[:1] == (wanted,) and len(shape) > 1 for shape in shapes.values()):
        there = f"only {plural(len(numbered), 'numbered module')}" if numbered else "no numbered module"
        text = f"config.json says {plural(wanted, 'layer')}, and the tensors are of {there}: they may be those of one part of the model"
        yield Mismatch("no-layers", f"{text}, or whole as they are, as heads and draft models are, which their own program loads")


class Stacks:
    """The stacks of a model by name, with the tower of each and how long it is; ``outer`` are those of blocks that are in no other."""

    def __init__(self, stacks: Mapping[str, Layers], config: Config, counts: Sequence[Count]) -> None:
        kind = str(config.get("model_type")).replace("-", "_")
        self.counts = counts
        self.lengths = {stack: max(layers) + 1 for stack, layers in stacks.items()}
        self.outer = {stack: layers for stack, layers in stacks.items() if not is_inner(stack) and is_block(layers, max(layers))}
        towers = {stack: tower_of(".".join(part for part in stack.split(".") if part != kind)) for stack in stacks}
        are_alike = len({towers[stack] for stack in self.outer}) == 1
        self.towers = dict.fromkeys(stacks) if are_alike and not any(count.tower for count in counts) else towers

    @cached_property
    def groups(self) -> list[list[Count]]:
        """The counts of the same layers, but for what is only listed."""
        found: dict[tuple[str | None, frozenset[str]], list[Count]] = {}
        for count in self.counts:
            if not count.is_listed:
                found.setdefault((count.tower, count.words), []).append(count)
        return list(found.values())

    def meant(self, count: Count) -> set[str]:
        """The stacks that may be what is counted, but for those that a count with more words means.

        A tower is often called an encoder in the config alone: then the words do not matter.
        """
        if count.tower is not None and not any(count.means(stack, tower) for stack, tower in self.towers.items()):
            count = replace(count, words=frozenset())
        closer = [group[0] for group in self.groups if group[0].words > count.words]
        return {
            stack
            for stack, tower in self.towers.items()
            if count.means(stack, tower) and not any(other.means(stack, tower) for other in closer)
        }

    @property
    def has_sides(self) -> bool:
        """Whether counts of their own explain layers outside of towers: configs of encoders with decoders may count one of both again."""
        return any(tower is None and stack in self.outer and self.is_explained(stack) for stack, tower in self.towers.items())

    def is_explained(self, stack: str) -> bool:
        """Whether any number of the config that may mean a stack says how long it is."""
        return any(count.number == self.lengths[stack] and count.means(stack, self.towers[stack]) for count in self.counts)


def length_mismatches(config: Config, stacks: Mapping[str, Layers], *, predicted: bool) -> Iterator[Mismatch]:
    """Stacks that are shorter than what the config counts for them, or longer, where it is the only one of the model."""
    if may_loop(config):
        return
    held = Stacks(stacks, config, layer_counts(config))
    for group in held.groups:
        said, first = [count.number for count in group], group[0]
        meant = held.meant(first)
        own = [stack for stack in held.outer if stack in meant]
        if any(held.lengths[stack] in said for stack in meant):
            for stack in own:
                if held.lengths[stack] in said:
                    yield from length_mismatch(stack, held.outer[stack], held.lengths[stack], exact=False)
            continue
        wanted = (layer_count(config) if first.is_main else None) or max(said)
        unexplained = [stack for stack in own if not held.is_explained(stack)]
        if unexplained:
            stack = max(unexplained, key=lambda stack: sum(map(len, held.outer[stack].values())))
            exact = first.is_main and wanted > 1 and len(unexplained) == 1 and not predicted
            key = "" if first.is_main else first.name
            yield from length_mismatch(stack, held.outer[stack], wanted, exact=exact, key=key)
        elif first.is_main and held.outer and not own and not held.has_sides and architecture(config) is not None and writes_texts(config):
            text = f"config.json says {plural(wanted, 'layer')}, and the only layers are {few([f'{stack}.*' for stack in held.outer], 3)}"
            yield Mismatch("no-layers", f"{text}: they may be those of one part of the model")


def length_mismatch(stack: str, layers: Layers, wanted: int, *, exact: bool, key: str = "") -> Iterator[Mismatch]:
    """A stack that has fewer layers than the config says, by a ``key`` that is told if there is one; ``exact``: or more."""
    last = max(layers)
    absent = [*holes(layers), *range(last + 1, min(wanted, last + 1 + LISTED))]
    if absent and last < wanted and is_block(layers, last):
        listed = few([str(number) for number in absent], 3)
        which = f"layer {listed} is missing" if len(absent) == 1 else f"layers {listed} are missing"
        said = f"{plural(wanted, 'layer')} ({printable(key)})" if key else plural(wanted, "layer")
        text = f"config.json says {said}, but {stack} has {len(layers)}: {which}"
        yield Mismatch("missing-layers", text, tuple(f"{stack}.{number}.*" for number in absent))
    elif exact and last + 1 > wanted:
        yield Mismatch("extra-layers", f"config.json says {plural(wanted, 'layer')}, but {stack} ends with layer {last}")
