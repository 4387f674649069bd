"""Whether another weights file holds the same values as the one that is read: judged by samples of every tensor, never by shapes alone.

Another step has other values in nearly every matrix, so that some sample of some tensor differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckpt_cli.errors import CkptError
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.registry import describe, recognise
from ckpt_cli.tensors.equality import same_samples
from ckpt_cli.tensors.tensor import Tensor


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
    if not tensors or not all(name in others and same_samples(tensor, others[name]) for name, tensor in tensors.items()):
        return False
    held = {piece.same_bytes_as[:2] for name in tensors for piece in others[name].pieces}
    more = [tensor for name, tensor in others.items() if name not in tensors and tensor.numel and tensor.dtype.kind != "int"]
    return all(piece.same_bytes_as[:2] in held for tensor in more for piece in tensor.pieces)
