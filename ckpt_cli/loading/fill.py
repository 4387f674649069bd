"""Filling a live model: every process reads the boxes that it holds, casts them and copies them into its memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from ckpt_cli.boxes import Box
from ckpt_cli.errors import CkptError, Inconsistent
from ckpt_cli.loading.elements import as_torch, overflow, read_box, torch_module
from ckpt_cli.loading.live import Memory
from ckpt_cli.loading.match import Pair
from ckpt_cli.progress import Progress
from ckpt_cli.tensors.parallel import Advance, Stop, in_threads, sources_of, with_progress, workers_for
from ckpt_cli.tensors.records import Records
from ckpt_cli.tensors.tensor import Piece, Tensor

LABEL = "loading"


@dataclass(frozen=True, slots=True)
class Filled:
    """What one process did: elements that it holds, bytes of source data for these, values that became infinite, by tensor."""

    elements: int
    bytes_read: int
    overflowed: dict[str, int]


def fill(
    pairs: Sequence[Pair], *, jobs: int | None, progress: Progress | None, allow_overflow: bool = False, checksum: bool = False
) -> Filled:
    """Fill the model. Raises Inconsistent before anything is written if values for a tied tensor differ, CastOverflow afterwards.

    ``checksum``: raise CorruptFile for records that this process reads whole and that do not have their checksum.
    """
    sources = [tensor for pair in pairs for tensor in (pair.source, *pair.others)]
    stop, doubled = Stop(), [pair for pair in pairs if pair.others]
    in_threads(lambda pair: _check_tied(pair, stop), doubled, workers_for(sources_of(sources), jobs), stop)
    own = {pair.name: sum(piece.box.numel for piece in pair.target.pieces) for pair in pairs}
    total = sum(own[pair.name] * pair.source.dtype.itemsize for pair in pairs)
    counts = with_progress(partial(_fill, checksum=checksum), pairs, sources, jobs=jobs, progress=progress, total=total, label=LABEL)
    overflowed = {pair.name: count for pair, count in zip(pairs, counts, strict=True) if count}
    if overflowed and not allow_overflow:
        name = next(iter(overflowed))
        error: CkptError = overflow(name, overflowed[name], next(pair for pair in pairs if pair.name == name).target.dtype)
        error.hint = "give the model a wider dtype, or pass allow_overflow=True"
        raise error
    return Filled(sum(own.values()), total, overflowed)


def _fill(pair: Pair, advance: Advance, *, checksum: bool) -> int:
    torch, infinite, records = torch_module(), 0, Records() if checksum else None
    inference = any(cast("Memory", piece.source).local.is_inference() for piece in pair.target.pieces)
    with torch.inference_mode() if inference else torch.no_grad():
        for place, values, overflowed, nbytes in _parts(pair.source, pair.target, records):
            place.copy_(values)
            infinite += overflowed
            advance(nbytes, LABEL)
    if records is not None and sum(piece.box.numel for piece in pair.target.pieces) == pair.source.numel:
        records.check_rest()
    return infinite


def _check_tied(pair: Pair, stop: Stop) -> None:
    """Raise Inconsistent if names that the model ties have different values in what this process would read."""
    torch = torch_module()
    for other in pair.others:
        for (_, first, *_), (_, second, *_) in zip(_parts(pair.source, pair.target), _parts(other, pair.target), strict=True):
            stop.check()
            if not torch.equal(_raw(first), _raw(second)):
                raise Inconsistent(
                    f"the model ties it to {other.name}, whose values in the checkpoint are others",
                    tensor=pair.name,
                    expected="equal values, or a model that does not tie them",
                    hint=f"exclude={other.name!r} takes the values of {pair.name}",
                )


def _raw(values: Any) -> Any:
    return values.contiguous().reshape(-1).view(torch_module().uint8)


def _parts(source: Tensor, target: Tensor, records: Records | None = None) -> Iterator[tuple[Any, Any, int, int]]:
    """Per tile that this process holds: its place in memory, its values, how many overflowed, bytes of source data."""
    for piece in target.pieces:
        for tile, data, overflowed in read_box(source, piece.box, target.dtype, records):
            yield (
                _place(piece, tile, target),
                as_torch(data, target.dtype, tile.extent, source.name),
                overflowed,
                math.prod(tile.extent) * source.dtype.itemsize,
            )


def _place(piece: Piece, tile: Box, target: Tensor) -> Any:
    memory = cast("Memory", piece.source)
    inside = (a - b for a, b in zip(tile.offset, piece.box.offset, strict=True))
    offset = piece.offset + target.dtype.itemsize * sum(i * stride for i, stride in zip(inside, piece.strides, strict=True))
    return memory.at(offset, tile.extent, piece.strides)
