"""All pickles in a blob, whatever it is called: alone, one after the other, in archives, in compressed data, in each other.

Loaders and scanners disagree about archives that are not quite right, so flags, checksums, names and sizes decide nothing here: every
entry of every zip directory that any loader could take is looked at, under whatever name. Nothing is extracted.
"""

from __future__ import annotations

import struct
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_cli.files.torch_file import is_legacy
from ckpt_cli.scanning.blobs import Blob, Held, Part, Unseen, inflate
from ckpt_cli.scanning.severity import is_plausible, severity
from ckpt_cli.scanning.trace import Trace, trace

LOCAL, CENTRAL, END, END64, LOCATOR64 = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
TAIL = (1 << 16) + 22
"""A zip archive may end with a comment of 64 KiB, in which loaders look for the end of its directory."""

MAX_DEPTH = 8
MAX_DIRECTORY = 512 << 20
MAX_PICKLES = 1_000
"""Pickles one after the other."""

LEGACY_PICKLES = 5
SEARCHED = 64 << 20
"""Bytes of an archive without a directory in which entries are looked for."""

HEAD = 512
COMPRESSED = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh", "bzip2"), (b"\xfd7zXZ\0", "xz"))
METHODS = {8: "deflate", 12: "bzip2", 93: "zstd"}
UNREAD = ((b"7z\xbc\xaf\x27\x1c", "7z archives"), (b"Rar!", "rar archives"), (b"\x04\x22\x4d\x18", "lz4 files"))


@dataclass(frozen=True, slots=True)
class Found:
    """A pickle: ``entry`` says where in the file it is, "" for the file itself.

    Offsets of ``trace`` count from ``base`` of the entry on, and from ``at`` of the file on (None if it is compressed there).
    """

    entry: str
    base: int
    at: int | None
    trace: Trace


@dataclass(frozen=True, slots=True)
class NotSeen:
    """Something that was not looked at, and why."""

    entry: str
    why: str


def pickles_in(blob: Blob, entry: str = "", depth: int = 0) -> Iterator[Found | NotSeen]:
    """Every pickle in a blob, and what could not be looked at."""
    if depth > MAX_DEPTH:
        yield NotSeen(entry, f"it is nested more than {MAX_DEPTH} times")
        return
    try:
        yield from _in(blob, entry, depth)
    except Unseen as unseen:
        yield NotSeen(entry, str(unseen))


def _in(blob: Blob, entry: str, depth: int) -> Iterator[Found | NotSeen]:
    head = blob.read(0, HEAD)
    start = 0
    if head.startswith(b"\x93NUMPY"):
        # An array of objects: a pickle behind the header (numpy/lib/format.py).
        wide = head[6:7] >= b"\x02"
        start = (12 if wide else 10) + int.from_bytes(head[8 : 12 if wide else 10], "little")
    yield from _one_after_the_other(blob, start, entry, depth, legacy=is_legacy(head))
    for magic, what in UNREAD:
        if head.startswith(magic):
            yield NotSeen(entry, f"{what} are not looked into")
    for magic, kind in COMPRESSED:
        if head.startswith(magic):
            for number, held in enumerate(inflate(blob, kind)):
                yield from pickles_in(held, _below(entry, f"({kind} {number})" if number else f"({kind})"), depth + 1)
    if head[257:262] == b"ustar" or _is_old_tar(head):
        yield from _in_tar(blob, entry, depth)
    yield from _in_zips(blob, head, entry, depth)


def _below(entry: str, name: str) -> str:
    return f"{entry}/{name}" if entry else name


# -- pickles ---------------------------------------------------------------------------------------------------------


def _one_after_the_other(blob: Blob, start: int, entry: str, depth: int, *, legacy: bool) -> Iterator[Found | NotSeen]:
    # What protocols 0 and 1 make of plain values has no header: what follows tells whether a loader would read on.
    plain: list[Found] = []
    for number in range(MAX_PICKLES):
        if start >= blob.size or (legacy and number == LEGACY_PICKLES):
            return
        found = trace(blob, start)
        if found.unseen:
            yield NotSeen(entry, found.problem or f"more than can be followed at byte {blob.base + start}")
        plain.append(Found(entry, blob.base, blob.at, found))
        if _is_pickle(found, blob, number) or (legacy and found.complete):
            for each in plain:
                yield each
                yield from _nested(each.trace, blob, entry, depth)
            plain = []
        elif number >= LEGACY_PICKLES:
            return
        if not found.complete:
            return
        start = found.end
    yield NotSeen(entry, f"more than {MAX_PICKLES} pickles follow each other")


