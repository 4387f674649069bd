"""``verify --against``: every element of an output against the source that it was made from, after the same cast.

`execute` goes through the output and gathers what belongs there; this goes through the pieces of the source and looks up where
they belong, with code of its own, so that a mistake in one of the two shows.
"""

from __future__ import annotations

import bisect
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.boxes import Box, Shape, contiguous_strides, shape_text
from ckpt_cli.dtypes import Dtype, numpy_dtype
from ckpt_cli.files.crc32 import crc_of
from ckpt_cli.files.source import Source
from ckpt_cli.progress import Progress
from ckpt_cli.results.verify import Finding
from ckpt_cli.tensors.casting import cast
from ckpt_cli.tensors.parallel import Advance, with_progress
from ckpt_cli.tensors.reading import blocks, element_bytes, elements, read_tile
from ckpt_cli.tensors.tensor import Piece, Tensor
from ckpt_cli.verifying.findings import finding

if TYPE_CHECKING:
    from ckpt_cli.tensors.reading import Array

SPAN = 512 << 10
"""The bytes from the first to the last element of what is read at a time, on either side."""

LOOKED_UP = 64
"""The number of differing tensors for which a tensor with their values is searched."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor as the source has it, and the dtype that it should have been written in (None: any that a cast leads to)."""

    tensor: Tensor
    dtype: Dtype | None


@dataclass(slots=True)
class _Difference:
    """Elements that differ, the largest difference, and the position of the first of them in the order of reading."""

    count: int = 0
    largest: float = 0.0
    first: Shape | None = None


def compare_with_source(
    outputs: Mapping[str, Tensor], wanted: Mapping[str, Wanted], *, jobs: int | None = None, progress: Progress | None = None
) -> tuple[list[Finding], int]:
    """Findings about every tensor that is not, bit for bit, what the source has; and the bytes that were compared.

    Both map names to tensors. NaN is equal to NaN only if the bits are, but after a cast, where its payload may change.
    """
    common = [name for name in wanted if name in outputs]
    lost = [name for name in wanted if name not in outputs]
    unproved = [name for name in outputs if name not in wanted]
    found = [finding("lost-tensor", f"the source has it with shape {shape_text(wanted[name].tensor.shape)}", tensor=name) for name in lost]
    found += [finding("unproved-tensor", f"shape {shape_text(outputs[name].shape)}", tensor=name) for name in unproved]
    total = sum(wanted[name].tensor.nbytes for name in common)
    results = with_progress(
        lambda name, advance: _compare(name, outputs[name], wanted[name], advance),
        common,
        (tensor for name in common for tensor in (wanted[name].tensor, outputs[name])),
        jobs=jobs,
        progress=progress,
        total=total,
        label="comparing",
    )
    different = [result for result in results if result is not None]
    return found + _with_origins(different, outputs, wanted), total


def _compare(name: str, output: Tensor, wanted: Wanted, advance: Advance) -> Finding | None:
    source = wanted.tensor
    if output.shape != source.shape:
        return finding("different-shape", f"{shape_text(output.shape)}, but {shape_text(source.shape)} in the source", tensor=name)
    target = wanted.dtype or output.dtype
    castable = source.dtype == output.dtype or source.dtype.kind == output.dtype.kind == "float"
    if output.dtype != target or not castable:
        right = target if castable else source.dtype
        return finding("different-dtype", f"{output.dtype}, but {right} was requested (the source has {source.dtype})", tensor=name)
    seen = _Difference()
    for piece in source.pieces:
        for block in _blocks(piece, source.shape, max(source.dtype.itemsize, output.dtype.itemsize)):
            held = _adjusted(piece, _block(piece.source, piece.offset, piece.strides, block, source.dtype), source.dtype)
            written = _written(output, Box(tuple(map(sum, zip(piece.box.offset, block.offset, strict=True))), block.extent))
            _count(seen, held, written, source.dtype, output.dtype, piece.box, block)
            advance(block.numel * source.dtype.itemsize, name)
    if not seen.count:
        return None
    share = f"{seen.count} of {source.numel} elements differ"
    measured = math.isfinite(seen.largest)
    message = f"{share}{f', by up to {seen.largest:.3g}' if measured else ''}, first at {list(seen.first or ())}"
    largest = seen.largest if measured else "not finite"
    return finding("different-values", message, tensor=name, different=seen.count, elements=source.numel, largest=largest)


