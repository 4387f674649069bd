"""Compares the layers of a model of an unknown class with what its config counts, and with one another.

Only what no sound model lacks is called missing: layers between layers that are alike, those after them that the config counts, tensors
that one layer alone lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.layers.later import later_layers
from ckpt_cli.hub.layers.lengths import length_mismatches, no_layers
from ckpt_cli.hub.layers.mismatch import Mismatch
from ckpt_cli.hub.layers.stacks import stacks_of
from ckpt_cli.hub.layers.uneven import missing_between, uneven_layers


def layer_mismatches(config: Config, shapes: Mapping[str, Shape], *, predicted: bool) -> Iterator[Mismatch]:
    """What a config and the names of tensors tell of lost layers; ``predicted``: some tensors are those of multi-token prediction."""
    stacks = stacks_of(shapes)
    yield from later_layers(config, shapes)
    yield from no_layers(config, stacks, shapes)
    short = list(length_mismatches(config, stacks, predicted=predicted))
    yield from short
    told = {glob for item in short for glob in item.lacking}
    for stack, layers in stacks.items():
        yield from uneven_layers(stack, layers, config)
        if not any(glob.startswith(f"{stack}.") for glob in told):
            yield from missing_between(stack, layers)
