"""Which dimensions of which tensors each number in a config decides: found out by changing one after the other.

Only this tells a config.json of another model from a tensor that was cut: a wrong number changes every tensor that it decides.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.classes.transformers_child import asked_child
from ckpt_cli.hub.config import Config
from ckpt_cli.name_patterns import pattern_of

SCHEMA = 1
"""Version of the numbers that are cached; those of another version are not used."""

UNSET = (24, 2)
"""What a number may be that a config leaves open."""

TensorKind = tuple[str, Shape]
"""A name with its numbers open, and the shape that the class has for it."""

Tensors = Mapping[str, Mapping[str, list[int]]]
"""Shapes by name, of one side and the other: as in memory, and as saved."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a config: the shapes that tensors would have with another one, and the names of those of which there would be more."""

    name: str
    shapes: Mapping[TensorKind, Shape]
    counted: frozenset[str]

    def dims(self, kind: TensorKind) -> set[int]:
        """The dimensions of a kind of tensors that this number decides."""
        return {dim for dim, (length, other) in enumerate(zip(kind[1], self.shapes.get(kind, kind[1]), strict=True)) if length != other}


def config_numbers(config: Config) -> tuple[Number, ...] | None:
    """The numbers that decide shapes in the model of a config, None if transformers cannot tell."""
    answer = asked_child("numbers", config, SCHEMA)
    if answer is None or "numbers" not in answer:
        return None
    return tuple(
        Number(item["name"], {(name, tuple(shape)): tuple(other) for name, shape, other in item["shapes"]}, frozenset(item["counted"]))
        for item in answer["numbers"]
    )


def numbers_that_decide(config: dict[str, Any], tensors: Tensors, built: Callable[[dict[str, Any]], Tensors]) -> list[dict[str, Any]]:
    """The numbers of a config that change ``tensors``, those of its model, as plain data; ``built`` gives those of a changed config."""
    found = []
    for name, changes in _changes(config):
        for change in changes:
            changed = copy.deepcopy(config)
            try:
                change(changed)
                others = built(changed)
            except Exception:  # noqa: BLE001 - not every number makes a model: the next one may
                continue
            shapes: dict[TensorKind, list[int]] = {}
            counted: set[str] = set()
            for side, own in tensors.items():
                other = others[side]
                for tensor, shape in own.items():
                    if tensor in other and other[tensor] != shape and len(other[tensor]) == len(shape):
                        shapes[pattern_of(tensor)[0], tuple(shape)] = other[tensor]
                if own.keys() != other.keys():
                    before, after = (Counter(pattern_of(tensor)[0] for tensor in names) for names in (own, other))
                    counted |= {pattern for pattern, count in before.items() if after[pattern] != count}
            if shapes:
                listed = [[pattern, list(shape), other] for (pattern, shape), other in shapes.items()]
                found.append({"name": name, "shapes": listed, "counted": sorted(counted)})
            break
    return found


Change = Callable[[dict[str, Any]], None]


def _changes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, list[Change]]]:
    """Each number of a config, also inside its parts and lists, with changes that may make another model of it, the best first."""
    name = ".".join(map(str, path))
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key == "id2label" and isinstance(inner, Mapping):
                yield f"{name}.num_labels".lstrip("."), [_labels(path, 2 * len(inner) + 1)]
            elif isinstance(key, str) and not key.endswith(("2id", "_id", "_version")):
                yield from _changes(inner, (*path, key))
    elif isinstance(value, (list, tuple)) and all(isinstance(item, (int, float)) for item in value):
        # Equal numbers of a list, such as one per layer, are changed together: fewer models to build.
        for item in dict.fromkeys(value):
            changed = [[new if other == item else other for other in value] for new in _others(item)]
            yield f"{name} ({item})", [_set(path, new) for new in changed]
    elif value is None or isinstance(value, (int, float)):
        yield name, [_set(path, new) for new in _others(value)]


def _others(value: float | None) -> list[Any]:
    """Other values than this one; most numbers can be doubled without breaking what they are divided by."""
    if value is None:
        return list(UNSET)
    if isinstance(value, bool):
        return [not value]
    if value <= 0:
        return [type(value)(1)]
    return [value * 2, value * 3, value // 2 or value + 1] if isinstance(value, int) else [value * 2, value / 2]


def _set(path: tuple[Any, ...], new: Any) -> Change:
    def change(config: dict[str, Any]) -> None:
        level: Any = config
        for key in path[:-1]:
            level = level[key]
        level[path[-1]] = new

    return change


def _labels(path: tuple[Any, ...], count: int) -> Change:
    def change(config: dict[str, Any]) -> None:
        level: Any = config
        for key in path:
            level = level[key]
        level["id2label"] = {number: f"LABEL_{number}" for number in range(count)}
        level.pop("label2id", None)
        level.pop("num_labels", None)

    return change
