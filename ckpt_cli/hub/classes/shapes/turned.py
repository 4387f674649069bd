"""Tensors that loaders take with two dimensions either way round: files of two versions of transformers have them otherwise.

Which way round a square one is, its shape does not say. All of a module are saved by one version, so that its other tensors do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.classes.rules import HubRules, rules_for
from ckpt_cli.hub.config import Config
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few, plural
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.views import transposed

TURNED_IN = 5
"""The version of transformers from which on models have these tensors the other way round."""

Dims = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Turned:
    """Names of tensors that are the other way round than those they are compared with, and of square ones of which nothing tells it."""

    names: frozenset[str] = frozenset()
    unproved: tuple[str, ...] = ()

    def among(self, names: Collection[str]) -> Turned:
        """Those of them that are of these ``names``."""
        return Turned(self.names & frozenset(names), tuple(name for name in self.unproved if name in names))


def turned_names(others: Mapping[str, Shape], mine: Mapping[str, Shape], rules: HubRules | None, apart: bool | None = None) -> Turned:
    """Which of the tensors ``others`` are the other way round than ``mine``.

    What no shape tells is decided by the other tensors of a module, then by those of all modules, then by ``apart``: whether versions of
    transformers wrote the two that have them differently, None if that is unknown.
    """
    may_be = {name: dims for name, dims in _turning(others, rules) if exchanged(others[name], dims) is not None}
    seen = {name: turned for name in may_be if name in mine and (turned := _is_turned(others[name], mine[name], may_be[name])) is not None}
    of_modules: dict[str, set[bool]] = {}
    for name, turned in seen.items():
        of_modules.setdefault(_module(name), set()).add(turned)
    names: set[str] = set()
    unproved: list[str] = []
    for name, dims in may_be.items():
        if name in mine and mine[name] not in (others[name], exchanged(others[name], dims)):
            continue  # neither way round: another model, or resized
        told = {seen[name]} if name in seen else of_modules.get(_module(name)) or set(seen.values())
        if (next(iter(told)) if len(told) == 1 else apart) is True:
            names.add(name)
        elif name in mine and len(told) != 1 and apart is None:
            unproved.append(name)
    return Turned(frozenset(names), tuple(unproved))


def turned_alike(
    others: Mapping[str, Tensor],
    mine: Mapping[str, Tensor],
    config: Config,
    other_config: Config,
    of_class: Mapping[str, Shape] = MappingProxyType({}),
) -> tuple[Mapping[str, Tensor], Turned]:
    """The tensors ``others`` the same way round as ``mine``, as views, and which of them were turned.

    A side without a config uses that of the other. Where ``mine`` has none of them, they are turned to what the version of transformers
    that wrote its config loads, by the shapes ``of_class``.
    """
    rules = rules_for(config or other_config)
    if rules is None or not rules.turning:
        return others, Turned()
    shapes = {name: tensor.shape for name, tensor in mine.items()}
    if not any(_turning(mine, rules)):
        shapes |= _of_version(of_class, config or other_config, rules)
    found = turned_names({name: tensor.shape for name, tensor in others.items()}, shapes, rules, written_apart(config, other_config))
    dims = dict(_turning(found.names, rules))
    return {name: transposed(tensor, *dims[name]) if name in dims else tensor for name, tensor in others.items()}, found


def turned_notes(found: Turned, whose: str) -> list[Note]:
    """What is said of the tensors of a side, ``whose``, that was made the same way round as the other."""
    notes = []
    if found.names:
        text = f"{plural(len(found.names), 'tensor', 'tensors')} of {whose} {'is' if len(found.names) == 1 else 'are'} stored with two "
        text += f"dimensions exchanged, as another version of transformers has them, and turned: {few(grouped(sorted(found.names)), 3)}"
        notes.append(Note("info", "turned", text))
    if found.unproved:
        text = f"nothing tells whether {few(grouped(found.unproved), 3)} of {whose} have two dimensions exchanged, as versions of "
        notes.append(Note("warning", "unproved-turn", f"{text}transformers differ: they are square, and were taken as they are"))
    return notes


def fitting_turned(reshaped: Mapping[str, tuple[Shape, Shape]], rules: HubRules | None) -> set[str]:
    """Of tensors whose shape in the class and whose own differ: those that loaders turn."""
    return {name for name, dims in _turning(reshaped, rules) if _is_turned(reshaped[name][1], reshaped[name][0], dims)}


def misread(turned: set[str], held: Mapping[str, Shape], rules: HubRules | None) -> tuple[str, ...]:
    """Square tensors in modules of which another one is ``turned``: loaders take them as they are, so the wrong way round."""
    modules = {_module(name) for name in turned}
    square = (name for name, dims in _turning(held, rules) if exchanged(held[name], dims) == held[name]) if modules else ()
    return tuple(name for name in square if _module(name) in modules)


def written_apart(config: Config, other: Config) -> bool | None:
    """Whether versions of transformers wrote two configs that have these tensors differently; None if one does not say its version."""
    later = [_is_later(each) for each in (config, other)]
    return None if None in later else later[0] != later[1]


def _of_version(shapes: Mapping[str, Shape], config: Config, rules: HubRules) -> dict[str, Shape]:
    """Of the shapes of a class those that may be either way round, as the version of transformers that wrote a config has them."""
    later = _is_later(config)
    found = dict(_turning(shapes, rules)) if later is not None else {}
    return {name: shape for name, dims in found.items() if (shape := shapes[name] if later else exchanged(shapes[name], dims)) is not None}


def exchanged(shape: Shape, dims: Dims) -> Shape | None:
    """A shape with two dimensions exchanged, None if it lacks them."""
    if not all(0 <= dim < len(shape) for dim in dims):
        return None
    lengths = list(shape)
    lengths[dims[0]], lengths[dims[1]] = shape[dims[1]], shape[dims[0]]
    return tuple(lengths)


def _turning(names: Iterable[str], rules: HubRules | None) -> Iterator[tuple[str, Dims]]:
    """Those of the names whose tensors may be either way round, with the two dimensions."""
    turning = rules.turning if rules is not None else ()
    for name in names if turning else ():
        for renaming, dims in turning:
            parts = renaming.inside(name)
            if parts is not None and renaming.match.search(parts[1]):
                yield name, dims
                break


def _is_turned(held: Shape, wanted: Shape, dims: Dims) -> bool | None:
    """Whether a tensor is the other way round; None for a square one, and for one of another shape either way."""
    other = exchanged(held, dims)
    if other is None or other == held:
        return None
    return False if held == wanted else True if other == wanted else None


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _is_later(config: Config) -> bool | None:
    version = config.get("transformers_version")
    number = re.match(r"[0-9]{1,4}(?=\.)", version, re.ASCII) if isinstance(version, str) else None
    return None if number is None else int(number[0]) >= TURNED_IN
