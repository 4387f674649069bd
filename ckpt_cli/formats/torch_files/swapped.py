"""Savers that store averaged weights in the place of the model's, so that they are loaded, and those of the training elsewhere.

============================  ==================  ==================================================================
saver                         the average         the weights that training continues with
============================  ==================  ==================================================================
Lightning's WeightAveraging   ``state_dict``      ``current_model_state``
mmengine's EMAHook            ``state_dict``      ``ema_state_dict``
composer's EMA                ``state.model``     ``state.algorithms``: the ``ema_model`` of one of them
============================  ==================  ==================================================================

Composer exchanges the two before it saves, if the average has begun, and notes it: ``ema_weights_active``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.formats.torch_files.averages import averaged_alone, telling
from ckpt_cli.formats.torch_files.way_down import Way

ALGORITHMS, EMA_MODEL, ACTIVE = "algorithms", "ema_model", "ema_weights_active"
HELD = ("named_parameters_dict", "named_buffers_dict")
"""Where composer's EMA has its second model."""

COMPOSER = "composer's EMA"


@dataclass(frozen=True, slots=True)
class Swapped:
    """What a saver has in two places: ``key`` is that of the ``current`` weights, ``place`` that of the average."""

    who: str
    place: str
    average: Mapping[Any, Any]
    key: str
    current: Mapping[Any, Any]
    counters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """What is said of the average."""
        return swapped_text(self.who, self.place, f"{self.key}: --type current")


def swapped_text(who: str, place: str, where: str) -> str:
    """What is said of an average in the place of the model."""
    return f"{place} holds averaged weights ({who}); those that training continues with are in {where}"


def swapped_in(way: Way, averages: Mapping[str, Any]) -> Swapped | None:
    """What a file has in the place of the model, if that is an average; ``averages`` are those beside the model."""
    entries = way.levels[0]
    meta = as_dict(entries.get("meta")) or {}
    average = as_dict(entries.get("state_dict"))
    current = as_dict(entries.get("current_model_state"))
    if average is not None and current is not None and "averaging_state" in entries:
        counters = telling(as_dict(entries.get("averaging_state")) or {})
        return Swapped("Lightning's WeightAveraging", "state_dict", average, "current_model_state", averaged_alone(current), counters)
    if average is not None and "mmengine_version" in meta and "ema_state_dict" in averages:
        current = averaged_alone(as_dict(entries["ema_state_dict"]) or {})
        return Swapped("mmengine's EMAHook", "state_dict", average, "ema_state_dict", current)
    for depth, level in enumerate(way.levels[:-1]):
        found = second_model(level.get(ALGORITHMS))
        if found is not None and found.active:
            keys = way.keys[:depth]
            key = ".".join(map(str, (*keys, ALGORITHMS, *found.keys)))
            return Swapped(COMPOSER, ".".join(map(str, way.keys)), way.entries, key, found.entries)
    return None


@dataclass(frozen=True, slots=True)
class SecondModel:
    """The second model of composer's EMA: its entries by the names of the model, the keys to it, and whether it is that of the training."""

    entries: Mapping[Any, Any]
    keys: tuple[str, ...]
    active: bool


def second_model(algorithms: Any) -> SecondModel | None:
    """That of the first algorithm that has one; algorithms are a dict, or a list of names and states."""
    for name, node in _named(algorithms):
        state = as_dict(node) or {}
        model = as_dict(state.get(EMA_MODEL)) or {}
        held = [inner for key in HELD if (inner := as_dict(model.get(key)))]
        if held:
            entries = {name: entry for inner in held for name, entry in inner.items()}
            return SecondModel(entries, (str(name), EMA_MODEL), state.get(ACTIVE) is True)
    return None


def _named(algorithms: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(algorithms, list):
        yield from ((pair[0], pair[1]) for pair in algorithms if isinstance(pair, (list, tuple)) and len(pair) == 2)
    else:
        yield from (as_dict(algorithms) or {}).items()