def _blocks(piece: Piece, shape: Shape, itemsize: int) -> Iterator[Box]:
    """Boxes inside of a piece that span at most `SPAN` bytes, in the source and in an array of this shape."""
    strides = contiguous_strides(shape)
    waiting = [Box((0,) * len(shape), piece.box.extent)]
    while waiting:
        box = waiting.pop()
        reach = [(n - 1) * max(steps) for n, *steps in zip(box.extent, strides, piece.strides, strict=True)]
        if not box.numel:
            continue
        if (sum(reach) + 1) * itemsize <= SPAN or box.numel == 1:
            yield box
            continue
        axis = max((d for d in range(len(reach)) if box.extent[d] > 1), key=lambda d: reach[d])
        half = box.extent[axis] // 2
        for start, count in ((half, box.extent[axis] - half), (0, half)):
            offset = (*box.offset[:axis], box.offset[axis] + start, *box.offset[axis + 1 :])
            waiting.append(Box(offset, (*box.extent[:axis], count, *box.extent[axis + 1 :])))


def _block(source: Source, offset: int, strides: Shape, block: Box, dtype: Dtype) -> Array:
    """The elements of a box of an array with these strides that begins at ``offset`` (bytes): one read, then a strided view."""
    import numpy

    size = dtype.itemsize
    begin = offset + size * sum(i * stride for i, stride in zip(block.offset, strides, strict=True))
    span = 1 + sum((n - 1) * stride for n, stride in zip(block.extent, strides, strict=True))
    raw = bytearray(span * size)
    source.read_at(begin, memoryview(raw))
    elements = numpy.frombuffer(raw, dtype=f"V{size}")
    return numpy.lib.stride_tricks.as_strided(elements, block.extent, tuple(stride * size for stride in strides))


def _adjusted(piece: Piece, block: Array, dtype: Dtype) -> Array:
    """The same elements, contiguous, with the byte order and the lazy flags of the piece undone."""
    import numpy

    raw = numpy.ascontiguousarray(block).reshape(block.shape)
    if piece.swapped:
        width = dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize
        bytewise = raw.reshape(-1).view(numpy.uint8).reshape(-1, width)[:, ::-1]
        raw = numpy.ascontiguousarray(bytewise).reshape(-1).view(raw.dtype).reshape(block.shape)
    if piece.conj or piece.neg:
        values = raw.view(numpy_dtype(dtype))
        values = numpy.negative(values) if piece.neg else values
        raw = (values.conj() if piece.conj else values).view(raw.dtype)
    return raw


def _written(output: Tensor, box: Box) -> Array:
    """The elements of a box of an output, whose only piece is the whole of it, or which is gathered from several."""
    import numpy

    strides = contiguous_strides(output.shape)
    if len(output.pieces) == 1 and output.pieces[0].strides == strides:
        piece = output.pieces[0]
        return _adjusted(piece, _block(piece.source, piece.offset, strides, box, output.dtype), output.dtype)
    raw = bytearray(box.numel * output.dtype.itemsize)
    read_tile(output, box, raw)
    return numpy.frombuffer(raw, dtype=f"V{output.dtype.itemsize}").reshape(box.extent)


def _count(seen: _Difference, held: Array, written: Array, source: Dtype, target: Dtype, place: Box, block: Box) -> None:
    """Compare two blocks of one shape, bits with bits; NaN with NaN after a cast."""
    import numpy

    ours, theirs = numpy.ascontiguousarray(held).reshape(-1), numpy.ascontiguousarray(written).reshape(-1)
    if source == target:
        if ours.tobytes() == theirs.tobytes():
            return
        rows = [values.view(numpy.uint8).reshape(len(values), source.itemsize) for values in (ours, theirs)]
        differs = (rows[0] != rows[1]).any(axis=1)
        if not differs.any():
            return
    else:
        rounded = numpy.empty(len(ours), numpy_dtype(target))
        cast(ours.view(numpy_dtype(source)), source, target, rounded)
        ours, values = rounded, theirs.view(numpy_dtype(target))
        width = f"u{target.itemsize}"
        differs = (rounded.view(width) != values.view(width)) & ~((rounded != rounded) & (values != values))
        if not differs.any():
            return
    at = numpy.flatnonzero(differs)
    if seen.first is None:
        inside = numpy.unravel_index(int(at[0]), block.extent) if block.extent else ()
        seen.first = tuple(int(i) + o + b for i, o, b in zip(inside, place.offset, block.offset, strict=True))
    seen.count += len(at)
    if target.kind in ("float", "int"):
        with numpy.errstate(all="ignore"):
            wide = [values[at].view(numpy_dtype(target)).astype(numpy.float64) for values in (ours, theirs)]
            seen.largest = float(numpy.maximum(seen.largest, numpy.abs(wide[0] - wide[1]).max()))


