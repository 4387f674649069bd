"""Items that are described by the metadata alone: in a store, looking into each takes a request, and the metadata has names and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from ckpt_cli.boxes import Box, contiguous_strides
from ckpt_cli.dtypes import Dtype
from ckpt_cli.errors import CorruptFile
from ckpt_cli.files.source import FileSource, Source
from ckpt_cli.files.torch_file import Storage, StoredTensor
from ckpt_cli.formats.assembly import one_piece
from ckpt_cli.formats.dcp.metadata import Stored
from ckpt_cli.tensors.reading import element_bytes


class LaterItem:
    """The elements of an item in C order, as if they began where the item does. Who reads them after all looks into the item then."""

    forward_only = False

    def __init__(self, file: FileSource, name: str, stored: Stored, dtype: Dtype, box: Box, find: Callable[[], StoredTensor]) -> None:
        self._file, self._stored, self._find, shape = file, stored, find, box.extent
        # One item may hold several tensors.
        self.identity = replace(file.identity, path=f"{file.path}#{name}{list(box.offset)}")
        self.size = math.prod(shape) * dtype.itemsize
        if self.size > stored.length and not stored.transforms:
            message = f"an item of {stored.length} bytes holds no {dtype} tensor of shape {list(shape)}"
            raise CorruptFile(message, expected=f"at least {self.size} bytes")
        self.tensor = StoredTensor(
            Storage(self, "", stored.offset, self.size, None), dtype, shape, contiguous_strides(shape), stored.offset
        )

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def origins(self) -> tuple[Source, ...]:
        return (self._file,)

    @cached_property
    def _found(self) -> StoredTensor:
        return self._find()

    def read_at(self, offset: int, buffer: memoryview) -> None:
        tensor, size = one_piece("", self._found, 0), self.tensor.dtype.itemsize
        start = offset - self._stored.offset
        first, last = start // size, -(-(start + len(buffer)) // size)
        buffer[:] = element_bytes(tensor, first, last - first)[start - first * size :][: len(buffer)]

    def read(self, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self.read_at(offset, memoryview(data))
        return bytes(data)

    def check_unchanged(self) -> None:
        self._file.check_unchanged()
