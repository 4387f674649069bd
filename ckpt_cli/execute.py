"""The only module that writes weights. It does what a `Plan` says and decides nothing.

An output folder is built beside its target under a temporary name, synced, checked, and renamed into place: it appears
whole or not at all, whatever happens. What stood there before stays until the new folder is complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.errors import CastOverflow, CkptError, CorruptFile, NoSpace, NotWritable, reading
from ckpt_cli.files import Files, FileSource
from ckpt_cli.kernels import PieceIndex, cast, read_tile, view_as
from ckpt_cli.plan import CopyWork, OutputFile, OutputTensor, Plan, TileWork, work_of
from ckpt_cli.progress import Progress, Silent
from ckpt_cli.safetensors_file import read_header
from ckpt_cli.staging import Staging

COPY_BUFFER = 1 << 20
CANNOT_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.ETXTBSY, errno.EIO}
"""Errors of ``copy_file_range`` after which ordinary reads and writes are tried (and report a real error as their own)."""

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: files with their sizes in bytes, and finite values that became infinite, per tensor."""

    files: dict[str, int]
    overflows: dict[str, int]


def default_jobs() -> int:
    """Two workers keep a disk busy; more than eight never helped in measurements on one."""
    return max(2, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2))


def execute(
    plan: Plan,
    staging: Staging,
    side_files: Mapping[str, bytes | Path],
    *,
    jobs: int | None = None,
    allow_overflow: bool = False,
    progress: Progress | None = None,
    last_file: Callable[[Written], tuple[str, bytes]] | None = None,
) -> Written:
    """Write a plan and its side files into ``staging``; the caller publishes it.

    ``side_files`` maps names to contents or to files to copy; ``last_file`` makes one more file from what was written
    (the manifest). Raises OutputError if the disk is full or the folder cannot be written, CastOverflow, and
    InputError if a source fails or changes.
    """
    progress = progress or Silent()
    workers = 1 if any(source.forward_only for source in plan.sources) else jobs or default_jobs()
    overflows: dict[str, int] = {}
    with _output_errors(staging.target):
        progress.start(plan.bytes_read, plan.files[0].name if plan.files else "")
        try:
            for file in plan.files:
                _write_file(file, staging.folder / file.name, workers, overflows, progress)
        finally:
            progress.finish()
        if overflows and not allow_overflow:
            worst = max(overflows, key=lambda name: overflows[name])
            raise CastOverflow(
                f"{sum(overflows.values())} finite values in {len(overflows)} tensors are too large for the requested dtype",
                tensor=worst,
                expected="values that stay finite",
                hint="use a wider --dtype or keep, or pass --allow-overflow to write infinities",
            )
        if plan.index is not None and plan.index_name is not None:
            write_bytes(staging.folder / plan.index_name, plan.index)
        for name, content in side_files.items():
            if isinstance(content, Path):
                _copy_side_file(content, staging.folder / name)
            else:
                write_bytes(staging.folder / name, content)
        for source in plan.sources:
            source.check_unchanged()
        _check_headers(plan, staging.folder)
        written = Written({file.name: file.size for file in plan.files}, overflows)
        if last_file is not None:
            name, data = last_file(written)
            write_bytes(staging.folder / name, data)
        staging.sync()
    return written