def _nested(found: Trace, blob: Blob, entry: str, depth: int) -> Iterator[Found | NotSeen]:
    for begin, length, encoding in found.nested:
        base, at = blob.base + begin, _at(blob, begin)
        inner = _latin(blob.read(begin, min(length, SEARCHED)), encoding, base) if encoding else Part(blob, begin, length, base, at)
        yield from pickles_in(inner, entry, depth + 1)


def _at(blob: Blob, offset: int) -> int | None:
    return None if blob.at is None else blob.at + offset


def _latin(raw: bytes, encoding: str, base: int) -> Held:
    """Bytes that are kept as text."""
    data = raw.decode(encoding, "replace").encode("latin-1", "replace")
    return Held(data, len(data), base=base)


def _is_pickle(found: Trace, blob: Blob, number: int) -> bool:
    """Weights and texts begin like a pickle now and then: what breaks off must have a header, or call what it names."""
    if found.complete and found.header:
        return True
    found.names = [name for name in found.names if is_plausible(name)]
    if found.complete:
        return bool(found.names) or (number == 0 and found.end == blob.size)
    if not found.header:
        found.names = [name for name in found.names if name.calls or severity(name) == "dangerous"]
        return any(name.calls for name in found.names)
    return bool(found.names)


# -- archives --------------------------------------------------------------------------------------------------------


def _in_zips(blob: Blob, head: bytes, entry: str, depth: int) -> Iterator[Found | NotSeen]:
    """The entries of all archives that follow each other in a blob, the last one first: a ``.distcp`` is a chain of them."""
    if depth and not head.startswith(LOCAL) and blob.read(max(blob.size - 22, 0), 4) != END:
        return
    end, absolute, seen = blob.size, list[bytes](), set[int]()
    while end > 22:
        begin = end
        for place, offset, directory, whole in _directories(blob, end):
            if place >= offset and directory:
                begin = min(begin, place - offset)
                yield from _entries(blob, directory, place - offset, entry, depth, seen)
            if end == blob.size:
                absolute += [directory, whole]
        if begin >= end:
            break
        end = begin
    # With bytes in front of an archive, some loaders count from the beginning of the file.
    for directory in absolute:
        yield from _entries(blob, directory, 0, entry, depth, seen)
    if end and (head.startswith(LOCAL) or end < blob.size):
        # The rest has no directory: a file that was cut off, or items that are no archives between others.
        yield from _without_directory(blob, end, entry, depth, seen)


def _directories(blob: Blob, end: int) -> Iterator[tuple[int, int, bytes, bytes]]:
    """Of every end record that a loader could take: where the directory ends up, the offset it claims, and what is at either place."""
    tail_at = max(0, end - TAIL)
    tail = blob.read(tail_at, end - tail_at)
    inside = tail.rfind(END)
    while inside >= 0:
        at = stop = tail_at + inside
        record = tail[inside : inside + 22].ljust(22, b"\0")
        size, offset = struct.unpack("<2I", record[12:20])
        if at >= 76 and blob.read(at - 20, 4) == LOCATOR64 and (wide := blob.read(at - 76, 56))[:4] == END64:
            size, offset = struct.unpack("<2Q", wide[40:56])
            stop = at - 76
        if 0 < size <= min(stop, MAX_DIRECTORY):
            directory = blob.read(stop - size, size)
            whole = blob.read(offset, size) if offset + size <= stop and offset != stop - size else b""
            yield stop - size, offset, directory if directory[:4] == CENTRAL else b"", whole
        inside = tail.rfind(END, 0, inside)


