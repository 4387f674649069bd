"""From the drift of every tensor to what people look at: groups of layers, what was frozen, and a map of layers and modules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt_cli.name_patterns import pattern_of, ranged
from ckpt_cli.results.drift import BaseComparison, DriftGroup, FrozenPart, Heatmap, HeatmapBlock, HeatmapRow, TensorDrift

LISTS = frozenset({"layers", "layer", "blocks", "block", "h"})
"""What a stack of layers is called, where it has a single layer only."""

EXPERT = re.compile(r"(?<=experts\.)[0-9]+(?=\.|$)")
PARAMETERS = (".weight", ".bias")
"""Parameters of one module: they share its row."""


def by_drift(drift: TensorDrift | DriftGroup) -> tuple[int, float]:
    """Sorts the biggest relative change first: NaN, then numbers, then changes without numbers, then what has not changed."""
    value = drift.relative_l2
    if not drift.changed:
        return 3, 0.0
    if value is None:
        return 2, 0.0
    return (0, 0.0) if math.isnan(value) else (1, -value)


def group_drifts(drifts: Iterable[TensorDrift]) -> tuple[DriftGroup, ...]:
    """One group per pattern of names, the biggest drift first; the relative L2 is that of all its tensors as one vector."""
    patterns: dict[tuple[str, str], list[tuple[TensorDrift, tuple[int, ...]]]] = {}
    for drift in drifts:
        pattern, numbers = pattern_of(drift.name)
        patterns.setdefault((pattern, drift.kind), []).append((drift, numbers))
    groups = (
        _group(ranged(pattern, [numbers for _, numbers in found]), [drift for drift, _ in found])
        for (pattern, _), found in patterns.items()
    )
    return tuple(sorted(groups, key=by_drift))


def _group(pattern: str, drifts: Sequence[TensorDrift]) -> DriftGroup:
    compared = sum(drift.compared for drift in drifts)
    means = [drift.mean_abs * (drift.compared / compared) for drift in drifts if drift.mean_abs is not None and compared]
    l2, base_norm = _length(drift.l2 for drift in drifts), _length(drift.base_norm for drift in drifts)
    distance = _largest(drift.cosine_distance for drift in drifts)
    return DriftGroup(
        pattern=pattern,
        kind=drifts[0].kind,
        tensors=len(drifts),
        changed_tensors=sum(drift.changed > 0 for drift in drifts),
        elements=sum(drift.elements for drift in drifts),
        compared=compared,
        changed=sum(drift.changed for drift in drifts),
        max_abs=_largest(drift.max_abs for drift in drifts),
        mean_abs=sum(means) if l2 is not None else None,
        l2=l2,
        base_norm=base_norm,
        relative_l2=_quotient(l2, base_norm),
        cosine=None if distance is None else 1.0 - distance,
        cosine_distance=distance,
    )


def _largest(values: Iterable[float | None]) -> float | None:
    """The largest number, NaN if there is one, None if there is none."""
    known = [value for value in values if value is not None]
    return math.nan if any(map(math.isnan, known)) else max(known, default=None)


def _length(norms: Iterable[float | None]) -> float | None:
    """The norm of vectors put after each other. ``hypot`` squares without overflow, and sums them to the last digit."""
    known = [norm for norm in norms if norm is not None]
    if not known:
        return None
    return math.nan if any(map(math.isnan, known)) else math.hypot(*known)


def _quotient(l2: float | None, base_norm: float | None) -> float | None:
    if l2 is None or base_norm is None:
        return None
    if not base_norm:
        return math.inf if l2 > 0 else l2
    return math.nan if math.isinf(l2) and math.isinf(base_norm) else l2 / base_norm


def covered_text(comparison: BaseComparison, base: str, place: str) -> str:
    """How much of each side was compared by value, and why not the rest; empty if that is all of both.

    ``base`` is what the base is called, ``place`` where the other tensors are ("in B").
    """
    found = comparison.coverage
    if found is None or not found.partial:
        return ""
    of = (
        f"{found.base:,} elements in {base} and of {found.mine:,} {place}"
        if found.base != found.mine
        else f"{found.base:,} elements on either side"
    )
    counted = (
        (len(comparison.reshaped), "has another shape", "have other shapes"),
        (len(comparison.missing) + len(comparison.extra), "is on one side only", "are on one side only"),
    )
    why = ", ".join(f"{count:,} {f'tensor {one}' if count == 1 else f'tensors {several}'}" for count, one, several in counted if count)
    return f"only {found.elements:,} of {of}: {why}"


# -- what was frozen -------------------------------------------------------------------------------------------------


def frozen_parts(drifts: Iterable[TensorDrift], others: Iterable[str] = ()) -> tuple[FrozenPart, ...]:
    """The largest parts of the model (beginnings of names) in which nothing changed, the one with most tensors first.

    ``others`` are tensors that could not be compared: a part with one of them is not frozen. Layers that are frozen alike are
    one entry: ``model.layers.{0..25}.*``.
    """
    frozen: list[str] = []
    moved: set[str] = set()
    for drift in drifts:
        if drift.changed:
            moved.update(_beginnings(drift.name))
        else:
            frozen.append(drift.name)
    for name in others:
        moved.update(_beginnings(name))
    parts: dict[str, list[str]] = {}
    for name in frozen:
        parts.setdefault(next((start for start in _beginnings(name) if start not in moved), name), []).append(name)
    alike: dict[str, list[tuple[tuple[int, ...], int]]] = {}
    for part, names in parts.items():
        pattern, numbers = pattern_of(names[0] if len(names) == 1 else f"{part}.*" if part else "*")
        alike.setdefault(pattern, []).append((numbers, len(names)))
    found = [
        FrozenPart(part=ranged(pattern, [numbers for numbers, _ in members]), tensors=sum(count for _, count in members))
        for pattern, every in alike.items()
        for members in ([every] if _is_full([numbers for numbers, _ in every]) else [[member] for member in every])
    ]
    return tuple(sorted(found, key=lambda part: -part.tensors))


def _is_full(numbers: Sequence[Sequence[int]]) -> bool:
    """Whether ranges of each column say these rows and no others."""
    return len(set(map(tuple, numbers))) == math.prod(len(set(column)) for column in zip(*numbers, strict=True))


def _beginnings(name: str) -> list[str]:
    """Every beginning of a name that ends before a dot, the empty one first, the name itself last."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) + 1)]


