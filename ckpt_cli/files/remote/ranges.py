"""Which ranges of a file are asked for, when it is known what will be read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

NEAR = 4 << 10
"""Bytes between two ranges of weights that are read with them: a request for each would cost more, and headers lie there anyway."""

GAP = 64 << 10
"""The same for headers, which are few bytes in many places."""

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

    Ranges with at most `GAP` bytes between them become one; with ``exactly`` only `NEAR`, so that no other tensor is read.
    """
    wanted = sorted(
        (max(0, start), min(size, stop), order) for order, (start, stop) in enumerate(ranges) if max(0, start) < min(size, stop)
    )
    allowed = NEAR if exactly else GAP
    merged: list[list[tuple[int, int, int]]] = []
    end = 0
    for start, stop, order in wanted:
        near = start < end or (start - end <= allowed and abs(order - merged[-1][-1][2]) <= APART) if merged else False
        if near:
            merged[-1].append((start, stop, order))
        else:
            merged.append([(start, stop, order)])
        end = max(end, stop) if near else stop
    return Extents.of(part for members in merged for part in _cut(members, largest))


def _cut(members: Sequence[tuple[int, int, int]], largest: int) -> Iterable[Extent]:
    """Parts of nearly equal size, of at most ``largest`` bytes, of the range that these have in common."""
    start, stop = members[0][0], max(stop for _, stop, _ in members)
    count = -(-(stop - start) // largest)
    first = 0
    for begin, end in pairwise(start + (stop - start) * i // count for i in range(count + 1)):
        while members[first][1] <= begin and first < len(members) - 1:
            first += 1
        needed, order = 0, members[first][2]
        for low, high, when in members[first:]:
            if low >= end:
                break
            needed += max(0, min(high, end) - max(low, begin))
            order = min(order, when)
        yield Extent(begin, end, order, needed)
