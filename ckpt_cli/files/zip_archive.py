"""Where the members of a zip archive lie: offsets and sizes only, never a decompression, never an extraction.

``torch.save`` writes stored (uncompressed) members, so a tensor's bytes can be read in place. Python's ``zipfile`` and
torch disagree on several malformed archives (local against central names, overlapping members, shifted data); this
reader accepts only unambiguous archives. Layout facts: APPNOTE.TXT of PKWARE, and torch's use of it
(caffe2/serialize/inline_container.cc): sizes in local headers are zero with a data descriptor behind the data, the
64-byte alignment is padding in the local extra field, zip64 records always stand at the end.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ckpt_cli.errors import INTERRUPTED, CorruptFile, Unsupported

LOCAL, CENTRAL, END, END64, LOCATOR64 = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
STORED = 0
HAS_DESCRIPTOR, ENCRYPTED, PATCHED, STRONG_ENCRYPTION = 0x8, 0x1, 0x20, 0x40
MAX_NAME = 1024
MAX_DIRECTORY = 512 << 20
NO_32, NO_16 = 0xFFFFFFFF, 0xFFFF
ENTRY = struct.Struct("<4s4x2H4x3I3H8xI")
"""An entry of the directory: signature, flags, method, CRC-32, packed and full size, lengths of name, extra field and comment, offset."""


BeforeReading = Callable[[int, int, int, Callable[[bytes], None]], None]


class Readable(Protocol):
    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Member:
    """One member: offsets of its local header and of the end of its data, its bytes in the file, its CRC-32 (None: not computed)."""

    name: str
    header: int
    size: int
    crc: int | None
    method: int
    end: int


class ZipMap:
    """The members of one archive that fills ``source`` from byte 0 to its end.

    ``before_reading`` (`ckpt_cli.files.source.FileSource.before_reading`) may put off the look at local headers until data are read.
    Raises CorruptFile if the archive is damaged or ambiguous, Unsupported if members are encrypted or (on access) compressed.
    """

    def __init__(self, source: Readable, before_reading: BeforeReading | None = None) -> None:
        self._source = source
        self._before_reading = before_reading or (lambda _, start, length, check: check(source.read(start, length)))
        self.members: dict[str, Member] = {}
        self._data: dict[str, int] = {}
        start, size, count = self._find_directory()
        self._read_directory(start, size, count)

    def locate(self, name: str) -> tuple[int, Member]:
        """Offset of the first data byte of a member, and the member. KeyError if there is none of that name."""
        member = self.members[name]
        if member.method != STORED:
            raise Unsupported(
                f"{_tail(name)} is compressed (zip method {member.method})",
                expected="members stored without compression, as torch.save writes them",
                hint="load the file with torch and save it again with torch.save",
            )
        if name not in self._data:
            # Members reach exactly to their neighbours, so that the end says where the data begin; the local header must agree.
            place, name_size = member.end - member.size, len(member.name.encode())
            self._before_reading(place, member.header, 30 + name_size, partial(_check_local_header, member))
            self._data[name] = place
        return self._data[name], member

    def read(self, name: str, limit: int) -> bytes:
        """The content of a small member; CorruptFile above ``limit`` bytes."""
        offset, member = self.locate(name)
        if member.size > limit:
            raise CorruptFile(f"{_tail(name)} has {member.size} bytes", expected=f"at most {limit}")
        return self._source.read(offset, member.size)

    def _find_directory(self) -> tuple[int, int, int]:
        size = self._source.size
        if size < 22:
            raise CorruptFile(
                "the file is empty" if size == 0 else f"the file has only {size} bytes",
                hint=INTERRUPTED,
            )
        tail = self._source.read(max(0, size - 98), min(size, 98))
        end = tail[-22:]
        if end[:4] != END:
            raise CorruptFile(f"the file is cut off or damaged: {size:,} bytes are there, its end is missing", hint=INTERRUPTED)
        disk, first_disk, here, count, length, start, comment = struct.unpack("<4H2IH", end[4:])
        if disk or first_disk or here != count or comment:
            raise CorruptFile("the zip directory is inconsistent")
        stop = size - 22
        if len(tail) == 98 and tail[56:60] == LOCATOR64:
            position, stop = struct.unpack("<Q", tail[64:72])[0], size - 98
            record = tail[:56]
            if record[:4] != END64 or position != stop:
                raise CorruptFile("the zip64 directory record is inconsistent")
            here64, count64, length64, start64 = struct.unpack("<4Q", record[24:56])
            for short, wide, missing in ((count, count64, NO_16), (length, length64, NO_32), (start, start64, NO_32)):
                if short not in (wide, missing):
                    raise CorruptFile("the zip and zip64 directory records disagree")
            if here64 != count64:
                raise CorruptFile("the zip64 directory record is inconsistent")
            count, length, start = count64, length64, start64
        if start + length != stop or length > MAX_DIRECTORY or count * 46 > length:
            raise CorruptFile("the zip directory does not end where it should")
        return start, length, count

    def _read_directory(self, start: int, length: int, count: int) -> None:
        directory = self._source.read(start, length)
        position = 0
        found: dict[str, tuple[int, int, int | None, int, int]] = {}
        for _ in range(count):
            if length - position < ENTRY.size:
                raise CorruptFile("the zip directory is damaged")
            entry = ENTRY.unpack_from(directory, position)
            signature, flags, method, crc, packed, size, name_length, extra_length, comment_length, header = entry
            if signature != CENTRAL or name_length > MAX_NAME or comment_length:
                raise CorruptFile("the zip directory is damaged")
            position += ENTRY.size
            raw = directory[position : position + name_length]
            extra = directory[position + name_length : position + name_length + extra_length]
            position += name_length + extra_length
            if len(raw) != name_length or len(extra) != extra_length:
                raise CorruptFile("the zip directory is damaged")
            try:
                name = raw.decode("utf-8")
            except UnicodeDecodeError:
                raise CorruptFile("a zip member's name is not UTF-8") from None
            if flags & (ENCRYPTED | PATCHED | STRONG_ENCRYPTION):
                raise Unsupported(f"{_tail(name)} is encrypted or patched")
            zip64 = _zip64_fields(extra, size, packed, header)
            size, packed, header = zip64 or (size, packed, header)
            if size != packed and method == STORED:
                raise CorruptFile(f"{_tail(name)} is stored in {packed} bytes but has {size}")
            if name in found:
                raise CorruptFile(f"{_tail(name)} is there twice")
            # torch's zip writer gives a descriptor 8-byte sizes exactly where the directory has a zip64 field.
            descriptor = 0 if not flags & HAS_DESCRIPTOR else 24 if zip64 else 16
            found[name] = header, packed, crc or None, method, descriptor
        if position != length:
            raise CorruptFile("the zip directory is damaged")
        self._set_members(found, start)

    def _set_members(self, found: Mapping[str, tuple[int, int, int | None, int, int]], directory: int) -> None:
        """Each member must reach exactly to the next one: no overlap, no gap, nothing before the first."""
        starts = sorted(header for header, *_ in found.values())
        if starts and starts[0] != 0:
            raise CorruptFile("there are bytes before the first zip member")
        # Backwards: of two members that begin at the same place, the first would have to end there.
        following = dict(zip(starts[::-1], [directory, *starts[:0:-1]], strict=False))
        for name, (header, size, crc, method, descriptor) in found.items():
            end = following[header] - descriptor
            if end - size < header + 30:
                raise CorruptFile(f"{_tail(name)} overlaps its neighbour")
            self.members[name] = Member(name, header, size, crc, method, end)


def _check_local_header(member: Member, header: bytes) -> None:
    name = member.name.encode()
    name_length, extra_length = struct.unpack_from("<2H", header, 26)
    method = struct.unpack_from("<H", header, 8)[0]
    if header[:4] != LOCAL or header[30:] != name or name_length != len(name) or method != STORED:
        raise CorruptFile(f"the local header of {_tail(member.name)} contradicts the zip directory")
    if member.header + 30 + name_length + extra_length + member.size != member.end:
        raise CorruptFile(f"the data of {_tail(member.name)} is not where the zip directory says")


def _zip64_fields(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int] | None:
    """Size, packed size and header offset from the zip64 extra field, which holds only those that are 0xFFFFFFFF."""
    position = 0
    while position + 4 <= len(extra):
        tag, length = struct.unpack_from("<2H", extra, position)
        body = extra[position + 4 : position + 4 + length]
        position += 4 + length
        if tag != 1:
            continue
        values = [size, packed, header]
        wanted = [i for i, value in enumerate(values) if value == NO_32]
        if len(body) < 8 * len(wanted):
            raise CorruptFile("a zip64 field is too short")
        for i, value in zip(wanted, struct.unpack_from(f"<{len(wanted)}Q", body), strict=True):
            values[i] = value
        return values[0], values[1], values[2]
    if NO_32 in (size, packed, header):
        raise CorruptFile("a zip64 field is missing")
    return None


def _tail(name: str) -> str:
    """The member's name without the archive's top folder, as people know it: "data/12"."""
    return name.split("/", 1)[-1][:80]