# -- colours ---------------------------------------------------------------------------------------------------------

DECADES = 6
"""Changes this many decades below the largest are as good as the smallest."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A log scale from 10**low to 10**high; ``more_below``: there are smaller values, which count as the lowest."""

    low: int
    high: int
    more_below: bool

    def place(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        return min(max((math.log10(value) - self.low) / (self.high - self.low), 0.0), 1.0)


def scale_of(values: Iterable[float | None]) -> Scale | None:
    """Whole decades that hold the changes, at most `DECADES`; None if nothing changed."""
    known = [value for value in values if value is not None and 0 < value < math.inf]
    if not known:
        return None
    high = math.ceil(math.log10(max(known)))
    lowest = min(math.floor(math.log10(min(known))), high - 1)
    low = max(lowest, high - DECADES)
    return Scale(low, high, more_below=lowest < low)


def largest_rows(rows: Sequence[HeatmapRow], limit: int) -> tuple[HeatmapRow, ...]:
    """At most ``limit`` rows, those with the biggest drift (NaN before all), in their order."""

    def peak(i: int) -> float:
        return max((math.inf if math.isnan(value) else value for value in rows[i].values if value is not None), default=-1.0)

    chosen = sorted(sorted(range(len(rows)), key=peak, reverse=True)[:limit])
    return tuple(rows[i] for i in chosen)


def change_text(value: float | None) -> str:
    """A relative change as a screen or a picture names it."""
    return "changed" if value is None else "unchanged" if value == 0 else f"{value:.2g}"


# -- layers and modules ----------------------------------------------------------------------------------------------


def heatmap_of(drifts: Sequence[TensorDrift]) -> Heatmap:
    """Relative L2 per layer and module: one block per stack of layers, and everything outside of them.

    A stack is a list of modules in a name (``model.layers``, ``visual.blocks``). Its rows are names without the number of the
    layer; weight and bias of a module share a row, and so do experts of one layer. Their tensors count as one vector. Tensors without
    distances have no place in it.
    """
    drifts = [drift for drift in drifts if drift.kind == "floating"]
    split = {drift.name: _split(drift.name) for drift in drifts}
    stacks = _stacks(place for place in split.values() if place is not None)
    blocks: dict[str, dict[str, dict[int, list[TensorDrift]]]] = {}
    outside: dict[str, list[TensorDrift]] = {}
    for drift in drifts:
        place = split[drift.name]
        if place is not None and place[0] in stacks:
            stack, layer, rest = place
            blocks.setdefault(stack, {}).setdefault(_module(rest), {}).setdefault(layer, []).append(drift)
        else:
            outside.setdefault(_module(drift.name), []).append(drift)
    return Heatmap(
        blocks=tuple(_block(stack, rows) for stack, rows in blocks.items()),
        outside=tuple(HeatmapRow(module=module, values=(_cell(found),)) for module, found in outside.items()),
    )


def _block(stack: str, rows: dict[str, dict[int, list[TensorDrift]]]) -> HeatmapBlock:
    layers = sorted({layer for cells in rows.values() for layer in cells})
    return HeatmapBlock(
        stack=stack,
        layers=tuple(layers),
        rows=tuple(
            HeatmapRow(module=module, values=tuple(_cell(cells[layer]) if layer in cells else None for layer in layers))
            for module, cells in rows.items()
        ),
    )


def _cell(drifts: Sequence[TensorDrift]) -> float | None:
    return _quotient(_length(drift.l2 for drift in drifts), _length(drift.base_norm for drift in drifts))


def _split(name: str) -> tuple[str, int, str] | None:
    """(stack, layer, rest) at the first number of a name; None without one, or with a parameter right behind it."""
    parts = name.split(".")
    for i in range(1, len(parts) - 2):
        if parts[i].isascii() and parts[i].isdigit():
            return ".".join(parts[:i]), int(parts[i]), ".".join(parts[i + 1 :])
    return None


def _stacks(places: Iterable[tuple[str, int, str]]) -> set[str]:
    """Lists whose members are alike: some name comes back in another member. A single member needs the name of a list of layers."""
    layers: dict[str, dict[str, set[int]]] = {}
    for stack, layer, rest in places:
        layers.setdefault(stack, {}).setdefault(rest, set()).add(layer)
    return {
        stack for stack, rests in layers.items() if stack.rpartition(".")[2] in LISTS or any(len(found) > 1 for found in rests.values())
    }


def _module(name: str) -> str:
    """The name of the module that a parameter belongs to, the same for all experts.

    >>> _module("mlp.experts.17.down_proj.weight")
    'mlp.experts.*.down_proj'
    """
    for ending in PARAMETERS:
        name = name.removesuffix(ending)
    return EXPERT.sub("*", name)
