"""Compressed items of DCP files (``StreamTransformExtension``, torch >= 2.7), inflated while they are read.

The inflated item is a source like any other: it is read mostly from front to back, so one decompressor goes forward, and
starts again when an earlier byte is wanted. Memory stays at a few buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from ckpt_cli.errors import CorruptFile, Unsupported
from ckpt_cli.files import Identity, Source

CHUNK = 1 << 20
MAX_SIZE = 1 << 46


class Inflater(Protocol):
    """One pass of a decompressor."""

    def decompress(self, data: bytes) -> bytes: ...


def inflated(source: Source, start: int, length: int, transforms: Sequence[str]) -> InflatedSource:
    """``length`` bytes of ``source`` from ``start`` on, with the transforms undone. Raises Unsupported for unknown ones."""
    if tuple(transforms) != ("stream.zstd/1",):
        raise Unsupported(f"the items are transformed by {', '.join(transforms)}", expected="no transform, or stream.zstd/1")
    try:
        import zstandard
    except ImportError:
        raise Unsupported(
            "the items are compressed with zstd", expected="the Python package zstandard", hint="pip install 'unshard[zstd]'"
        ) from None

    def fresh() -> Inflater:
        return _Guarded(zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError)

    return InflatedSource(source, start, length, fresh)


class InflatedSource:
    """The inflated bytes of a range of another source."""

    def __init__(self, source: Source, start: int, length: int, fresh: Any) -> None:
        self._source = source
        self._start = start
        self._length = length
        self._fresh = fresh
        self._lock = threading.Lock()
        self._held = b""
        self._restart()
        self.size = self._measure()

    @property
    def path(self) -> str:
        return self._source.path

    @property
    def identity(self) -> Identity:
        inner = self._source.identity
        return Identity(f"{inner.path}#{self._start}", self.size, inner.mtime_ns, inner.device, inner.inode)

    def read(self, offset: int, length: int) -> bytes:
        """``length`` inflated bytes from ``offset`` on."""
        data = bytearray(length)
        self.read_at(offset, memoryview(data))
        return bytes(data)

    def read_at(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with inflated bytes from ``offset`` on."""
        with self._lock:
            if offset < self._position:
                self._restart()
            filled = 0
            while filled < len(buffer):
                while self._position + len(self._held) <= offset + filled:
                    self._position += len(self._held)
                    self._held = self._next()
                inside = offset + filled - self._position
                part = self._held[inside : inside + len(buffer) - filled]
                buffer[filled : filled + len(part)] = part
                filled += len(part)

    def check_unchanged(self) -> None:
        """Raise SourceChanged unless the file behind it still is what it was."""
        self._source.check_unchanged()

    def _restart(self) -> None:
        self._inflater: Inflater = self._fresh()
        self._consumed = self._position = 0
        self._held = b""

    def _next(self) -> bytes:
        while self._consumed < self._length:
            count = min(CHUNK, self._length - self._consumed)
            data = self._inflater.decompress(self._source.read(self._start + self._consumed, count))
            self._consumed += count
            if data:
                return data
        raise CorruptFile("a compressed item ends too early", path=self.path)

    def _measure(self) -> int:
        """The inflated size: one pass over the data, since streams do not always record it."""
        total = 0
        while self._consumed < self._length:
            try:
                total += len(self._next())
            except CorruptFile:
                break
            if total > MAX_SIZE:
                raise CorruptFile("a compressed item inflates beyond all bounds", path=self.path)
        self._restart()
        return total


class _Guarded:
    """A decompressor whose errors are ours."""

    def __init__(self, inner: Any, error: type[Exception]) -> None:
        self._inner = inner
        self._error = error

    def decompress(self, data: bytes) -> bytes:
        try:
            result: bytes = self._inner.decompress(data)
        except self._error:
            raise CorruptFile("a compressed item is damaged") from None
        return result
