"""Whether another weights file holds the same values as the one that is read: judged by samples of every tensor, never by shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckpt_cli.boxes import contiguous_strides, whole
from ckpt_cli.errors import CkptError
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.registry import describe, recognise
from ckpt_cli.tensors.tensor import Piece, Tensor

SAMPLE = 4096
"""Bytes that are read at the beginning, in the middle and at the end of a tensor.

Another step has other values in nearly every matrix, so that some sample of some tensor differs. A tensor that is no longer than
three samples is compared as a whole.
"""


def is_copy_of(path: Path, tensors: Mapping[str, Tensor], files: Files) -> bool:
    """Whether a file (or the parts of an index) holds the tensors of a model, with equal samples. False where that cannot be told."""
    try:
        matches = [match for match in recognise(path) if match.trouble is None]
        return bool(matches) and holds_same(tensors, describe(matches[0], files, ReadOptions()).tensors)
    except CkptError:
        return False


def holds_same(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Whether all tensors are among ``others`` with equal samples, and these hold no more weights.

    What shares its storage with another tensor, and buffers of integers (as older versions of transformers saved them), is no more.
    """
    if not tensors or not all(name in others and _same(tensor, others[name]) for name, tensor in tensors.items()):
        return False
    held = {piece.same_bytes_as[:2] for name in tensors for piece in others[name].pieces}
    more = [tensor for name, tensor in others.items() if name not in tensors and tensor.numel and tensor.dtype.kind != "int"]
    return all(piece.same_bytes_as[:2] in held for tensor in more for piece in tensor.pieces)


def _same(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if not first.numel:
        return True
    one, other = _plain(first), _plain(second)
    if one is None or other is None:
        return False
    size = first.nbytes
    places = [(0, size)] if size <= 3 * SAMPLE else [(start, SAMPLE) for start in (0, (size - SAMPLE) // 2, size - SAMPLE)]
    return all(one.source.read(one.offset + start, length) == other.source.read(other.offset + start, length) for start, length in places)


def _plain(tensor: Tensor) -> Piece | None:
    """The piece of a tensor that lies as a whole in one place; None for those that would have to be put together."""
    piece = tensor.pieces[0] if len(tensor.pieces) == 1 else None
    if piece is None or not piece.verbatim or piece.source.forward_only:
        return None
    return piece if piece.box == whole(tensor.shape) and piece.strides == contiguous_strides(tensor.shape) else None
