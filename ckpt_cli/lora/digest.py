"""A checksum of an adapter, by which a model that holds it is recognised: the manifest of a merge lists those that were fused in."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from ckpt_cli.tensors.reading import blocks, element_bytes
from ckpt_cli.tensors.tensor import Tensor

BLOCK = 1 << 20


def adapter_digest(exported: Mapping[str, Tensor]) -> str:
    """The CRC-32 of the tensors of an adapter with their names, dtypes and shapes, whatever files they lie in; eight hexadecimal digits."""
    crc = 0
    for name in sorted(exported):
        tensor = exported[name]
        crc = zlib.crc32(f"{name} {tensor.dtype.code} {list(tensor.shape)}".encode(), crc)
        for start, count in blocks(tensor, BLOCK // tensor.dtype.itemsize):
            crc = zlib.crc32(element_bytes(tensor, start, count), crc)
    return f"{crc:08x}"
