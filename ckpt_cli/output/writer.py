"""The only module that writes weights. It carries out a `Plan` and decides nothing.

An output folder is built beside its target, synced, checked, and renamed into place: it appears complete or not at all, whatever happens.
An existing folder stays until then. Files are filled through sinks: in any order where the file system allows it, front to back elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_cli.boxes import Box
from ckpt_cli.errors import CkptError, CorruptFile, NoSpace, NotWritable, reading
from ckpt_cli.files.crc32 import Parts, combined_parts, crc_of
from ckpt_cli.files.source import Files, Watched, size_of
from ckpt_cli.output.interrupted.receipts import finished, make_receipt
from ckpt_cli.output.plan import SUM_ELEMENTS, TILE, Combination, CopyWork, OutputFile, Plan, TileWork, known_checksums, work_of
from ckpt_cli.output.share import Share
from ckpt_cli.output.sinks.files import PositionedFile, SequentialFile
from ckpt_cli.output.sinks.sink import Output, Sink
from ckpt_cli.progress import Progress, Silent, stages
from ckpt_cli.tensors.casting import cast, view_as
from ckpt_cli.tensors.parallel import Stop, in_threads, sources_of, workers_for
from ckpt_cli.tensors.reading import expect_reads, read_tile, reads_of
from ckpt_cli.tensors.records import Records, check_pieces
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.weighted_sum import Formula, WeightedSum, real_parts

COPY_BUFFER = 1 << 20
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: files with their sizes in bytes; per tensor, finite values that became infinite.

    ``non_finite`` counts the NaN and infinite values of weighted sums: output name -> place in the formula -> count; ``checksums`` has the
    CRC-32 of tensors by file and name, where it is known without reading anything twice; ``side_files`` that of whole files beside the
    weights; ``kept`` are files that an interrupted run had finished.
    """

    files: dict[str, int]
    overflows: dict[str, int]
    non_finite: dict[str, dict[int, int]] = field(default_factory=dict)
    checksums: dict[str, dict[str, int]] = field(default_factory=dict)
    side_files: dict[str, int] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SharedWritten:
    """What one part of a plan wrote: overflows and such, and by file and tensor (position, CRC-32, length) of its tiles."""

    written: Written
    tiles: dict[str, Parts]


def execute(
    plan: Plan,
    staging: Output,
    side_files: Mapping[str, bytes | Path],
    *,
    jobs: int | None = None,
    watched: Iterable[Watched] = (),
    approve: Callable[[Written], None] | None = None,
    checksum: bool = False,
    progress: Progress | None = None,
    last_file: Callable[[Written], tuple[str, bytes]] | None = None,
) -> Written:
    """Write a plan and its side files into ``staging``; the caller publishes it.

    ``side_files`` maps names to contents or to files to copy; ``watched`` are files besides those of the plan that must not have
    changed; ``approve`` raises if the values that were found must not become an output; ``checksum``: tensors that were copied without
    passing through memory are read back for their CRC-32, and records that are cast are compared too; ``last_file`` makes one more file
    from what was written (the manifest). Raises OutputError, and InputError if a source fails or changes.
    """
    progress = progress or Silent()
    workers = workers_for(sources_of(tensor for output in plan.tensors for tensor in output.origins), jobs)
    written = Written({file.name: file.size for file in plan.files}, {}, {}, {file.name: {} for file in plan.files})
    with output_errors(staging.target):
        progress.start(plan.bytes_read, plan.files[0].name if plan.files else "")
        try:
            for name, receipt in finished(plan.files, staging, workers, progress).items():
                written.kept.append(name)
                written.checksums[name] = receipt.checksums
                written.overflows.update(receipt.overflows)
                written.non_finite.update(receipt.non_finite)
            files = [file for file in plan.files if file.name not in written.kept]
            expect_reads(reads_of(tensor for file in files for output in file.tensors for tensor in output.origins))
            _write_files(files, staging, workers, checksum, written, progress)
        finally:
            progress.finish()
        if approve is not None:
            approve(written)
        if plan.index is not None and plan.index_name is not None:
            _fill(staging, plan.index_name, plan.index)
        for name, content in side_files.items():
            written.side_files[name] = _fill(staging, name, content)
        for source in (*plan.sources, *watched):
            source.check_unchanged()
        for file in plan.files:
            staging.check(file.name, file.size, file.header)
        if last_file is not None:
            _fill(staging, *last_file(written))
        staging.sync()
    return written


