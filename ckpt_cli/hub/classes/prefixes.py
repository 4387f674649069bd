"""Prefixes of wrappers in front of a model's names: which one goes away, or is missing, so that the names fit the class."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.classes.absent.own_class import not_of_class
from ckpt_cli.hub.classes.fit import ALL_NAMINGS, TRL, Fit, FitNaming, KnownClass, compared, known_class, value_heads
from ckpt_cli.hub.config import Config
from ckpt_cli.names import Naming, printable
from ckpt_cli.tensors.tensor import Tensor

MAX_PARTS = 6
"""Parts of a name of which a prefix may consist."""


@dataclass(frozen=True, slots=True)
class PrefixChange:
    """``removed`` from, or ``added`` to, the ``names`` of a model so that they are those of its class; ``whole``: these are all names."""

    removed: str = ""
    added: str = ""
    names: frozenset[str] = frozenset()
    whole: bool = True

    def __bool__(self) -> bool:
        return bool(self.names)

    def of(self, name: str) -> str:
        """The new name of a tensor."""
        return self.added + name.removeprefix(self.removed) if name in self.names else name

    @property
    def told(self) -> str:
        """What was done, for the report about names; empty if nothing was."""
        done = f"{printable(self.removed)} was removed from" if self.removed else f"{printable(self.added)} was prepended to"
        names = "every name" if self.whole else "one name" if len(self.names) == 1 else f"{len(self.names)} of the names"
        return f"{done} {names}" if self else ""


UNCHANGED = PrefixChange()


def common_prefix(kind: KnownClass, shapes: Mapping[str, Shape]) -> PrefixChange:
    """The prefix that all tensors of the model have in common, or lack, and without (with) which their names are those of the class.

    Other tensors may be beside them (an average's counter, a discriminator) if the class knows none of their names. No change if the
    names fit as they are, if nothing makes them fit, or if the tensors behind several prefixes might be the model.
    """
    best = kind.count(shapes)
    if not shapes or best == len(shapes) or (value_heads(shapes) and any(name.startswith(TRL) for name in shapes)):
        return UNCHANGED
    counts: dict[str, int] = {}
    for prefix, names in _prefixed(kind, shapes):
        rest = {name: shape for name, shape in shapes.items() if name not in names} if len(names) < len(shapes) else {}
        inner = {name.removeprefix(prefix): shapes[name] for name in names}
        count = kind.count(inner)
        if count > best and 2 * count >= len(names) and not rest.keys() & inner.keys() and not kind.count(rest):
            counts[prefix] = count
    if counts:
        own, most = f"{kind.known.prefix}.", max(counts.values())
        equal = [prefix for prefix, count in counts.items() if count == most]
        # Loaders take the base model's own prefix for the model, whatever is beside it; one inside another removes more than is needed.
        chosen = own if own in equal else min(equal, key=len)
        if own not in equal and not all(prefix.startswith(chosen) for prefix in equal):
            return UNCHANGED
        names = frozenset(name for name in shapes if name.startswith(chosen))
        return PrefixChange(chosen, "", names, len(names) == len(shapes))
    if not best and kind.known.prefix:
        return _lacking(kind, shapes, f"{kind.known.prefix}.")
    return UNCHANGED


def class_of(config: Config, shapes: Mapping[str, Shape]) -> KnownClass | str:
    """As `known_class`; a class of the user's own is compared with that of its model type only where it may be a subclass of it."""
    kind = known_class(config, shapes)
    return (not_of_class(compared_within(shapes, kind), shapes) if isinstance(kind, KnownClass) else None) or kind


def compared_within(shapes: Mapping[str, Shape], kind: KnownClass, namings: Sequence[FitNaming] = ALL_NAMINGS) -> Fit:
    """As `compared`; a class of the user's own may have the model as a module, whose name is in front of the names then."""
    change = common_prefix(kind, shapes) if kind.own else UNCHANGED
    if not change.removed or change.removed == f"{kind.known.prefix}.":
        return compared(shapes, kind, namings)
    start = change.removed
    fit = compared({change.of(name): shape for name, shape in shapes.items()}, kind, namings)
    return replace(
        fit,
        within=start,
        missing={start + name: shape for name, shape in fit.missing.items()},
        optional={start + name: shape for name, shape in fit.optional.items()},
        replaced={start + name: shape for name, shape in fit.replaced.items()},
        reshaped={start + name: pair for name, pair in fit.reshaped.items()},
        stand_ins={start + name: start + owner for name, owner in fit.stand_ins.items()},
        tied={start + name: start + owner for name, owner in fit.tied.items()},
        cut=tuple(start + name for name in fit.cut),
        misread=tuple(start + name for name in fit.misread),
        surplus=tuple(start + name for name in fit.surplus),
        extra=tuple(name if name in shapes else start + name for name in fit.extra),
        doubles="",
        lacks="",
    )


def compared_under(shapes: Mapping[str, Shape], kind: KnownClass, naming: Naming) -> Fit:
    """As `compared_within`, under the naming that was chosen. Names that are kept as they are may be those of the hub, all of them."""
    of_hub: tuple[FitNaming, ...] = ("hub", "older")
    fit = compared_within(shapes, kind, of_hub if naming == "hub" else (naming,))
    if naming == "hub" or not any(map(kind.knows, fit.extra)):
        return fit
    other = compared_within(shapes, kind, of_hub)
    return fit if any(map(kind.knows, other.extra)) else other


def named_in_memory(tensors: Mapping[str, Tensor], kind: KnownClass) -> bool:
    """Whether tensors that no rule renames have the names of a class in memory rather than those of its files.

    There are no rules for some classes, and those that ship are of another version than the class may be.
    """
    if not kind.has_shapes:
        return False
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return compared_within(shapes, kind, ("native",)).faults < compared_within(shapes, kind, ("hub", "older")).faults


def _lacking(kind: KnownClass, shapes: Mapping[str, Shape], added: str) -> PrefixChange:
    """The class's own prefix for the names that lack it: with them go those that have the same first part."""
    firsts = {first for first, names in _by_first(shapes).items() if kind.count({added + name: shapes[name] for name in names})}
    names = frozenset(name for name in shapes if name.partition(".")[0] in firsts)
    count = kind.count({added + name: shapes[name] for name in names})
    fits = names and 2 * count >= len(shapes) and not {added + name for name in names} & (shapes.keys() - names)
    return PrefixChange("", added, names, len(names) == len(shapes)) if fits else UNCHANGED


def _by_first(names: Collection[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.partition(".")[0], []).append(name)
    return found


def _prefixed(kind: KnownClass, names: Collection[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """The prefixes, ending in a dot, of names that the class does not know, the shortest first, with all names that have them."""
    unknown = [name for name in names if not kind.knows(name)]
    for length in range(1, MAX_PARTS + 1):
        starts = dict.fromkeys(filter(None, (_start(name, length) for name in unknown)))
        by_start: dict[str, list[str]] = {}
        for name in names if starts else ():
            by_start.setdefault(_start(name, length), []).append(name)
        yield from ((start, frozenset(by_start[start])) for start in starts)


def _start(name: str, length: int) -> str:
    """The first parts of a name, ending in a dot; empty if it has no more than these."""
    parts = name.split(".", length)
    return "".join(f"{part}." for part in itertools.islice(parts, length)) if len(parts) > length else ""
