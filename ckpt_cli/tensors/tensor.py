"""The description that every format is read into: a tensor is a list of pieces.

These are plain frozen values; what crosses JSON is built from them in `ckpt_cli.results.checkpoint`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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

    @property
    def same_bytes_as(self) -> tuple[object, ...]:
        """Equal for two pieces that read the same bytes of the same source in the same way."""
        return (self.source.identity, self.offset, self.strides, self.box, self.swapped, self.conj, self.neg)


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

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize
