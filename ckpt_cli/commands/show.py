"""`show`: the values of one tensor, or of a slice of it, and which rank holds which part."""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli import shell
from ckpt_cli.boxes import Shape
from ckpt_cli.commands.opening import named_tensors, opened_component
from ckpt_cli.discover.open import Opened
from ckpt_cli.errors import CkptError, NotFound, UsageError, within_memory
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ShardOrder
from ckpt_cli.given import PathLike, boundary, text_of
from ckpt_cli.loading.elements import all_bytes, as_numpy
from ckpt_cli.loading.indexing import indexed, parse_index
from ckpt_cli.loading.options import OpenOptions
from ckpt_cli.names import printable, stripped_names
from ckpt_cli.results.checkpoint import NoteInfo
from ckpt_cli.results.statistics import HeldPart, ShowResult
from ckpt_cli.tensors.tensor import Piece, Tensor

if TYPE_CHECKING:
    from ckpt_cli.loading.elements import Array

CORNER = 8
"""Rows and columns that are shown without a slice; of more than two dimensions, the first of each outer one."""

GLOB = re.compile(r"[*?]|\[.+\]")
SOME = 3
"""How many names that a pattern matches are listed."""

MOST = 1 << 16
"""Elements of one slice: more than anyone reads."""


@boundary
@within_memory
def show(
    path: PathLike,
    tensor: str,
    *,
    part: str | None = None,
    type: str | None = None,
    step: int | None = None,
    also: PathLike | Sequence[PathLike] = (),
    shard_order: ShardOrder = "auto",
) -> ShowResult:
    """The values of ``tensor`` in a ``part`` such as "0:4,:8" (without one, of its first rows and columns), and the parts of all ranks.

    The name may be that of training or that of the hub. Only what the slice covers is read. Raises NotFound for a tensor that is not there,
    UsageError for a pattern, and for a slice that is none or has more than 65 536 elements.
    """
    name, wanted = text_of(tensor, "TENSOR") or "", text_of(part, "--slice")
    with Files() as files:
        opened, _ = opened_component(path, files, type, step, None, also, OpenOptions(shard_order=shard_order))
        found = _tensor(opened, files, name, shard_order)
        key = parse_index(wanted, found.shape) if wanted is not None else _corner(found.shape)
        cut = indexed(found, key)
        if cut.numel > MOST:
            hint = "choose a smaller part with --slice, or read it in Python: ckpt_cli.open(...)"
            raise UsageError(f"the slice has {cut.numel} elements", tensor=name, expected=f"at most {MOST}", hint=hint)
        values = _numbers(all_bytes(cut, cut.dtype, checksum=True), cut)
        files.check_unchanged()
    return ShowResult(
        path=str(opened.found.path),
        step=opened.found.step,
        component=opened.components[0].name,
        name=name,
        dtype=found.dtype.code,
        shape=found.shape,
        layout=found.layout,
        index=",".join(map(_index_part, key)),
        shown=cut.shape,
        values=tuple(_plain(value) for value in values),
        parts=tuple(_parts(found)),
        notes=tuple(NoteInfo.of(note) for note in opened.notes),
    )


def _numbers(data: bytearray, tensor: Tensor) -> Array:
    """Elements in C order as numpy has them; complex32, which it lacks, is widened."""
    import numpy

    if tensor.dtype.code == "C32":
        return numpy.frombuffer(data, numpy.float16).astype(numpy.float32).view(numpy.complex64)
    return as_numpy(data, tensor.dtype, (tensor.numel,), tensor.name)


def _tensor(opened: Opened, files: Files, name: str, order: ShardOrder) -> Tensor:
    """The tensor of this name, as trained or as on the hub. Raises NotFound."""
    stored = opened.components[0].component.tensors
    stripped = {short: stored[old] for old, short in stripped_names(stored).items()}
    if name in stored or name in stripped:
        return stored[name] if name in stored else stripped[name]
    known: Mapping[str, Tensor] = {}
    try:
        known = named_tensors(opened, None, files, OpenOptions(shard_order=order, allow_unequal_replicas=True), "hub").tensors
    except CkptError:
        known = {}  # without names of the hub, those of training count
    if name in known:
        return known[name]
    names = list(dict.fromkeys((*known, *stripped)))
    where = f"ckpt inspect {shell.path(opened.found.path)} --all lists them"
    if GLOB.search(name):
        alike = [each for each in names if fnmatch.fnmatchcase(each, name)]
        listed = list(map(shell.word, alike[:SOME]))
        hint = f"it matches {len(alike)}, such as {', '.join(listed)}: {where}" if len(alike) > SOME else where
        hint = f"did you mean {' or '.join(listed)}?" if 0 < len(alike) <= SOME else hint
        raise UsageError(f"{printable(name)} is a pattern, and show takes one tensor", expected="the name of a tensor", hint=hint)
    close = difflib.get_close_matches(name, names, n=1) or [each for each in names if f".{name}." in f".{each}."][:1]
    hint = f"did you mean {shell.word(close[0])}?" if close else where
    raise NotFound(f"there is no tensor {printable(name)} in {opened.components[0].name}", path=opened.found.path, hint=hint)


def _corner(shape: Shape) -> tuple[object, ...]:
    """The first rows and columns, of the first matrix."""
    outer: list[object] = [0] * (len(shape) - 2)
    return (*outer, *(slice(0, min(length, CORNER)) for length in shape[-2:])) if 0 not in shape else ()


def _index_part(part: object) -> str:
    if not isinstance(part, slice):
        return "..." if part is Ellipsis else str(part)
    start, stop = ("" if bound is None else str(bound) for bound in (part.start, part.stop))
    return f"{start}:{stop}" + (f":{part.step}" if part.step is not None else "")


def _plain(value: Array) -> float | int | bool | str:
    """An element as JSON has it."""
    number = value.item()
    if isinstance(number, complex):
        return str(number)
    if isinstance(number, (bool, int)):
        return number
    number = float(number)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _parts(tensor: Tensor) -> list[HeldPart]:
    pieces = [(piece, False) for piece in tensor.pieces] + [(piece, True) for piece in tensor.copies]
    return [_part(piece, replica) for piece, replica in sorted(pieces, key=lambda each: (each[1], each[0].box.offset, each[0].rank))]


def _part(piece: Piece, replica: bool) -> HeldPart:
    box = tuple((start, start + count) for start, count in zip(piece.box.offset, piece.box.extent, strict=True))
    return HeldPart(rank=piece.rank, file=Path(piece.source.path).name, box=box, replica=replica)
