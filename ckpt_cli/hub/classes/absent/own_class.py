"""A class of the user's own, such as a subclass of one of transformers: the class of its model type that it is compared with.

transformers has no class of its name, and what loads it (the Auto classes) goes by model_type, without a word about the name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.classes.absent.own_words import not_there
from ckpt_cli.hub.classes.expected_tensors import Doubtful, Expected, expected_tensors
from ckpt_cli.hub.classes.known_names import fitting_class, likeliest_class, types_of
from ckpt_cli.hub.config import Config, architecture

if TYPE_CHECKING:
    from ckpt_cli.hub.classes.fit import Fit


def comparable(config: Config, names: Iterable[str] = ()) -> Config:
    """The config with a class of its model type in place of one that transformers lacks; otherwise unchanged.

    Of the classes of that type, the one that has the most of ``names``. Custom code (``auto_map``) loads itself, and stands for itself.
    """
    kind, model_type = architecture(config), config.get("model_type")
    if kind is None or not isinstance(model_type, str) or config.get("auto_map") or types_of(kind):
        return config
    likely = likeliest_class(model_type, kind, names)
    if likely is None or isinstance(expected_tensors(config), (Doubtful, Expected)):  # it has it, and no Auto class does
        return config
    return {**config, "architectures": [likely]}


def with_class(config: Config, names: Collection[str]) -> Config:
    """The config with the class that tensors of these ``names`` are compared with, also where it names none; unchanged without any."""
    if not config or architecture(config) is not None or config.get("auto_map"):
        return comparable(config, names)
    chosen = fitting_class(config, names)
    return {**config, "architectures": [chosen]} if chosen is not None else config


class Apart(str):
    """Why a class of the user's own is not compared with that of its model type: the names are others. They stay as they are."""


class HardlyOf(Apart, Doubtful):
    """A few names are those of the class that loaders choose by the model type, which may take them for it."""

    code = "replaced-tensors"


def not_of_class(fit: Fit, shapes: Mapping[str, Shape]) -> Apart | None:
    """Why a class of the user's own, with tensors of these ``shapes``, is not that of its model type; None if it may be a subclass.

    A subclass has most names of the other. Models that transformers took in later under names of its own (LLaVA's) share one or two by
    chance, such as ``lm_head.weight``: fewer than either side has for itself.
    """
    placed = fit.fitting + len(fit.reshaped) + len(fit.stand_ins) + len(fit.tied)
    apart = fit.is_foreign or placed < min(len(fit.missing) + len(fit.replaced), len(fit.extra))
    if not (fit.own and apart):
        return None
    why = not_there(fit.own, fit.kind, 0 if fit.is_foreign else placed, len(shapes))
    return Apart(why) if fit.is_foreign else HardlyOf(why)


def replaced(fit: Fit, shapes: Mapping[str, Shape], prefix: str) -> dict[str, Shape]:
    """Missing tensors of the class in whose place a subclass may have tensors of its own (``fit.extra``, of these ``shapes``).

    A head of another kind is in place of the head. Inside the base model, whose names begin with ``prefix``, what is in place of others
    holds as many numbers. Of a model with few names of the class, there are as many tensors.
    """
    if not fit.extra or fit.expected is None:
        return {}
    start = f"{prefix}." if prefix else ""
    inside = {name: shape for name, shape in fit.missing.items() if name.startswith(start)}
    own = [name for name in fit.extra if name.startswith(start)]
    if 2 * fit.fitting < fit.expected and len(fit.extra) >= len(fit.missing):
        return dict(fit.missing)
    found = {} if len(own) == len(fit.extra) else {name: shape for name, shape in fit.missing.items() if name not in inside}
    if sum(math.prod(shapes.get(name, ())) for name in own) >= sum(map(math.prod, inside.values())):
        found |= inside if own else {}
    return found
