"""Records of torch files carry a CRC-32: what is read of them on the way is compared with it, without reading anything twice."""

from __future__ import annotations

import threading
import zlib
from dataclasses import dataclass, field

from ckpt_cli.errors import CorruptFile
from ckpt_cli.files.crc32 import combined, crc_of
from ckpt_cli.tensors.tensor import Piece, Tensor


class DamagedRecord(CorruptFile):
    """A record that does not have the CRC-32 that was saved with it."""


@dataclass(slots=True)
class _Read:
    """What was read of a piece: CRC-32 and length in bytes by place, and how many bytes are missing."""

    tensor: Tensor
    piece: Piece
    missing: int
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)


class Records:
    """Collects the checksums of what several threads read of pieces, and compares when the last byte of a piece was read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[tuple[str, int], _Read] = {}

    def add(self, tensor: Tensor, piece: Piece, start: int, data: memoryview) -> None:
        """These bytes of a piece were read for a tensor, ``start`` bytes after its beginning. Raises CorruptFile if it is damaged.

        No ``data``: what was read is no range of the record, which is left to `check_rest`.
        """
        if piece.crc is None or not (data or start == 0):
            return
        crc, length = zlib.crc32(data), _length(tensor, piece)
        if len(data) < length:
            with self._lock:
                read = self._read.setdefault((tensor.name, id(piece)), _Read(tensor, piece, length))
                read.missing -= 0 if start in read.parts else len(data)
                read.parts[start] = crc, len(data)
                if read.missing:
                    return
                del self._read[tensor.name, id(piece)]
            crc = combined(part for _, part in sorted(read.parts.items()))
        _compare(tensor, piece, crc)

    def check_rest(self) -> None:
        """Read whole what was read in part or out of order, if its beginning was read here: one of several processes does it."""
        for read in self._read.values():
            if 0 in read.parts:
                _check(read.tensor, read.piece)


def check_pieces(tensor: Tensor) -> None:
    """Read all pieces of a tensor again. Raises CorruptFile for one whose record is damaged."""
    for piece in tensor.pieces:
        _check(tensor, piece)


def _check(tensor: Tensor, piece: Piece) -> None:
    if piece.crc is not None:
        _compare(tensor, piece, crc_of(piece.source, piece.offset, _length(tensor, piece)))


def _length(tensor: Tensor, piece: Piece) -> int:
    return piece.box.numel * tensor.dtype.itemsize


def _compare(tensor: Tensor, piece: Piece, now: int) -> None:
    if now != piece.crc:
        raise DamagedRecord(
            "the values of a tensor are not those that were saved",
            path=piece.source.path,
            tensor=tensor.name or None,
            expected=f"CRC-32 {piece.crc:08x} as the file says, not {now:08x}",
            hint="get the file again: it was damaged after it was saved; `ckpt verify --full` lists all that is damaged in a checkpoint",
        )
