"""Bytes to look at: a part of a file, or the inflated content of one, of which only both ends are kept."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ckpt_cli.errors import CkptError, install
from ckpt_cli.files.source import Source

CHUNK = 1 << 20
STEP = 1 << 12
"""Compressed bytes that are inflated at a time: the 4 bytes of a block of zstd can stand for 128 KiB."""

KEPT = 32 << 20
"""Inflated bytes that are kept of either end: a pickle in a compressed checkpoint is at its beginning, a zip directory at its end."""

MOST = 1 << 40


class Unseen(Exception):
    """Bytes that were not looked at, and why."""


class Blob(Protocol):
    """Some bytes in a file."""

    @property
    def size(self) -> int: ...

    @property
    def base(self) -> int:
        """Where it begins in what offsets are counted in: the file, or the entry of an archive."""
        ...

    @property
    def at(self) -> int | None:
        """Where it begins in the file; None if it was compressed there."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """At most so many bytes, fewer at the end. Raises Unseen."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a file or of another blob."""

    source: Source | Blob
    start: int
    size: int
    base: int = 0
    at: int | None = 0

    def read(self, offset: int, length: int) -> bytes:
        length = min(length, self.size - offset)
        try:
            return self.source.read(self.start + offset, length) if length > 0 else b""
        except CkptError as error:
            raise Unseen(error.message) from None


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes in memory; of ``size`` bytes the first ones, and the last ones from ``tail_at`` on."""

    head: bytes
    size: int
    tail: bytes = b""
    base: int = 0
    at: int | None = None

    @property
    def tail_at(self) -> int:
        return self.size - len(self.tail)

    def read(self, offset: int, length: int) -> bytes:
        end = min(offset + length, self.size)
        if end <= len(self.head):
            return self.head[offset : max(end, offset)]
        if offset >= self.tail_at:
            return self.tail[offset - self.tail_at : end - self.tail_at]
        if offset < len(self.head):
            return self.head[offset:]
        raise Unseen(f"only {KEPT >> 20} MiB of each end of compressed data are looked at")


def inflate(packed: Blob, kind: str) -> Iterator[Held]:
    """What was compressed, frame by frame. Raises Unseen if it cannot be inflated here; damaged data end where the damage is."""
    fresh, damaged = _decompressors(kind)
    position = 0
    while position < packed.size:
        inflater = fresh()
        head, tail, size = bytearray(), bytearray(), 0
        try:
            while position < packed.size and not inflater.eof:
                data = packed.read(position, STEP)
                position += len(data)
                for piece in _pieces(inflater, data, kind):
                    size += len(piece)
                    room = max(KEPT - len(head), 0)
                    head += piece[:room]
                    tail += piece[room:]
                    del tail[: max(len(tail) - KEPT, 0)]
                if size > MOST:
                    raise Unseen("compressed data inflate beyond any bound")
            position -= len(inflater.unused_data)
        except damaged:
            position = packed.size
        if size:
            yield Held(bytes(head), size, bytes(tail))


def _pieces(inflater: Any, data: bytes, kind: str) -> Iterator[bytes]:
    """The inflated bytes of a step, in pieces that are not large however well it was compressed."""
    if kind == "zstd":
        yield inflater.decompress(data)
        return
    while True:
        yield inflater.decompress(data, CHUNK)
        if inflater.eof:
            return
        # zlib hands back what it did not use, the others keep it.
        data = getattr(inflater, "unconsumed_tail", b"")
        if not data and getattr(inflater, "needs_input", True):
            return


def _decompressors(kind: str) -> tuple[Callable[[], Any], tuple[type[Exception], ...]]:
    """What makes a decompressor, and the errors that it raises for damaged data."""
    if kind in ("gzip", "deflate"):
        return lambda: zlib.decompressobj(31 if kind == "gzip" else -15), (zlib.error,)
    if kind != "zstd":
        return {"bzip2": bz2.BZ2Decompressor, "xz": lzma.LZMADecompressor}[kind], (OSError, lzma.LZMAError, EOFError, ValueError)
    try:
        import zstandard
    except ImportError:
        raise Unseen(f"it is compressed with zstd: {install('zstd')}") from None
    return lambda: zstandard.ZstdDecompressor().decompressobj(), (zstandard.ZstdError,)
