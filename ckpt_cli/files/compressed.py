"""Compressed items of DCP files (``StreamTransformExtension``, torch >= 2.7), inflated while they are read.

The inflated item is a source like any other: it is read mostly from front to back, so one decompressor goes forward, and
starts again when an earlier byte is wanted. Memory stays at a few buffers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ckpt_cli.errors import CorruptFile, Unsupported, install
from ckpt_cli.files.descriptors import Identity
from ckpt_cli.files.source import Source

CHUNK = 1 << 20
MAX_SIZE = 1 << 46
MOST_OPEN = 8


class Inflater(Protocol):
    """One pass of a decompressor: ``read`` gives at most so many bytes, none at the end."""

    def read(self, size: int) -> bytes: ...


class _Compressed:
    """The compressed bytes of an item, as a file that can only be read forward."""

    def __init__(self, source: Source, start: int, length: int) -> None:
        self._source = source
        self._position = start
        self._end = start + length

    def read(self, size: int = -1) -> bytes:
        count = min(CHUNK if size < 0 else size, self._end - self._position)
        data = self._source.read(self._position, count) if count else b""
        self._position += count
        return data


def inflated(source: Source, start: int, length: int, transforms: Sequence[str], inflaters: Inflaters) -> InflatedSource:
    """``length`` bytes of ``source`` from ``start`` on, with the transforms undone. Raises Unsupported for unknown ones."""
    if tuple(transforms) != ("stream.zstd/1",):
        raise Unsupported(f"the items are transformed by {', '.join(transforms)}", expected="no transform, or stream.zstd/1")
    try:
        import zstandard
    except ImportError:
        raise Unsupported("the items are compressed with zstd", expected="the Python package zstandard", hint=install("zstd")) from None

    def fresh() -> Inflater:
        compressed: Any = _Compressed(source, start, length)
        reader = zstandard.ZstdDecompressor().stream_reader(compressed, read_across_frames=True)
        return _Guarded(reader, zstandard.ZstdError)

    return InflatedSource(source, fresh, start, inflaters)


class Inflaters:
    """At most so many decompressors at a time, each of which holds some megabytes; that of the source used longest ago ends."""

    def __init__(self, most: int = MOST_OPEN) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._open: OrderedDict[int, InflatedSource] = OrderedDict()

    def opened(self, source: InflatedSource) -> None:
        """Note that a source has a decompressor now, and end others that nobody is reading from."""
        with self._lock:
            self._open[id(source)] = source
            self._open.move_to_end(id(source))
            for other in list(self._open.values())[: max(0, len(self._open) - self._most)]:
                if other is not source and other.released():
                    del self._open[id(other)]


class InflatedSource:
    """The inflated bytes of a range of another source."""

    forward_only = True

    def __init__(self, source: Source, fresh: Callable[[], Inflater], start: int, inflaters: Inflaters) -> None:
        self._source = source
        self._start = start
        self._fresh = fresh
        self._inflaters = inflaters
        self._lock = threading.Lock()
        self._held = b""
        self._position = 0
        self._inflater: Inflater | None = None
        self.size = self._measure()

    @property
    def path(self) -> str:
        return self._source.path

    @property
    def origins(self) -> tuple[Source, ...]:
        return self._source.origins

    @property
    def identity(self) -> Identity:
        inner = self._source.identity
        return replace(inner, path=f"{inner.path}#{self._start}", size=self.size, start=self._start)

    def read(self, offset: int, length: int) -> bytes:
        """``length`` inflated bytes from ``offset`` on."""
        data = bytearray(length)
        self.read_at(offset, memoryview(data))
        return bytes(data)

    def read_at(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with inflated bytes from ``offset`` on."""
        with self._lock:
            if offset < self._position:
                self._release()
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

    def released(self) -> bool:
        """Let go of the decompressor, which is made anew when it is needed; False while somebody reads."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._release()
        finally:
            self._lock.release()
        return True

    def _release(self) -> None:
        self._inflater, self._position, self._held = None, 0, b""

    def _next(self) -> bytes:
        if self._inflater is None:
            self._inflater = self._fresh()
            self._inflaters.opened(self)
        data = self._inflater.read(CHUNK)
        if not data:
            raise CorruptFile("a compressed item ends too early", path=self.path)
        return data

    def _measure(self) -> int:
        """The inflated size: one pass over the data, since streams do not always record it."""
        total, inflater = 0, self._fresh()
        while data := inflater.read(CHUNK):
            total += len(data)
            if total > MAX_SIZE:
                raise CorruptFile("a compressed item inflates beyond any bound", path=self.path)
        return total


class _Guarded:
    """A decompressor whose errors are ours."""

    def __init__(self, inner: Any, error: type[Exception]) -> None:
        self._inner = inner
        self._error = error

    def read(self, size: int) -> bytes:
        try:
            result: bytes = self._inner.read(size)
        except self._error as error:
            if "memory" in str(error).lower():
                raise MemoryError from None
            raise CorruptFile("a compressed item is damaged") from None
        return result
