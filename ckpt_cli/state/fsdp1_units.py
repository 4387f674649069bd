"""FSDP1's flat parameters: which parameters lie in which of them, proved from their sizes.

FSDP1 (``use_orig_params=False``) concatenates the parameters of a unit in the order of its modules, pads the result to a
multiple of the ranks, and gives each rank one part (torch/distributed/fsdp/_flat_param.py). A unit is a wrapped module with
everything below it; what no unit holds belongs to the root, which comes first. Optimizers number units in this order.
"""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]

MAX_VISITS = 20_000
"""Choices that are tried; where there are more, nothing is proved."""


def find_units(names: Sequence[str], sizes: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]] | None:
    """For each flat parameter, the indices of its parameters in order; None unless exactly one division fits.

    ``names`` and ``sizes`` (elements) are the parameters in the order of their modules; ``lengths`` the elements of one
    rank's part of each flat parameter, of which there are ``parts``. Units may lie inside of units; but a list of modules
    (``layers``) is no unit together with some of its elements and without others that are alike: trainers wrap by class or size.
    """
    alike = _alike(names, sizes)
    found: list[list[list[int]]] = []
    try:
        for rooted in (True, False):
            search = _Search(_modules(names), alike, sizes, lengths[1:] if rooted else lengths, parts)
            found += [units for units in search.divisions(lengths[0] if rooted else None) if units not in found]
    except (_TooMany, RecursionError):
        return None
    return found[0] if len(found) == 1 else None


def unproved(
    names: Sequence[str], sizes: Sequence[int], units: Sequence[Sequence[int]], lengths: Sequence[int], parts: int, buffers: bool
) -> str | None:
    """Something so small that sizes do not prove its place: without it the padding would hide the difference. None if there is none.

    That is a module beside the units that may be a frozen unit of its own; with ``buffers``, where nothing tells buffers
    from parameters, also any single tensor.
    """
    root = set(units[0])
    inside = (
        [(names[index], [index], unit, length) for unit, length in zip(units, lengths, strict=True) for index in unit] if buffers else []
    )
    beside = [span for span in _modules(names) if root.issuperset(range(*span))]
    inside += [(names[start].rpartition(".")[0], list(range(start, stop)), units[0], lengths[0]) for start, stop in beside]
    for name, members, unit, length in inside:
        rest = sum(sizes[index] for index in unit) - sum(sizes[index] for index in members)
        if rest > 0 and -(-rest // parts) == length:
            return name
    return None


def _own(span: Range, units: Sequence[Range]) -> list[int]:
    """The parameters of a module that no unit below it holds."""
    inside = [other for other in units if other != span and span[0] <= other[0] and other[1] <= span[1]]
    return [index for index in range(*span) if not any(start <= index < stop for start, stop in inside)]


def _modules(names: Sequence[str]) -> list[Range]:
    """The ranges of parameters below each module, by their begin, the widest first; the root is none of them."""
    below: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        parts = name.split(".")
        for depth in range(1, len(parts)):
            below.setdefault(".".join(parts[:depth]), []).append(index)
    ranges = {(held[0], held[-1] + 1) for held in below.values() if held[-1] - held[0] + 1 == len(held)}
    return sorted(ranges - {(0, len(names))}, key=lambda span: (span[0], -span[1]))


def _alike(names: Sequence[str], sizes: Sequence[int]) -> list[tuple[Range, set[Range]]]:
    """Lists of modules (``layers.0``, ``layers.1``, ...), with those elements that have parameters of the same names and sizes."""
    content: dict[str, list[tuple[str, int]]] = {}
    held: dict[str, list[int]] = {}
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        parts = name.split(".")
        for depth in range(1, len(parts)):
            prefix = ".".join(parts[:depth])
            held.setdefault(prefix, []).append(index)
            if parts[depth - 1].isdecimal():
                content.setdefault(prefix, []).append((".".join(parts[depth:]), size))
    spans = {prefix: (indices[0], indices[-1] + 1) for prefix, indices in held.items()}
    groups: dict[tuple[str, tuple[tuple[str, int], ...]], set[Range]] = {}
    for prefix, parameters in content.items():
        groups.setdefault((prefix.rpartition(".")[0], tuple(parameters)), set()).add(spans[prefix])
    return [(spans[parent], group) for (parent, _), group in groups.items() if parent]


class _TooMany(Exception):
    pass


class _Search:
    """Chooses modules, in the order in which FSDP numbers them, so that what each holds itself fits its length.

    A module that is chosen must give between ``low`` and ``high`` elements to units inside of it.
    """

    def __init__(
        self, modules: Sequence[Range], alike: Sequence[tuple[Range, set[Range]]], sizes: Sequence[int], lengths: Sequence[int], parts: int
    ) -> None:
        self._modules = modules
        self._alike = alike
        self._lengths = lengths
        self._parts = parts
        self._before = [0]
        for size in sizes:
            self._before.append(self._before[-1] + size)
        self._visits = 0
        self._found: list[list[list[int]]] = []
        self._rooted = False

    def divisions(self, root_length: int | None) -> list[list[list[int]]]:
        """At most two ways; ``root_length``: the length of what no unit holds, None if units hold everything."""
        self._rooted = root_length is not None
        total = self._before[-1]
        low, high = (total, total) if root_length is None else self._given(total, root_length)
        if high >= low:
            self._choose([], 0, [((0, len(self._before) - 1), low, high, 0)])
        return self._found

    def _given(self, size: int, length: int) -> tuple[int, int]:
        """How many elements of a module of ``size`` are other units', so that the rest has this length."""
        return max(0, size - length * self._parts), size - ((length - 1) * self._parts + 1)

    def _choose(self, chosen: list[Range], index: int, open_units: list[tuple[Range, int, int, int]]) -> None:
        self._visits += 1
        if self._visits > MAX_VISITS:
            raise _TooMany
        if len(chosen) == len(self._lengths):
            units = set(chosen)
            uneven = any(parent in units and group & units and not group <= units for parent, group in self._alike)
            if not uneven and all(given >= low for _, low, _, given in open_units):
                spans = [*([(0, len(self._before) - 1)] if self._rooted else []), *chosen]
                division = [_own(span, chosen) for span in spans]
                # A module that gives all but its inner module's neighbours away is the same unit under another name.
                if division not in self._found:
                    self._found.append(division)
            return
        for position in range(index, len(self._modules)):
            start, stop = span = self._modules[position]
            if any(given + self._between(start, unit[1]) < low for unit, low, _, given in open_units):
                return
            size = self._between(start, stop)
            low, high = self._given(size, self._lengths[len(chosen)])
            around = [unit for unit in open_units if unit[0][1] >= stop]
            if high < 0 or any(given < needed for unit, needed, _, given in open_units if unit[1] < stop):
                continue
            outer, needed, most, given = around[-1]
            if given + size <= most:
                self._choose([*chosen, span], position + 1, [*around[:-1], (outer, needed, most, given + size), (span, low, high, 0)])
                if len(self._found) > 1:
                    return

    def _between(self, start: int, stop: int) -> int:
        return self._before[stop] - self._before[start] if start < stop else 0