def write_bytes(path: Path, data: bytes) -> None:
    """Create a file with this content and sync it. Its mode follows the umask."""
    with SequentialFile(path) as sink:
        _put(sink, data)


def copy_side_file(source: Path, target: Path) -> int:
    """Copy a file; returns the CRC-32 of its bytes."""
    with SequentialFile(target) as sink:
        return _put(sink, source)


def _fill(output: Output, name: str, content: bytes | Path) -> int:
    """Write a small file of an output; returns the CRC-32 of its bytes."""
    with output.create(name, size_of(content) if isinstance(content, Path) else len(content)) as sink:
        return _put(sink, content)


def _put(sink: Sink, content: bytes | Path) -> int:
    """All of a file: these bytes, or a copy of a file. Returns their CRC-32."""
    if not isinstance(content, Path):
        sink.put(0, memoryview(content))
        sink.finish()
        return zlib.crc32(content)
    with Files() as files:
        origin = files.source(content)
        crc, buffer = 0, memoryview(bytearray(COPY_BUFFER))
        for start in range(0, origin.size, COPY_BUFFER):
            part = buffer[: min(COPY_BUFFER, origin.size - start)]
            origin.read_at(start, part)
            sink.put(start, part)
            crc = zlib.crc32(part, crc)
        sink.finish()
        origin.check_unchanged()
    return crc