def write_bytes(path: Path, data: bytes) -> None:
    """Create a file with this content and sync it. Its mode follows the umask."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        _write_all(fd, memoryview(data), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_file(file: OutputFile, path: Path, jobs: int, overflows: dict[str, int], progress: Progress) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        os.ftruncate(fd, file.size)
        _write_all(fd, memoryview(file.header), 0)
        _Workers(fd, file.name, overflows, progress).run(work_of(file), jobs)
        os.fsync(fd)
    finally:
        os.close(fd)


class _Workers:
    """Threads that take work from one queue; the first error stops them all."""

    def __init__(self, fd: int, label: str, overflows: dict[str, int], progress: Progress) -> None:
        self._fd = fd
        self._label = label
        self._overflows = overflows
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._indexes: dict[str, PieceIndex] = {}

    def run(self, work: Iterable[CopyWork | TileWork], jobs: int) -> None:
        queue = iter(work)
        with ThreadPoolExecutor(jobs, thread_name_prefix="ckpt") as pool:
            futures = [pool.submit(self._drain, queue) for _ in range(jobs)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._stop.set()
                raise

    def _drain(self, queue: Iterator[CopyWork | TileWork]) -> None:
        buffers = _Buffers()
        try:
            while not self._stop.is_set():
                with self._lock:
                    work = next(queue, None)
                if work is None:
                    return
                if isinstance(work, CopyWork):
                    with reading(work.piece.source.identity.path):
                        self._copy(work, buffers)
                else:
                    with reading(tensor=work.output.name):
                        self._tile(work, buffers)
        except BaseException:
            self._stop.set()
            raise

    def _copy(self, work: CopyWork, buffers: _Buffers) -> None:
        done = _copy_in_kernel(self._fd, work)
        buffer = memoryview(buffers.get("copy", COPY_BUFFER)) if done < work.nbytes else memoryview(b"")
        while done < work.nbytes:
            part = buffer[: min(COPY_BUFFER, work.nbytes - done)]
            work.piece.source.read_at(work.source_offset + done, part)
            _write_all(self._fd, part, work.target_offset + done)
            done += len(part)
        self._progress.advance(work.nbytes, self._label)

    def _tile(self, work: TileWork, buffers: _Buffers) -> None:
        output, numel = work.output, work.tile.numel
        tensor = output.tensor
        length = numel * tensor.dtype.itemsize
        stored = memoryview(buffers.get("stored", length))[:length]
        read_tile(tensor, work.tile, stored, self._index(output))
        result = stored
        if output.is_cast:
            size = numel * output.dtype.itemsize
            result = memoryview(buffers.get("cast", size))[:size]
            over = cast(view_as(stored, tensor.dtype, numel), tensor.dtype, output.dtype, view_as(result, output.dtype, numel))
            if over:
                with self._lock:
                    self._overflows[output.name] = self._overflows.get(output.name, 0) + over
        _write_all(self._fd, result, work.target_offset)
        self._progress.advance(length, self._label)

    def _index(self, output: OutputTensor) -> PieceIndex:
        with self._lock:
            if output.name not in self._indexes:
                if len(self._indexes) > 64:
                    self._indexes.clear()
                self._indexes[output.name] = PieceIndex(output.tensor.pieces)
            return self._indexes[output.name]


class _Buffers:
    """One thread's buffers, reused and grown to the largest size that was asked for."""

    def __init__(self) -> None:
        self._held: dict[str, bytearray] = {}

    def get(self, name: str, size: int) -> bytearray:
        if len(self._held.get(name, b"")) < size:
            self._held[name] = bytearray(size)
        return self._held[name]


def _copy_in_kernel(fd: int, work: CopyWork) -> int:
    """Bytes that ``copy_file_range`` copied; the caller does the rest."""
    source, done = work.piece.source, 0
    if not isinstance(source, FileSource) or not hasattr(os, "copy_file_range"):
        return 0
    with source.descriptor() as origin:
        while done < work.nbytes:
            try:
                count = os.copy_file_range(origin, fd, work.nbytes - done, work.source_offset + done, work.target_offset + done)
            except OSError as error:
                if error.errno in CANNOT_COPY:
                    return done
                raise
            if count == 0:
                return done
            done += count
    return done


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _copy_side_file(source: Path, target: Path) -> None:
    with Files() as files:
        origin = files.source(source)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            buffer = memoryview(bytearray(COPY_BUFFER))
            for start in range(0, origin.size, COPY_BUFFER):
                part = buffer[: min(COPY_BUFFER, origin.size - start)]
                origin.read_at(start, part)
                _write_all(fd, part, start)
            os.fsync(fd)
        finally:
            os.close(fd)


def _check_headers(plan: Plan, folder: Path) -> None:
    """Read back what was written, by the rules of the format."""
    with Files() as files:
        for file in plan.files:
            header = read_header(files.source(folder / file.name))
            wanted = {(o.name, o.dtype, o.tensor.shape, o.offset) for o in file.tensors}
            if {(e.name, e.dtype, e.shape, e.offset) for e in header.entries} != wanted:
                raise CorruptFile("the file that was written does not read back as planned", path=folder / file.name)


@contextlib.contextmanager
def _output_errors(target: Path) -> Iterator[None]:
    """OSErrors of writing, as errors of ours. Reading has its own errors, see `ckpt_cli.files`."""
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