def _entries(blob: Blob, directory: bytes, start: int, entry: str, depth: int, seen: set[int]) -> Iterator[Found | NotSeen]:
    """What is in the entries of a directory; the local headers say where their data begin."""
    position = 0
    while directory[position : position + 4] == CENTRAL and position + 46 <= len(directory):
        method, packed, size = (*struct.unpack_from("<H", directory, position + 10), *struct.unpack_from("<2I", directory, position + 20))
        names, extras, comments = struct.unpack_from("<3H", directory, position + 28)
        header = struct.unpack_from("<I", directory, position + 42)[0]
        name = directory[position + 46 : position + 46 + names]
        extra = directory[position + 46 + names : position + 46 + names + extras]
        position += 46 + names + extras + comments
        size, packed, header = _wide(extra, size, packed, header)
        place = start + header
        if place in seen:
            continue
        seen.add(place)
        local = blob.read(place, 30) if place < blob.size else b""
        if local[:4] == LOCAL and len(local) == 30:
            data = place + 30 + sum(struct.unpack("<2H", local[26:30]))
            length = min(max(size, packed) if method == 0 else packed, blob.size - data)
            if length > 0:
                yield from _entry(
                    Part(blob, data, length, at=_at(blob, data)), _below(entry, name.decode("utf-8", "replace")), method, depth
                )


def _wide(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """Size, packed size and header of a zip64 entry."""
    values, position = [size, packed, header], 0
    while position + 4 <= len(extra):
        tag, length = struct.unpack_from("<2H", extra, position)
        body = extra[position + 4 : position + 4 + length]
        position += 4 + length
        if tag == 1:
            for index, value in enumerate(values):
                if value == 0xFFFFFFFF and len(body) >= 8:
                    values[index], body = int.from_bytes(body[:8], "little"), body[8:]
            break
    return values[0], values[1], values[2]


def _entry(part: Blob, entry: str, method: int, depth: int) -> Iterator[Found | NotSeen]:
    if method == 0:
        yield from pickles_in(part, entry, depth + 1)
    elif method in METHODS:
        try:
            for held in inflate(part, METHODS[method]):
                yield from pickles_in(held, entry, depth + 1)
        except Unseen as unseen:
            yield NotSeen(entry, str(unseen))
    else:
        yield NotSeen(entry, f"it is compressed by method {method}")


def _without_directory(blob: Blob, end: int, entry: str, depth: int, seen: set[int]) -> Iterator[Found | NotSeen]:
    """What local headers say: no loader reads these, but whoever repairs the archive does."""
    for start in range(0, end, SEARCHED):
        window = blob.read(start, min(SEARCHED + 3, end - start))
        inside = window.find(LOCAL)
        while inside >= 0:
            place = start + inside
            local = blob.read(place, 30)
            if place not in seen and len(local) == 30:
                method, packed, names, extras = struct.unpack("<8xH8xI4x2H", local)
                data = place + 30 + names + extras
                name = _below(entry, blob.read(place + 30, names).decode("utf-8", "replace"))
                length = min(packed or end - data, end - data)
                if length > 0 and method == 0:
                    yield from _one_after_the_other(Part(blob, data, length, at=_at(blob, data)), 0, name, depth + 1, legacy=False)
                elif length > 0:
                    yield from _entry(Part(blob, data, length), name, method, depth + 1)
            inside = window.find(LOCAL, inside + 4)


def _is_old_tar(head: bytes) -> bool:
    """Whether a block is the header of a tar archive of before POSIX: its checksum is right."""
    if len(head) < HEAD or not head[0]:
        return False
    try:
        return int(head[148:156].strip(b" \0") or b"0", 8) == sum(head[:148]) + 8 * 32 + sum(head[156:])
    except ValueError:
        return False


def _in_tar(blob: Blob, entry: str, depth: int) -> Iterator[Found | NotSeen]:
    """The files of a tar archive; torch < 0.1.10 wrote these."""
    try:
        with tarfile.open(fileobj=_Reader(blob), mode="r:") as archive:  # type: ignore[call-overload]
            for member in archive:
                if member.isreg() and member.size and member.sparse is None:
                    size = min(member.size, blob.size - member.offset_data)
                    yield from pickles_in(
                        Part(blob, member.offset_data, size, at=_at(blob, member.offset_data)), _below(entry, member.name), depth + 1
                    )
    except (tarfile.TarError, ValueError, OverflowError):
        return


class _Reader:
    """A blob as tarfile reads it."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        data = self._blob.read(self._at, min(size, SEARCHED) if size >= 0 else SEARCHED)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + {0: 0, 1: self._at, 2: self._blob.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at