def _write_files(planned: Sequence[OutputFile], output: Output, workers: int, checksum: bool, written: Written, progress: Progress) -> None:
    """Fill all files: one after the other by all workers, or front to back, several at once, each by two of them where they suffice."""
    stop = Stop()
    lanes = lanes_of(planned, workers) if output.in_order else 1

    def fill(file: OutputFile) -> None:
        known = known_checksums(file)
        with output.create(file.name, file.size, stop) as sink:
            each = _Workers(sink, file.name, written, progress, stop, checksum=checksum)
            if output.in_order:
                each.block = TILE  # what is read ahead are whole tiles, and what passes by on the way need not be read again
                each.counted = {o.name for o in file.tensors if o.name not in known} if checksum else set()
            each.notes_passing = output.resumable
            sink.put(0, memoryview(file.header))
            each.run(work_of(file, in_order=output.in_order), max(1, workers // lanes))
            if lanes == 1:
                stages(progress).flushing()
            sink.finish()
        written.checksums[file.name] = known | each.checksums()
        if checksum and not output.in_order:
            _check_and_add(file, output.folder / file.name, written.checksums[file.name])
        if output.resumable:
            output.note(file.name, make_receipt(file, written, each.passed(file)))

    if lanes == 1:
        for file in planned:
            fill(file)
    else:
        in_threads(fill, planned, lanes, stop)


def lanes_of(planned: Sequence[OutputFile], workers: int) -> int:
    """How many files are filled at once where each is filled front to back."""
    return max(1, min(len(planned), workers // 2))


def write_share(share: Share, folder: Path, *, jobs: int | None = None, progress: Progress | None = None) -> SharedWritten:
    """Write one part of a plan into files that other processes write too, and make it durable. May run again, also at the same time.

    Raises OutputError, and InputError if a source fails or changes.
    """
    progress = progress or Silent()
    written = Written({}, {})
    done = SharedWritten(written, {})
    with output_errors(folder):
        expect_reads(share.reads)
        progress.start(share.nbytes, share.files[0].file.name if share.files else "")
        try:
            for portion in share.files:
                with PositionedFile(folder / portion.file.name, portion.file.size, shared=True) as sink:
                    if portion.with_header:
                        sink.put(0, memoryview(portion.file.header))
                    workers = _Workers(sink, portion.file.name, written, progress, Stop())
                    workers.run(
                        portion.work, workers_for(sources_of(tensor for work in portion.work for tensor in work.output.origins), jobs)
                    )
                    stages(progress).flushing()
                    sink.finish()
                done.tiles[portion.file.name] = workers.tiles()
        finally:
            progress.finish()
        for source in share.sources:
            source.check_unchanged()
    return done


def _check_and_add(file: OutputFile, path: Path, known: dict[str, int]) -> None:
    with Files() as files:
        source = files.source(path)
        for output in file.tensors:
            now = crc_of(source, output.offset, output.nbytes)
            if known.setdefault(output.name, now) != now:
                check_pieces(output.tensor)
                raise CorruptFile("the values of a tensor do not read back as they were written", path=path, tensor=output.name)


class _Workers:
    """Threads that take work from one queue; the first error stops them all."""

    counted: Collection[str] = ()
    """Tensors whose bytes are counted in a CRC-32 also where they are copied."""

    notes_passing = False
    """Whether the bytes of all others are, as far as they pass through memory."""

    block = COPY_BUFFER
    """Bytes that are copied at once where they pass through memory."""

    def __init__(self, sink: Sink, label: str, written: Written, progress: Progress, stop: Stop, *, checksum: bool = False) -> None:
        self._sink = sink
        self._label = label
        self._written = written
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = stop
        self._parts: Parts = {}
        self._passed: Parts = {}
        # What is cast passes through memory once, changed: the checksum of its records costs a tenth of the CPU of such a merge.
        self._records, self._of_casts = Records(), checksum

    def tiles(self) -> Parts:
        """Of every tensor that was written tile by tile: position in the file, CRC-32 and length in bytes of each tile."""
        return {name: sorted(parts) for name, parts in self._parts.items()}

    def checksums(self) -> dict[str, int]:
        """The CRC-32 of every tensor that was written tile by tile."""
        return combined_parts(self._parts)

    def passed(self, file: OutputFile) -> dict[str, int]:
        """The CRC-32 of copied tensors all of whose bytes passed through memory."""
        sizes = {output.name: output.nbytes for output in file.tensors}
        return combined_parts({name: parts for name, parts in self._passed.items() if sum(part[2] for part in parts) == sizes[name]})

    def run(self, work: Iterable[CopyWork | TileWork], jobs: int) -> None:
        in_threads(self._drain, [iter(work)] * jobs, jobs, self._stop)
        self._records.check_rest()

    def _drain(self, queue: Iterator[CopyWork | TileWork]) -> None:
        buffers = _Buffers()
        while True:
            self._stop.check()
            with self._lock:
                work = next(queue, None)
            if work is None:
                return
            if isinstance(work, CopyWork):
                with reading(work.piece.source.identity.path):
                    self._copy(work, buffers)
            else:
                with reading(tensor=work.output.name):
                    if work.output.combination is not None:
                        self._combined_tile(work, work.output.combination, buffers)
                    else:
                        self._tile(work, buffers)

    def _copy(self, work: CopyWork, buffers: _Buffers) -> None:
        done, block = self._sink.copy(work), min(work.nbytes, self.block)
        buffer = memoryview(buffers.get("copy", block)) if done < work.nbytes else memoryview(b"")
        while done < work.nbytes:
            part = buffer[: min(block, work.nbytes - done)]
            work.piece.source.read_at(work.source_offset + done, part)
            self._records.add(work.output.tensor, work.piece, work.source_offset + done - work.piece.offset, part)
            self._sink.put(work.target_offset + done, part)
            if work.output.name in self.counted:
                self._count(work.output.name, work.target_offset + done, part, self._parts)
            elif self.notes_passing:
                self._count(work.output.name, work.target_offset + done, part, self._passed)
            done += len(part)
            self._stop.check()
        self._progress.advance(work.nbytes, self._label)

    def _tile(self, work: TileWork, buffers: _Buffers) -> None:
        output, numel = work.output, work.tile.numel
        tensor = output.tensor
        stored = self._read(tensor, work.tile, buffers, None if output.is_cast and not self._of_casts else self._records)
        result = stored
        if output.is_cast:
            size = numel * output.dtype.itemsize
            result = memoryview(buffers.get("cast", size))[:size]
            over = cast(view_as(stored, tensor.dtype, numel), tensor.dtype, output.dtype, view_as(result, output.dtype, numel))
            self._count_overflows(output.name, over)
        self._write_tile(work, result)
        self._progress.advance(len(stored), self._label)

    def _combined_tile(self, work: TileWork, combination: Combination, buffers: _Buffers) -> None:
        output, tile = work.output, work.tile
        dtype, parts = real_parts(output.tensor.dtype)
        target, _ = real_parts(output.dtype)
        total = buffers.weighted_sum(combination.formula, output.tensor)
        total.start()
        for place, tensor in enumerate(combination.tensors):
            self._stop.check()
            stored = self._read(tensor, tile, buffers, self._records)
            strange = total.add(view_as(stored, dtype, tile.numel * parts))
            if strange:
                with self._lock:
                    counts = self._written.non_finite.setdefault(output.name, {})
                    counts[place] = counts.get(place, 0) + strange
            self._progress.advance(len(stored), self._label)

        def values_at(position: int) -> list[float]:
            at = tile.at(position // parts)
            buffer = bytearray(output.tensor.dtype.itemsize)
            values = []
            for tensor in combination.tensors:
                read_tile(tensor, at, buffer)
                values.append(float(view_as(buffer, dtype, parts)[position % parts]))
            return values

        size = tile.numel * output.dtype.itemsize
        result = memoryview(buffers.get("cast", size))[:size]
        over = total.result(target, view_as(result, target, tile.numel * parts), values_at)
        self._count_overflows(output.name, over)
        self._write_tile(work, result)

    def _write_tile(self, work: TileWork, data: memoryview) -> None:
        self._sink.put(work.target_offset, data)
        self._count(work.output.name, work.target_offset, data, self._parts)

    def _count(self, name: str, offset: int, data: memoryview, parts: Parts) -> None:
        part = offset, zlib.crc32(data), len(data)
        with self._lock:
            parts.setdefault(name, []).append(part)

    def _read(self, tensor: Tensor, tile: Box, buffers: _Buffers, records: Records | None) -> memoryview:
        length = tile.numel * tensor.dtype.itemsize
        stored = memoryview(buffers.get("stored", length))[:length]
        read_tile(tensor, tile, stored, records)
        return stored

    def _count_overflows(self, name: str, count: int) -> None:
        if count:
            with self._lock:
                self._written.overflows[name] = self._written.overflows.get(name, 0) + count


class _Buffers:
    """One thread's buffers, reused and grown to the largest size that was asked for."""

    def __init__(self) -> None:
        self._held: dict[str, bytearray] = {}
        self._sums: dict[tuple[Formula, str], WeightedSum] = {}

    def get(self, name: str, size: int) -> bytearray:
        if len(self._held.get(name, b"")) < size:
            self._held[name] = bytearray(size)
        return self._held[name]

    def weighted_sum(self, formula: Formula, tensor: Tensor) -> WeightedSum:
        """The accumulators for tiles of this dtype."""
        dtype, parts = real_parts(tensor.dtype)
        key = formula, tensor.dtype.code
        if key not in self._sums:
            self._sums[key] = WeightedSum(formula, dtype, SUM_ELEMENTS * parts)
        return self._sums[key]


@contextlib.contextmanager
def output_errors(target: Path) -> Iterator[None]:
    """OSErrors of writing, as CkptErrors. Reading has its own errors, see `ckpt_cli.files.source`."""
    try:
        yield
    except CkptError:
        raise
    except OSError as error:
        if error.errno in FULL:
            raise NoSpace(
                f"writing failed: {error.strerror}", path=target, hint="free some space, or choose another disk with -o"
            ) from error
        raise NotWritable(f"writing failed: {error.strerror}", path=target) from error
