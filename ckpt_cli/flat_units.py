"""FSDP1's flat parameters: which parameters lie in which of them, proved from their sizes.

FSDP1 (``use_orig_params=False``) concatenates the parameters of a unit in the order of its modules, pads the result to a
multiple of the ranks, and gives each rank one part (torch/distributed/fsdp/_flat_param.py). A unit is a wrapped module with
everything below it; what no unit holds belongs to the root, which comes first. Optimizers number units in this order.
"""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]

MAX_FOUND = 64
MAX_VISITS = 200_000


def find_units(names: Sequence[str], sizes: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]] | None:
    """For each flat parameter, the indices of its parameters in order; None unless exactly one division fits.

    ``names`` and ``sizes`` (elements) are the parameters in the order of their modules; ``lengths`` the elements of one
    rank's part of each flat parameter, of which there are ``parts``.
    """
    modules = _modules(names)
    found: list[list[list[int]]] = []
    everything = range(len(names))
    for rooted in (True, False):
        wanted = lengths[1:] if rooted else lengths
        for chosen in _divisions(modules, sizes, wanted, parts):
            inside = {index for start, stop in chosen for index in range(start, stop)}
            rest = [index for index in everything if index not in inside]
            fits = _fits(sum(sizes[i] for i in rest), lengths[0], parts) if rooted else not rest
            units = [list(range(start, stop)) for start, stop in chosen]
            division = [rest, *units] if rooted else units
            if fits and all(division) and division not in found:
                found.append(division)
            if len(found) > 1:
                return None
    return found[0] if found else None


def _fits(size: int, length: int, parts: int) -> bool:
    return -(-size // parts) == length


def _modules(names: Sequence[str]) -> list[Range]:
    """The ranges of parameters below each module, by their begin, the widest first; the root is none of them."""
    below: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        parts = name.split(".")
        for depth in range(1, len(parts)):
            below.setdefault(".".join(parts[:depth]), []).append(index)
    ranges = {(held[0], held[-1] + 1) for held in below.values() if held[-1] - held[0] + 1 == len(held)}
    return sorted(ranges - {(0, len(names))}, key=lambda span: (span[0], -span[1]))


def _divisions(modules: Sequence[Range], sizes: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[Range]]:
    """Ways to choose disjoint modules, in order, whose sizes fit ``lengths``; at most `MAX_FOUND`, none if there are too many."""
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    by_length: dict[int, list[Range]] = {}
    for start, stop in modules:
        by_length.setdefault(-(-(total[stop] - total[start]) // parts), []).append((start, stop))
    found: list[list[Range]] = []
    visits = 0
    pending: list[list[Range]] = [[]]
    while pending:
        chosen = pending.pop()
        visits += 1
        if visits > MAX_VISITS or len(found) > MAX_FOUND:
            return []
        if len(chosen) == len(lengths):
            found.append(chosen)
            continue
        free = chosen[-1][1] if chosen else 0
        # Enough modules of every size must be left for the rest.
        choices = [span for span in by_length.get(lengths[len(chosen)], ()) if span[0] >= free]
        needed = 1
        while len(chosen) + needed < len(lengths) and lengths[len(chosen) + needed] == lengths[len(chosen)]:
            needed += 1
        enough = [span for span in choices if _most_disjoint([other for other in choices if other[0] >= span[1]]) >= needed - 1]
        pending += [[*chosen, span] for span in reversed(enough)]
    return found


def _most_disjoint(spans: Sequence[Range]) -> int:
    count, end = 0, -1
    for start, stop in sorted(spans, key=lambda span: span[1]):
        if start >= end:
            count, end = count + 1, stop
    return count
