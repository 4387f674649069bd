"""A receipt says that one file of an output is finished, with what its bytes must be, so that a run which was interrupted goes on.

Nothing is taken on trust: before a file is kept, all of its bytes are read, and compared with the checksums that were taken as they were
written. What the system copied by itself has none; those bytes are compared with the source. Whatever does not fit is written again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ckpt_cli.errors import CkptError
from ckpt_cli.files.crc32 import crc_of
from ckpt_cli.files.descriptors import MadeFrom
from ckpt_cli.files.source import Files, Source
from ckpt_cli.output.plan import CopyWork, OutputFile, work_of
from ckpt_cli.output.sinks.sink import Output
from ckpt_cli.progress import Progress, shown
from ckpt_cli.results.checkpoint import Frozen
from ckpt_cli.tensors.parallel import Stop, in_threads


class Receipt(Frozen):
    """What is known of a finished file: CRC-32 of its header and its tensors, what its sources were, and what was counted on the way.

    ``checksums`` are those that the manifest has, ``more`` are of tensors of which it has none; ``overflows`` and ``non_finite`` are as
    in `Written`.
    """

    size: int
    header: int
    sources: str
    checksums: dict[str, int]
    more: dict[str, int]
    overflows: dict[str, int]
    non_finite: dict[str, dict[int, int]]


class Counted(Protocol):
    """What was found while files were written, see `Written`."""

    @property
    def checksums(self) -> Mapping[str, Mapping[str, int]]: ...
    @property
    def overflows(self) -> Mapping[str, int]: ...
    @property
    def non_finite(self) -> Mapping[str, Mapping[int, int]]: ...


def make_receipt(file: OutputFile, written: Counted, more: Mapping[str, int]) -> bytes:
    """The receipt of a file, to be stored; ``more`` are checksums that are not in ``written``."""
    names = {output.name for output in file.tensors}
    receipt = Receipt(
        size=file.size,
        header=zlib.crc32(file.header),
        sources=_sources(file),
        checksums=dict(written.checksums[file.name]),
        more=dict(more),
        overflows={name: count for name, count in written.overflows.items() if name in names},
        non_finite={name: dict(counts) for name, counts in written.non_finite.items() if name in names},
    )
    body = receipt.model_dump_json().encode()
    return b"%08x\n%s" % (zlib.crc32(body), body)


def finished(planned: Sequence[OutputFile], output: Output, workers: int, progress: Progress) -> dict[str, Receipt]:
    """The files that an earlier run finished and whose bytes are right; what was noted of others is forgotten. By name, in their order."""
    stop, display = Stop(), shown()
    noted = [(file, stored) for file in planned if (stored := output.receipt(file.name)) is not None]

    def each_block() -> None:
        stop.check()
        display.waiting("comparing kept files")

    def look(noted: tuple[OutputFile, bytes]) -> Receipt | None:
        file, stored = noted
        receipt = accepted(stored, file, output.folder / file.name, each_block)
        if receipt is None:
            output.forget(file.name)
        else:
            progress.advance(sum(tensor.nbytes for each in file.tensors for tensor in each.origins), file.name)
        return receipt

    found = in_threads(look, noted, workers, stop)
    return {file.name: receipt for (file, _), receipt in zip(noted, found, strict=True) if receipt is not None}


def accepted(stored: bytes, file: OutputFile, path: Path, each_block: Callable[[], None]) -> Receipt | None:
    """The receipt, if it is one of this file, and the bytes on the disk are those that belong there; None if there is any doubt."""
    from pydantic import ValidationError

    crc, _, body = stored.partition(b"\n")
    try:
        receipt = Receipt.model_validate_json(body)
        if crc != b"%08x" % zlib.crc32(body) or receipt.sources != _sources(file):
            return None
        with Files() as files:
            return receipt if _is_right(receipt, file, files.source(path), each_block) else None
    except (ValidationError, CkptError, OSError):
        return None


def _is_right(receipt: Receipt, file: OutputFile, staged: Source, each_block: Callable[[], None]) -> bool:
    if not staged.size == file.size == receipt.size or receipt.header != zlib.crc32(file.header):
        return False
    if staged.read(0, len(file.header)) != file.header:
        return False
    known = {**receipt.more, **receipt.checksums}
    for output in file.tensors:
        if output.name in known and crc_of(staged, output.offset, output.nbytes, each_block) != known[output.name]:
            return False
    for work in work_of(file):
        if work.output.name in known:
            continue
        if not isinstance(work, CopyWork):
            return False  # what is put together in memory always has a checksum
        expected = crc_of(work.piece.source, work.source_offset, work.nbytes, each_block)
        if crc_of(staged, work.target_offset, work.nbytes, each_block) != expected:
            return False
    return True


def _sources(file: OutputFile) -> str:
    """A digest of what the sources of a file are: also of what a change leaves behind that keeps size and mtime."""
    pieces = (piece for output in file.tensors for tensor in output.origins for piece in tensor.pieces)
    return MadeFrom.of(origin.identity for piece in pieces for origin in piece.source.origins).digest
