"""Elements of described tensors in memory: as bytes, as numpy arrays, as torch tensors, cast with the rounding of a merge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpt_cli.boxes import Box, whole
from ckpt_cli.dtypes import BY_CODE, CAST_NAMES, Dtype, numpy_dtype
from ckpt_cli.errors import CastOverflow, Unsupported, UsageError, install, reading
from ckpt_cli.tensors.casting import cast_here, view_as
from ckpt_cli.tensors.reading import element_bytes, read_tile, tiles
from ckpt_cli.tensors.records import Records
from ckpt_cli.tensors.tensor import Tensor

if TYPE_CHECKING:
    import numpy
    import torch

    Array = numpy.ndarray[Any, numpy.dtype[Any]]

TILE = 4 << 20
"""Bytes that are read at a time."""


def read_box(tensor: Tensor, box: Box, dtype: Dtype, records: Records | None = None) -> Iterator[tuple[Box, bytearray, int]]:
    """The elements of a box of the tensor's shape, tile by tile: the box of the tile, its bytes in C order, how many overflowed.

    ``records`` compares those that are read whole, perhaps in several boxes.
    """
    for part in tiles(box.extent, tensor.dtype.itemsize, TILE):
        tile = Box(tuple(a + b for a, b in zip(box.offset, part.offset, strict=True)), part.extent)
        buffer = bytearray(tile.numel * tensor.dtype.itemsize)
        with reading(tensor=tensor.name):
            read_tile(tensor, tile, buffer, records)
        yield tile, *as_dtype(buffer, tensor.dtype, dtype, tile.numel)


def as_dtype(buffer: bytearray, source: Dtype, target: Dtype, numel: int) -> tuple[bytearray, int]:
    """Elements cast, and how many finite ones became infinite."""
    if source == target:
        return buffer, 0
    made = bytearray(numel * target.itemsize)
    return made, cast_here(view_as(buffer, source, numel), source, target, view_as(made, target, numel))


def all_bytes(tensor: Tensor, dtype: Dtype, *, checksum: bool = False) -> bytearray:
    """All elements in C order. Raises CastOverflow for finite values that ``dtype`` cannot hold.

    ``checksum``: raise CorruptFile for a record that does not have its CRC-32.
    """
    records = Records() if checksum else None
    if tensor.dtype == dtype:
        with reading(tensor=tensor.name):
            data, infinite = element_bytes(tensor, records=records), 0
    else:
        data, done, infinite = bytearray(tensor.numel * dtype.itemsize), 0, 0
        for _, part, overflowed in read_box(tensor, whole(tensor.shape), dtype, records):
            data[done : done + len(part)] = part
            done, infinite = done + len(part), infinite + overflowed
    if records is not None:
        records.check_rest()
    if infinite:
        raise overflow(tensor.name, infinite, dtype)
    return data


def overflow(name: str, count: int, dtype: Dtype) -> CastOverflow:
    """The error for finite values that became infinite."""
    values = "1 finite value becomes" if count == 1 else f"{count} finite values become"
    hint = "use a wider dtype such as fp32" if dtype.bits <= 16 else None
    return CastOverflow(f"{values} infinite as {dtype}", tensor=name, expected="values that stay finite", hint=hint)


def as_numpy(data: bytearray, dtype: Dtype, shape: tuple[int, ...], name: str) -> Array:
    """Bytes as an array. Raises Unsupported for dtypes that numpy lacks."""
    try:
        kind = numpy_dtype(dtype)
    except KeyError:
        hint = "torch() returns it" if dtype.kind == "complex" else None
        raise Unsupported(f"numpy has no dtype for {dtype}", tensor=name, hint=hint) from None
    import numpy

    # Of no dimensions it would be read-only memory otherwise; the buffer is a bytearray of our own.
    return numpy.frombuffer(data, dtype=kind, count=math.prod(shape)).reshape(shape)


def as_torch(data: bytearray, dtype: Dtype, shape: tuple[int, ...], name: str) -> torch.Tensor:
    """Bytes as a tensor of torch. Raises Unsupported without torch, and for dtypes that cannot be made of bytes."""
    library = torch_module()
    kind = getattr(library, dtype.torch, None)
    if kind is None or dtype.code.startswith("Q"):
        raise Unsupported(f"torch cannot make a tensor of {dtype} from bytes", tensor=name)
    if not data:
        made: torch.Tensor = library.empty(shape, dtype=kind)
        return made
    made = library.frombuffer(data, dtype=kind)
    return made.reshape(shape)


def torch_module() -> Any:
    """The package torch. Raises Unsupported if it is not installed or cannot be imported."""
    try:
        import torch
    except ImportError as error:
        if error.name == "torch":
            raise Unsupported("this needs torch, which is not installed", hint=install("torch")) from None
        raise Unsupported(f"this needs torch, which cannot be imported: {error}", hint="install torch again") from None
    return torch


def target_dtype(name: str | None, known: Dtype) -> Dtype:
    """The dtype that a tensor gets when floats are cast to ``name``. Raises UsageError for names that nothing is cast to."""
    if name in (None, "keep"):
        return known
    if name not in CAST_NAMES:
        raise UsageError(f"unknown dtype {name!r}", expected=f"keep, {', '.join(CAST_NAMES)}")
    return BY_CODE[CAST_NAMES[name]] if known.kind == "float" else known
