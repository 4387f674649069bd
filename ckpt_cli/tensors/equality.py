"""Whether tensors are equal, before a merge: replicas and tied heads.

Cheap first: the CRC-32 that torch stored with each record when it was saved (damage done later is for `verify` to find).
Then the bytes, through two small buffers. What is compared is
what the files hold, element by element in the order of the tensor, so different strides do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpt_cli.tensors.reading import blocks, element_bytes, elements, stored_bytes, tiles
from ckpt_cli.tensors.tensor import Piece, Tensor

BLOCK = 1 << 20
SAMPLE = 256
"""Elements of a tensor that are compared as a sample."""

SAMPLE_BYTES = 4096
"""Bytes that `same_samples` compares at each of three places."""

TRUSTED = 64 << 10
"""Above this many bytes equal checksums are taken for equal bytes; below, reading them costs nothing."""


def same_values(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes (NaNs are equal if their bits are)."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if first.alias_of == second.name or second.alias_of == first.name:
        return True
    other = {piece.box: piece for piece in second.pieces}
    if set(other) == {piece.box for piece in first.pieces}:
        return all(_same_piece(piece, other[piece.box], first.dtype.itemsize) for piece in first.pieces)
    return all(element_bytes(first, *block) == element_bytes(second, *block) for block in blocks(first, BLOCK // first.dtype.itemsize))


def same_after_cast(source: Tensor, stored: Tensor) -> bool:
    """Whether ``stored`` holds the values of ``source`` in its own dtype. Of quantised dtypes only equal bytes count."""
    numeric = all(tensor.dtype.kind == "float" and tensor.dtype.numpy is not None for tensor in (source, stored))
    if source.dtype == stored.dtype or source.shape != stored.shape or not numeric:
        return same_values(source, stored)
    return all(_same_range(source, stored, *block) for block in blocks(source, BLOCK // 8))


def same_sample(source: Tensor, stored: Tensor) -> bool:
    """Whether some elements in the middle of two tensors of one shape are equal, in the dtype of ``stored``, however they are cut."""
    if source.shape != stored.shape or (source.dtype != stored.dtype and not source.dtype.kind == stored.dtype.kind == "float"):
        return False
    if any(tensor.dtype.numpy is None for tensor in (source, stored)):
        return source.dtype == stored.dtype
    count = min(SAMPLE, source.numel)
    start = (source.numel - count) // 2
    return not count or _same_range(source, stored, start, count)


def same_samples(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have one dtype and shape, and the same bytes at their beginning, middle and end, however they are cut.

    What fits in three samples is compared as a whole. False for sources that can only be read from the beginning on.
    """
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if any(piece.source.forward_only for tensor in (first, second) for piece in tensor.pieces):
        return False
    count = max(SAMPLE_BYTES // first.dtype.itemsize, 1)
    end = first.numel - count
    places = [(0, first.numel)] if first.numel <= 3 * count else [(start, count) for start in (0, end // 2, end)]
    return all(_same_range(first, second, start, length) for start, length in places if length)


def alike(held: Sequence[Mapping[str, Tensor]]) -> Iterator[tuple[int, int]]:
    """The numbers of every two of some dicts that hold the same tensors, as far as samples tell."""
    seen: dict[object, list[int]] = {}
    for number, tensors in enumerate(held):
        if not tensors:
            continue
        largest = max(tensors.values(), key=lambda tensor: tensor.numel)
        count = min(SAMPLE, largest.numel)
        sample = bytes(element_bytes(largest, (largest.numel - count) // 2, count)) if count else b""
        others = seen.setdefault((*((name, tensor.shape) for name, tensor in tensors.items()), sample), [])
        for other in others:
            if all(same_samples(tensor, held[other][name]) for name, tensor in tensors.items()):
                yield other, number
        others.append(number)


def _same_range(source: Tensor, stored: Tensor, start: int, count: int) -> bool:
    if source.dtype == stored.dtype:
        return element_bytes(source, start, count) == element_bytes(stored, start, count)
    return elements(source, start, count, stored.dtype).tobytes() == bytes(element_bytes(stored, start, count))


def unequal_copies(tensor: Tensor) -> Iterator[tuple[Piece, Piece]]:
    """Pairs (piece, replica) of one tensor whose bytes differ although they are the same box.

    Bounded: of large replicas without checksums only the beginning, the middle and the end are compared.
    """
    pieces = {piece.box: piece for piece in tensor.pieces}
    for copy in tensor.copies:
        piece = pieces[copy.box]
        if not _same_piece(piece, copy, tensor.dtype.itemsize, bounded=True):
            yield piece, copy


def _same_piece(first: Piece, second: Piece, itemsize: int, *, bounded: bool = False) -> bool:
    if first.same_bytes_as == second.same_bytes_as:
        return True
    # Byte order and lazy flags must agree here; element_bytes, which undoes them, is for tensors.
    if (first.swapped, first.conj, first.neg) != (second.swapped, second.conj, second.neg):
        return False
    large = first.box.numel * itemsize > TRUSTED
    if large and first.strides == second.strides and first.crc is not None and first.crc == second.crc:
        return True
    regions = tiles(first.box.extent, itemsize, BLOCK)
    if bounded and first.crc is None and first.box.numel * itemsize > 3 * BLOCK:
        listed = list(regions)
        regions = iter((listed[0], listed[len(listed) // 2], listed[-1]))
    return all(stored_bytes(first, region, itemsize) == stored_bytes(second, region, itemsize) for region in regions)
