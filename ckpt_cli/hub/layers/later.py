"""Stacks whose first layers are not there, where no config counts them: what a training of the last layers saves, or a part of a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.adapters.other_kinds import factors_alone, other_adapters
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.layers.counts import LAYERS, layer_counts, words_of
from ckpt_cli.hub.layers.mismatch import Mismatch
from ckpt_cli.hub.layers.stacks import Layers, is_block, is_inner, stacks_of
from ckpt_cli.hub.peft_names import has_adapters
from ckpt_cli.names import plural
from ckpt_cli.tensors.component import Note

CODE = "no-layers"
ADVICE = "if they are a part, merge the whole model, or pass --base DIR with --carry-from-base '*', where the base has these tensors too"
FIRST = 1
"""The highest number that the first layer has, in libraries that count so."""

NAMES = LAYERS | {"h"}
"""Words for layers in names: one of them alone may be a module of another kind, behind some without tensors."""


def later_layers(config: Config, shapes: Mapping[str, Shape]) -> Iterator[Mismatch]:
    """Stacks of layers that begin at a later one than the first. Adapters may be of any layers, and a config tells more."""
    if layer_counts(config):
        return
    for stack, layers in stacks_of(shapes).items():
        first = min(layers)
        if first > FIRST and not is_inner(stack) and _are_layers(stack, layers) and not _are_factors(shapes):
            absent = "layers 0 and 1 are" if first == 2 else f"the {plural(first, 'layer')} before it are"
            yield Mismatch(CODE, f"{stack} begins at {first}, and {absent} not there: these may be tensors of one part of a model")


def later_notes(config: Config, shapes: Mapping[str, Shape]) -> list[Note]:
    """The same as a warning, with what can be done."""
    return [Note("warning", item.code, f"{item.text}; {ADVICE}") for item in later_layers(config, shapes)]


def _are_layers(stack: str, layers: Layers) -> bool:
    """Whether numbered modules are layers of one kind: by their name, or since several in a row have the same tensors."""
    numbers = sorted(layers)
    called = not NAMES.isdisjoint(words_of(stack.rpartition(".")[2]))
    alike = any(after - before == 1 and layers[before] == layers[after] for before, after in itertools.pairwise(numbers))
    return is_block(layers, numbers[0]) and (called or alike)


def _are_factors(shapes: Mapping[str, Shape]) -> bool:
    return has_adapters(shapes) or other_adapters(shapes) is not None or factors_alone(shapes) is not None
