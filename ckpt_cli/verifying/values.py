"""Full level of `verify`: every byte is read once, piece by piece, and nothing is held but small blocks."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.boxes import Box, Shape
from ckpt_cli.dtypes import BY_CODE, Dtype
from ckpt_cli.files.crc32 import combined, crc_of
from ckpt_cli.files.folders import is_file, stays_inside
from ckpt_cli.files.source import Files, FileSource
from ckpt_cli.hub.classes.dtypes import without_packed_floats
from ckpt_cli.hub.second_component import VARIANCE
from ckpt_cli.progress import Progress
from ckpt_cli.results.verify import Finding
from ckpt_cli.tensors.casting import view_as
from ckpt_cli.tensors.equality import same_values
from ckpt_cli.tensors.masks import is_mask
from ckpt_cli.tensors.parallel import Advance
from ckpt_cli.tensors.reading import blocks, elements, is_run, read_tile, stored_bytes, tiles
from ckpt_cli.tensors.tensor import Piece, Tensor
from ckpt_cli.tensors.torn import LEAST_ZEROS, is_vocabulary, may_end_in_zeros
from ckpt_cli.verifying.beside import OF_WEIGHTS
from ckpt_cli.verifying.checks import ALL, Checks, Outcome, Stage
from ckpt_cli.verifying.findings import finding

if TYPE_CHECKING:
    from ckpt_cli.tensors.reading import Array

BLOCK = 1 << 20
MASK = "infinite-mask"


@dataclass(slots=True)
class _Seen:
    """What is known of the values of one tensor so far. ``first`` is the bytes of its first element while all are like it.

    Of a ``variance`` those below 0 are counted.
    """

    variance: bool = False
    negative: int = 0
    nan: int = 0
    infinite: int = 0
    zero: bool = True
    first: bytes | None = None
    constant: bool = True
    read: int = 0


def check_values(
    tensors: Mapping[str, Tensor],
    checksums: Mapping[str, int],
    *,
    sample: float | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
    checks: Checks = ALL,
    name: str = "values",
) -> Outcome:
    """Read tensors and report NaN, infinities, zeros, constants, replicas that differ, and bytes that fit no checksum.

    ``checksums`` are CRC-32 by tensor name; records of torch files carry their own. ``sample`` (0 to 1) reads about this
    share of the blocks of each tensor, at least one; then only values are judged. ``name`` is that of the stage.
    """
    stage = Stage(
        name,
        "values",
        [(name, tensor) for name, tensor in without_packed_floats(tensors).items() if tensor.alias_of is None],
        tensors=lambda item: (item[1],),
        nbytes=lambda item: _cost(item[1]) * (sample or 1),
        about=lambda item: (item[0], checksums.get(item[0])),
    )
    return checks.outcome(stage, lambda item, advance: _check(*item, checksums.get(item[0]), sample, advance), jobs=jobs, progress=progress)


def check_weights_beside(
    folder: Path,
    checksums: Mapping[str, int],
    files: Files,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    checks: Checks = ALL,
) -> Outcome:
    """Whole files of weights beside the model (an image decoder's, say) against the CRC-32 of what was written. Lost ones are known."""

    def check(file: Tensor, advance: Advance) -> Outcome:
        source, wanted = file.pieces[0].source, checksums[file.name]
        now = crc_of(source, 0, source.size, lambda: advance(0, file.name))
        advance(source.size, file.name)
        if now == wanted:
            return Outcome((), source.size, 1)
        return Outcome((finding("wrong-checksum", f"CRC-32 is {now:08x}, but {wanted:08x} was written", file=file.name),), source.size, 1)

    there = [name for name in checksums if name.endswith(OF_WEIGHTS) and stays_inside(name) and is_file(folder / name)]
    stage = Stage(
        "beside",
        "checksums",
        [_as_tensor(name, files.source(folder / name)) for name in there],
        tensors=lambda file: (file,),
        nbytes=lambda file: file.nbytes,
        about=lambda file: checksums[file.name],
    )
    return checks.outcome(stage, check, jobs=jobs, progress=progress)


def check_headers(folder: Path, headers: Mapping[str, int], files: Files, known: Iterable[Finding]) -> list[Finding]:
    """The headers of weights files against the CRC-32 of what was written: with those of the tensors, every byte is compared.

    Of a file about which an error is ``known`` nothing more is said.
    """
    wrong = {item.file for item in known if item.severity == "error"}
    found = []
    for name, wanted in headers.items():
        if name in wrong or not stays_inside(name) or not is_file(folder / name):
            continue
        source = files.source(folder / name)
        length = min(8 + int.from_bytes(source.read(0, min(8, source.size)), "little"), source.size)
        now = crc_of(source, 0, length)
        if now != wanted:
            message = f"CRC-32 of its header is {now:08x}, but {wanted:08x} was written"
            found.append(finding("wrong-checksum", message, file=name))
    return found


def check_ties(tensors: Mapping[str, Tensor], known: Iterable[Finding], checks: Checks, name: str) -> Outcome:
    """Tied tensors that are stored, by the findings about names: with other values, a loader ignores one of them."""
    stored = [(item.tensor, str(item.numbers.get("partner"))) for item in known if item.code == "tied-stored" and item.tensor is not None]

    def check(pair: tuple[str, str], _: Advance) -> Outcome:
        mine, partner = tensors[pair[0]], tensors[pair[1]]
        same = same_values(mine, partner)
        return Outcome(() if same else (finding("tied-differ", f"{partner.name} has other values", tensor=pair[0]),))

    stage = Stage(
        name,
        "values",
        [pair for pair in stored if pair[1] in tensors],
        tensors=lambda pair: (tensors[pair[0]], tensors[pair[1]]),
        nbytes=lambda pair: tensors[pair[0]].nbytes,
        about=lambda pair: pair,
    )
    return checks.outcome(stage, check, jobs=None, progress=None)


def _as_tensor(name: str, source: FileSource) -> Tensor:
    """A file as the bytes that it holds."""
    return Tensor(name, BY_CODE["U8"], (source.size,), (Piece(source, 0, (1,), Box((0,), (source.size,))),))


def _cost(tensor: Tensor) -> int:
    return sum(piece.box.numel for piece in (*tensor.pieces, *tensor.copies)) * tensor.dtype.itemsize


def _check(name: str, tensor: Tensor, wanted: int | None, sample: float | None, advance: Advance) -> Outcome:
    seen, crcs, compared = _Seen(variance=name.rpartition(".")[2] == VARIANCE and tensor.dtype.kind == "float"), {}, 0
    found: list[Finding] = []
    tails: list[tuple[Piece, int]] = []
    chance, own, read = random.Random(name), {id(piece) for piece in tensor.pieces}, 0
    for piece in (*tensor.pieces, *(tensor.copies if sample is None else ())):
        crc = zeros = 0
        for block in _sampled(piece.box.extent, tensor.dtype.itemsize, sample, chance):
            raw = stored_bytes(piece, block, tensor.dtype.itemsize)
            crc = zlib.crc32(raw, crc)
            kept = len(raw) if raw[-1:] != b"\0" else len(raw.rstrip(b"\0"))
            zeros = len(raw) - kept if kept else zeros + len(raw)
            if id(piece) in own:
                _look(seen, raw if piece.verbatim else _adjusted(tensor, piece, block), tensor.dtype)
            read += len(raw)
            advance(len(raw), name)
        crcs[id(piece)] = crc
        if sample is None and id(piece) in own and zeros and zeros >= min(LEAST_ZEROS, _length(piece, tensor) // 4):
            tails.append((piece, zeros))
        if sample is None and piece.crc is not None:
            whole = is_run(piece.box.extent, piece.strides)
            stored = crc if whole else crc_of(piece.source, piece.offset, _length(piece, tensor), lambda: advance(0, name))
            compared += 1
            if stored != piece.crc:
                message = f"CRC-32 is {stored:08x}, but {piece.crc:08x} was saved"
                found.append(finding("wrong-checksum", message, tensor=name, file=Path(piece.source.path).name))
    if sample is None:
        found += _replicas(name, tensor, crcs)
        if wanted is not None:
            compared += 1
            now = combined((crcs[id(p)], _length(p, tensor)) for p in sorted(tensor.pieces, key=lambda p: p.box.offset))
            if now != wanted:
                message = f"CRC-32 is {now:08x}, but {wanted:08x} was written"
                found.append(finding("wrong-checksum", message, tensor=name, file=_file(tensor)))
    judged = [*_judged(name, tensor, seen)]
    found += judged
    if not seen.zero and not any(item.code == MASK for item in judged):  # the last row of a causal mask sees all
        found += [item for piece, zeros in tails for item in _tail(name, tensor, piece, zeros)]
    return Outcome(tuple(found), read, compared)


def _length(piece: Piece, tensor: Tensor) -> int:
    return piece.box.numel * tensor.dtype.itemsize


def _file(tensor: Tensor) -> str | None:
    return Path(tensor.pieces[0].source.path).name if tensor.pieces else None


def _sampled(extent: Shape, itemsize: int, sample: float | None, chance: random.Random) -> Iterator[Box]:
    """The blocks of a box, all of them or about this share, at least one; never all of them in memory."""
    if sample is None:
        yield from tiles(extent, itemsize, BLOCK)
        return
    count = chosen = 0
    for block in tiles(extent, itemsize, BLOCK):
        count += 1
        if chance.random() < sample:
            chosen += 1
            yield block
    if count and not chosen:
        yield from itertools.islice(tiles(extent, itemsize, BLOCK), (at := chance.randrange(count)), at + 1)


def _adjusted(tensor: Tensor, piece: Piece, block: Box) -> bytearray:
    """The elements of a block of a piece with byte order and lazy flags undone."""
    raw = bytearray(block.numel * tensor.dtype.itemsize)
    at = Box(tuple(a + b for a, b in zip(piece.box.offset, block.offset, strict=True)), block.extent)
    read_tile(replace(tensor, pieces=(piece,)), at, raw)
    return raw


def _look(seen: _Seen, raw: bytearray, dtype: Dtype) -> None:
    """Take a block of values into account."""
    import numpy

    seen.read += len(raw)
    size = dtype.itemsize
    if not raw:
        return
    if seen.first is None:
        seen.first = bytes(raw[:size])
    elements = numpy.frombuffer(raw, dtype=f"V{size}" if size > 8 else f"u{size}")
    if seen.constant:
        seen.constant = bool((elements == numpy.frombuffer(seen.first, elements.dtype)[0]).all())
    if dtype.numpy is None:
        seen.zero = seen.zero and not any(raw)
        return
    values = view_as(raw, dtype, len(elements))
    with numpy.errstate(all="ignore"):  # signalling NaNs
        if seen.zero:
            seen.zero = not bool((values != 0).any()) if dtype.kind != "opaque" else not any(raw)
        if dtype.kind in ("float", "complex") or dtype.code.startswith("F8"):
            not_finite = _not_finite(values, dtype)
            if not_finite.any():
                nan = int(numpy.isnan(values).sum())
                seen.nan += nan
                seen.infinite += int(not_finite.sum()) - nan
        if seen.variance:
            seen.negative += int((values.astype(numpy.float64) < 0).sum())


def _not_finite(values: Array, dtype: Dtype) -> Array:
    """Which elements are NaN or infinite: of bfloat16 by the bits, which is ten times as fast."""
    import numpy

    if dtype.code == "BF16":
        not_finite: Array = (values.view(numpy.uint16) & 0x7F80) == 0x7F80
    else:
        not_finite = ~numpy.isfinite(values)
    return not_finite


def not_finite(tensor: Tensor) -> int:
    """How many elements of a tensor are NaN or infinite."""
    return sum(int(_not_finite(elements(tensor, *block), tensor.dtype).sum()) for block in blocks(tensor, BLOCK))


def _replicas(name: str, tensor: Tensor, crcs: Mapping[int, int]) -> Iterator[Finding]:
    """Copies whose bytes differ from those of the piece with the same box."""
    owners = {piece.box: piece for piece in tensor.pieces}
    for copy in tensor.copies:
        piece = owners.get(copy.box)
        flags = (copy.swapped, copy.conj, copy.neg)
        if piece is not None and (piece.swapped, piece.conj, piece.neg) == flags and crcs[id(piece)] != crcs[id(copy)]:
            message = f"ranks {piece.rank} and {copy.rank} hold different values"
            yield finding("replicas-differ", message, tensor=name, file=Path(copy.source.path).name)


def _tail(name: str, tensor: Tensor, piece: Piece, zeros: int) -> Iterator[Finding]:
    """Zeros at the end of what one file holds of a tensor that is not zero otherwise; ``zeros`` in bytes."""
    vocabulary = is_vocabulary(name)
    if vocabulary or not may_end_in_zeros(name, tensor.shape, tensor.dtype):
        elements = zeros // tensor.dtype.itemsize
        held = "its" if piece.box.numel == tensor.numel else "the"
        message = f"the last {elements} of {held} {piece.box.numel} elements are zero"
        file = Path(piece.source.path).name
        yield finding("zero-rows" if vocabulary else "zero-tail", message, tensor=name, file=file, elements=elements)


def _judged(name: str, tensor: Tensor, seen: _Seen) -> Iterator[Finding]:
    if seen.infinite and not seen.nan and is_mask(name, tensor):
        yield finding(MASK, f"{seen.infinite} of {tensor.numel} elements are minus infinity", tensor=name, infinite=seen.infinite)
    elif seen.nan or seen.infinite:
        message = f"{seen.nan} NaN and {seen.infinite} infinite of {tensor.numel} elements"
        yield finding("non-finite", message, tensor=name, file=_file(tensor), nan=seen.nan, infinite=seen.infinite, elements=tensor.numel)
    elif seen.negative:
        message = f"{seen.negative} of {tensor.numel} elements are below 0"
        yield finding("negative-variance", message, tensor=name, file=_file(tensor), negative=seen.negative, elements=tensor.numel)
    elif tensor.numel > 1 and seen.read == tensor.nbytes:
        if seen.zero:
            matrix = sum(n > 1 for n in tensor.shape) > 1 and tensor.dtype.kind == "float" and not name.endswith("bias")
            message = f"all {tensor.numel} elements are zero"
            yield finding("all-zero" if matrix else "zeros", message, tensor=name, elements=tensor.numel)
        elif seen.constant:
            yield finding("constant", f"all {tensor.numel} elements are the same", tensor=name, elements=tensor.numel)
