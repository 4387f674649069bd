"""The description that every format is read into: a tensor is a list of pieces.

These are plain frozen values; what crosses JSON is built from them in `ckpt_cli.results.checkpoint`.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckpt_cli.boxes import Box, Shape
from ckpt_cli.dtypes import Dtype
from ckpt_cli.files.source import Source

LayoutKind = Literal["sharded", "strided", "replicated", "whole"]


@dataclass(frozen=True, slots=True)
class Piece:
    """These bytes of this source are this box of the tensor.

    Element ``i`` (one index per dimension, relative to the box) lies at ``offset + itemsize * sum(i * strides)`` bytes.
    ``swapped``: stored in the other byte order. ``conj`` / ``neg``: torch stored the bytes of the unconjugated /
    unnegated tensor and a flag. ``crc`` is the CRC-32 of the stored bytes if these are the whole of a checksummed record.
    """

    source: Source
    offset: int
    strides: Shape
    box: Box
    rank: int = 0
    swapped: bool = False
    conj: bool = False
    neg: bool = False
    crc: int | None = None

    @property
    def verbatim(self) -> bool:
        """Whether the stored bytes are the wanted bytes (only their order may differ)."""
        return not (self.swapped or self.conj or self.neg)

    def place_of(self, index: Shape, itemsize: int) -> int:
        """Where the element at an index relative to the box begins in the source, in bytes."""
        return self.offset + itemsize * sum(i * stride for i, stride in zip(index, self.strides, strict=True))

    def span(self, itemsize: int) -> tuple[int, int]:
        """Where its bytes begin and end in the source."""
        if not self.box.numel:
            return self.offset, self.offset
        last = sum(map(operator.mul, self.box.extent, self.strides)) - sum(self.strides)
        return self.offset, self.offset + (last + 1) * itemsize

    @property
    def same_bytes_as(self) -> tuple[object, ...]:
        """Equal for two pieces that read the same bytes of the same source in the same way."""
        return (self.source.identity, self.offset, self.strides, self.box, self.swapped, self.conj, self.neg)

    @property
    def text(self) -> str:
        """Which bytes of which file it is, and how they are read: for digests that other processes make too."""
        identity, box = self.source.identity, self.box
        return f"{identity.text}:{self.offset}:{self.strides}:{box.offset}:{box.extent}:{self.swapped}:{self.conj}:{self.neg}:{self.crc}"


def places_of(tensors: Iterable[Tensor]) -> frozenset[tuple[object, ...]]:
    """Where the bytes of tensors lie, whatever their files are called: equal for one checkpoint that is named in two ways.

    All names of one file count as one, so links and hard links change nothing; two components in one file lie in other places.
    """
    pieces = (piece for tensor in tensors for piece in tensor.pieces)
    return frozenset((*p.source.identity.file, p.source.identity.start, p.offset, p.strides, p.box) for p in pieces)


def same_bytes(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    """Whether two sets of tensors are the same bytes of the same files: comparing them says nothing. False if there are no bytes."""
    places = places_of(first)
    return bool(places) and places == places_of(second)


class PieceIndex:
    """The pieces of a tensor, found by the box they meet: sorted by their start along dimension 0."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = sorted(pieces, key=lambda piece: piece.box.offset[:1])
        self._starts = [piece.box.offset[0] for piece in self._pieces if piece.box.offset]
        self._reach: list[int] = []
        reach = 0
        for piece in self._pieces:
            if piece.box.offset:
                reach = max(reach, piece.box.offset[0] + piece.box.extent[0])
                self._reach.append(reach)

    def meeting(self, box: Box) -> Iterator[tuple[Piece, Box]]:
        """Every piece that meets ``box``, with the common box."""
        if not box.offset:
            yield from ((piece, box) for piece in self._pieces)
            return
        first = bisect_left(self._reach, box.offset[0] + 1)
        last = bisect_left(self._starts, box.offset[0] + box.extent[0])
        for piece in self._pieces[first:last]:
            common = piece.box.intersect(box)
            if common is not None:
                yield piece, common


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor: ``pieces`` tile its ``shape`` exactly; ``copies`` are replicas of pieces.

    ``layout`` is the placement as people write it, such as "Shard(0) x8"; ``alias_of`` names the tensor that shares
    its storage; ``check_copies`` asks the probe to compare the replicas with the pieces before anything is written.
    """

    name: str
    dtype: Dtype
    shape: Shape
    pieces: tuple[Piece, ...]
    copies: tuple[Piece, ...] = ()
    kind: LayoutKind = "whole"
    layout: str = ""
    alias_of: str | None = None
    check_copies: bool = False
    _index: PieceIndex | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def meeting(self, box: Box) -> Iterator[tuple[Piece, Box]]:
        """Every piece that meets ``box``, with the common box. Pieces are sorted once, when the first box is looked up."""
        if len(self.pieces) == 1:
            common = self.pieces[0].box.intersect(box)
            return iter(() if common is None else ((self.pieces[0], common),))
        index = self._index
        if index is None:
            index = PieceIndex(self.pieces)
            object.__setattr__(self, "_index", index)
        return index.meeting(box)
