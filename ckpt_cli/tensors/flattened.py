"""Tensors whose pieces are boxes of another array (FSDP1's flat parameters), as tensors with boxes of their own shape."""

from __future__ import annotations

from dataclasses import replace

from ckpt_cli.boxes import contiguous_strides, whole
from ckpt_cli.errors import CorruptFile
from ckpt_cli.files.source import Identity, Source
from ckpt_cli.tensors.reading import PieceIndex, read_range
from ckpt_cli.tensors.tensor import Piece, Tensor


def in_own_shape(tensor: Tensor) -> Tensor:
    """The same tensor with pieces that are boxes of its shape, so that it can be cut by its dimensions."""
    if tensor.own_grid is None or tensor.own_grid == tensor.shape:
        return replace(tensor, own_grid=None)
    piece = Piece(
        FlatSource(tensor), 0, contiguous_strides(tensor.shape), whole(tensor.shape), tensor.pieces[0].rank if tensor.pieces else 0
    )
    return replace(tensor, pieces=(piece,) if tensor.numel else (), copies=(), check_copies=False, own_grid=None)


class FlatSource:
    """The bytes of a tensor in C order. Offsets and lengths are multiples of the size of an element."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._index = PieceIndex(tensor.pieces)
        found = {origin.identity: origin for piece in tensor.pieces for origin in piece.source.origins}
        self.origins: tuple[Source, ...] = tuple(found.values())
        self.size = tensor.nbytes
        first = tensor.pieces[0].source.identity
        self.identity: Identity = replace(first, path=f"{first.path}#{tensor.name}", size=self.size)

    @property
    def path(self) -> str:
        """The first file that holds a part of it."""
        return self._tensor.pieces[0].source.path

    @property
    def forward_only(self) -> bool:
        return any(origin.forward_only for origin in self.origins)

    def read_at(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on. Raises CorruptFile at the end, and what reading the files raises."""
        if offset + len(buffer) > self.size:
            raise CorruptFile(f"{len(buffer)} bytes at {offset} lie outside of a tensor of {self.size} bytes", path=self.path)
        size = self._tensor.dtype.itemsize
        read_range(self._tensor, offset // size, len(buffer) // size, buffer, self._index)

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on."""
        data = bytearray(length)
        self.read_at(offset, memoryview(data))
        return bytes(data)

    def check_unchanged(self) -> None:
        """Raise SourceChanged unless all files behind it are what they were."""
        for origin in self.origins:
            origin.check_unchanged()
