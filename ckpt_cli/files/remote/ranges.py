"""Which ranges of a file are asked for, when it is known what will be read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

NOTHING = 256
"""Bytes between two ranges that are always read with them: another request has longer headers."""

GAP = 1 << 20
"""More bytes than this are never read only because they lie between two ranges."""

WASTE = 0.03
"""The share of bytes that may be read only because they lie between two ranges."""

APART = 256
"""Ranges that are read at times farther apart than so many others are not asked for together."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of a file that one request fetches; ``order`` is when it is needed first, ``needed`` how many of its bytes are."""

    start: int
    stop: int
    order: int
    needed: int


@dataclass(frozen=True, slots=True)
class Extents:
    """Extents that do not overlap: by offset, and where each is in the order in which they are needed."""

    by_offset: Sequence[Extent]
    starts: Sequence[int]
    in_order: Sequence[Extent]
    places: dict[int, int]

    @classmethod
    def of(cls, extents: Iterable[Extent]) -> Extents:
        by_offset = sorted(extents, key=lambda extent: extent.start)
        in_order = sorted(by_offset, key=lambda extent: (extent.order, extent.start))
        starts = [extent.start for extent in by_offset]
        return cls(by_offset, starts, in_order, {extent.start: place for place, extent in enumerate(in_order)})

    def at(self, offset: int) -> Extent | None:
        """The extent that an offset lies in."""
        place = bisect_right(self.starts, offset) - 1
        return self.by_offset[place] if place >= 0 and offset < self.by_offset[place].stop else None

    def after(self, extent: Extent, count: int) -> Sequence[Extent]:
        """The extents that are needed next."""
        place = self.places[extent.start] + 1
        return self.in_order[place : place + count]


def extents_of(ranges: Iterable[tuple[int, int]], size: int, largest: int, *, exactly: bool) -> Extents:
    """What to ask for, of ranges (start, stop) that are read in this order from a file of ``size`` bytes, in requests of ``largest`` bytes.

    Ranges with little between them become one as long as all that lies between them is at most `WASTE` of what is needed; without
    ``exactly`` whenever it is at most `GAP`.
    """
    wanted = sorted(
        (max(0, start), min(size, stop), order, min(size, stop) - max(0, start))
        for order, (start, stop) in enumerate(ranges)
        if max(0, start) < min(size, stop)
    )
    allowed = _gap(wanted) if exactly else GAP
    merged: list[tuple[int, int, int, int]] = []
    for start, stop, order, needed in wanted:
        if merged:
            first, last, before, so_far = merged[-1]
            if start < last or (start - last <= allowed and (not exactly or abs(order - before) <= APART)):
                merged[-1] = first, max(last, stop), min(order, before), so_far + needed
                continue
        merged.append((start, stop, order, needed))
    return Extents.of(part for whole in merged for part in _cut(*whole, largest))


def _gap(wanted: Sequence[tuple[int, int, int, int]]) -> int:
    """The largest gap up to which all gaps together are little enough."""
    budget = WASTE * sum(needed for *_, needed in wanted)
    gaps, last = [], None
    for start, stop, *_ in wanted:
        if last is not None and start > last:
            gaps.append(start - last)
        last = max(last or 0, stop)
    total, allowed = 0, NOTHING
    for gap in sorted(gaps):
        total += gap
        if total > budget or gap > GAP:
            break
        allowed = max(allowed, gap)
    return allowed


def _cut(start: int, stop: int, order: int, needed: int, largest: int) -> Iterable[Extent]:
    """Parts of nearly equal size, of at most ``largest`` bytes."""
    length = stop - start
    count = -(-length // largest)
    if count == 1:
        yield Extent(start, stop, order, needed)
        return
    edges = [start + length * i // count for i in range(count + 1)]
    for begin, end in pairwise(edges):
        # Which bytes of a part are needed is not known here; all are counted, so that it is not let go too early.
        yield Extent(begin, end, order, end - begin)