# -- are these the values that were saved? ---------------------------------------------------------------------------


def damaged_records(
    wanted: Mapping[str, Wanted], stored: Iterable[Tensor], *, jobs: int | None = None, progress: Progress | None = None
) -> list[Finding]:
    """Findings about records of the source whose bytes are not those of their own CRC-32: an output equals them, damage and all.

    ``stored`` are the tensors as the source has them: what was re-cut or fused has no checksum itself. Only records that the output was
    made of are read.
    """
    used: dict[str, list[tuple[int, int]]] = {}
    read: dict[tuple[str, int], tuple[Tensor, Piece]] = {}
    for tensor in (item.tensor for item in wanted.values()):
        for piece in tensor.pieces:
            for origin in piece.source.origins:
                plain = origin.identity == piece.source.identity
                used.setdefault(origin.path, []).append(piece.span(tensor.dtype.itemsize) if plain else (0, origin.size))
    ranges = {path: _joined(spans) for path, spans in used.items()}
    for tensor in (*(item.tensor for item in wanted.values()), *stored):
        for piece in tensor.pieces:
            if piece.crc is not None and _meets(ranges.get(piece.source.path, []), piece.span(tensor.dtype.itemsize)):
                read.setdefault((piece.source.path, piece.offset), (tensor, piece))

    def check(item: tuple[Tensor, Piece], advance: Advance) -> Finding | None:
        tensor, piece = item
        now = crc_of(piece.source, piece.offset, _length(tensor, piece), lambda: advance(0, tensor.name))
        advance(_length(tensor, piece), tensor.name)
        if now == piece.crc:
            return None
        message = f"damaged in the source: CRC-32 is {now:08x}, but {piece.crc:08x} was saved"
        return finding("wrong-checksum", message, tensor=tensor.name, file=Path(piece.source.path).name, damaged="source")

    order = [read[key] for key in sorted(read)]
    total = sum(_length(tensor, piece) for tensor, piece in order)
    results = with_progress(check, order, (tensor for tensor, _ in order), jobs=jobs, progress=progress, total=total, label="checksums")
    return [result for result in results if result is not None]


def _length(tensor: Tensor, piece: Piece) -> int:
    return piece.box.numel * tensor.dtype.itemsize


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes as ranges in order that do not meet."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _meets(ranges: Sequence[tuple[int, int]], span: tuple[int, int]) -> bool:
    at = bisect.bisect_left(ranges, span[1], key=lambda each: each[0]) - 1
    return at >= 0 and ranges[at][1] > span[0]


# -- whose values are these? -----------------------------------------------------------------------------------------


def _with_origins(different: Sequence[Finding], outputs: Mapping[str, Tensor], wanted: Mapping[str, Wanted]) -> list[Finding]:
    """Findings that say of which other tensor an output holds the values: tensors that were swapped, experts in another order."""
    names = [item.tensor for item in different[:LOOKED_UP] if item.code == "different-values" and item.tensor is not None]
    sources: dict[tuple[Shape, int], str] = {}
    for name in names:
        held, dtype = wanted[name].tensor, outputs[name].dtype
        sources.setdefault((held.shape, _crc(held, dtype)), name)
    named: list[Finding] = []
    for item in different:
        origin = None
        if item.tensor in names:
            output = outputs[item.tensor]
            origin = sources.get((output.shape, _crc(output, output.dtype)))
        named.append(item if origin is None else item.model_copy(update={"message": f"holds the values of {origin}"}))
    return named


def _crc(tensor: Tensor, dtype: Dtype) -> int:
    """The CRC-32 of a tensor as it would be written in a dtype."""
    crc = 0
    for start, count in blocks(tensor, SPAN // tensor.dtype.itemsize):
        same = dtype == tensor.dtype
        crc = zlib.crc32(element_bytes(tensor, start, count) if same else elements(tensor, start, count, dtype).tobytes(), crc)
    return crc
