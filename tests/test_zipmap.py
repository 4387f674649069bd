"""The zip offset map: where torch's and Python's own readers agree it agrees with them, everywhere else it refuses."""

from __future__ import annotations

import io
import os
import random
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from ckpt_cli.errors import CkptError, CorruptFile, Unsupported
from ckpt_cli.files.source import Files
from ckpt_cli.files.zip_archive import ZipMap

LOCAL_ZIP64 = struct.pack("<2H2Q", 1, 16, 0, 0)


class Memory:
    """An archive that lies in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.largest = 0

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        self.largest = max(self.largest, length)
        if offset + length > len(self.data):
            raise CorruptFile(f"the file ends at byte {len(self.data)}")
        return self.data[offset : offset + length]


@dataclass(frozen=True)
class Entry:
    """One member of a hand-built archive. ``None`` means what an honest writer would put there."""

    name: str
    data: bytes = b""
    local_name: str | None = None
    local_extra: bytes = b""
    extra: bytes = b""
    flags: int = 0
    method: int = 0
    local_method: int | None = None
    size: int | None = None
    packed: int | None = None
    header: int | None = None
    descriptor: bytes = b""
    comment: bytes = b""


@dataclass(frozen=True)
class Archive:
    """A hand-built zip archive, of which any part can lie."""

    entries: tuple[Entry, ...]
    before: bytes = b""
    gap: bytes = b""
    zip64: bool = False
    end: dict[int, tuple[str, int]] = field(default_factory=dict)
    end64: dict[int, tuple[str, int]] = field(default_factory=dict)

    def build(self) -> bytes:
        out, directory = bytearray(self.before), bytearray()
        for entry in self.entries:
            name, local = entry.name.encode(), (entry.local_name or entry.name).encode()
            size = len(entry.data) if entry.size is None else entry.size
            packed = size if entry.packed is None else entry.packed
            header = len(out) if entry.header is None else entry.header
            method = entry.method if entry.local_method is None else entry.local_method
            crc = zlib.crc32(entry.data)
            sizes = (0, 0, 0) if entry.flags & 8 else (crc, packed, size)
            out += struct.pack("<4s5H3L2H", b"PK\3\4", 20, entry.flags, method, 0, 0, *sizes, len(local), len(entry.local_extra))
            out += local + entry.local_extra + entry.data + entry.descriptor
            directory += struct.pack(
                "<4s6H3L5H2L", b"PK\1\2", 20, 20, entry.flags, entry.method, 0, 0, crc, packed, size,
                len(name), len(entry.extra), len(entry.comment), 0, 0, 0, header,
            )  # fmt: skip
            directory += name + entry.extra + entry.comment
        out += self.gap
        start, count = len(out), len(self.entries)
        out += directory
        if self.zip64:
            place = len(out)
            record = bytearray(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 20, 20, 0, 0, count, count, len(directory), start))
            for offset, (code, value) in self.end64.items():
                struct.pack_into(code, record, offset, value)
            out += record + struct.pack("<4sLQL", b"PK\6\7", 0, place, 1)
        end = bytearray(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), len(directory), start, 0))
        for offset, (code, value) in self.end.items():
            struct.pack_into(code, end, offset, value)
        return bytes(out + end)


DATA = Entry("archive/data/0", b"0123456789abcdef")
HONEST = Archive((Entry("archive/data.pkl", b"N."), DATA, Entry("archive/data/1", b"ABCDEFGHIJKLMNOP"), Entry("archive/version", b"3\n")))


def with_entry(**changes: object) -> Archive:
    """The honest archive, with one lie about ``archive/data/0``."""
    return replace(HONEST, entries=tuple(replace(entry, **changes) if entry is DATA else entry for entry in HONEST.entries))  # type: ignore[arg-type]


def contents(data: bytes) -> dict[str, bytes]:
    """Every member, read where the map says it lies."""
    archive = ZipMap(Memory(data))
    found = {}
    for name in archive.members:
        offset, member = archive.locate(name)
        found[name] = data[offset : offset + member.size]
    return found


def refused(data: bytes, error: type[CkptError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        contents(data)
    assert type(caught.value) is error


def saved(path: Path, state: object) -> Path:
    torch.save(state, path)
    return path


@pytest.fixture
def checksums() -> Iterator[Callable[[bool], None]]:
    before = torch.serialization.get_crc32_options()
    yield torch.serialization.set_crc32_options
    torch.serialization.set_crc32_options(before)


STATE = {
    "weight": torch.arange(1000.0),
    "bias": torch.arange(7, dtype=torch.int16),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 5),
    "step": 12,
}


class TestFilesOfTorchSave:
    def test_members_lie_where_zipfile_finds_them_with_the_same_sizes_and_checksums(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "a.pt", STATE)
        raw = path.read_bytes()
        with zipfile.ZipFile(path) as judge, Files() as files:
            archive = ZipMap(files.source(path))
            assert list(archive.members) == judge.namelist()
            for info in judge.infolist():
                offset, member = archive.locate(info.filename)
                assert (member.header, member.size) == (info.header_offset, info.file_size)
                assert raw[offset : offset + member.size] == judge.read(info)
                assert member.crc == (info.CRC or None)

    def test_the_data_of_tensors_are_aligned_and_tell_their_checksum(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "a.pt", STATE)
        raw = path.read_bytes()
        archive = ZipMap(Memory(raw))
        offset, member = archive.locate("a/data/0")
        assert offset % 64 == 0
        assert raw[offset : offset + member.size] == STATE["weight"].numpy().tobytes()  # type: ignore[attr-defined]
        assert member.crc == zlib.crc32(raw[offset : offset + member.size])

    def test_without_checksums_crc_is_none_and_everything_else_the_same(self, tmp_path: Path, checksums: Callable[[bool], None]) -> None:
        with_crc = contents(saved(tmp_path / "a.pt", STATE).read_bytes())
        checksums(False)
        path = saved(tmp_path / "a.pt", STATE)
        archive = ZipMap(Memory(path.read_bytes()))
        assert {member.crc for member in archive.members.values()} == {None}
        without = contents(path.read_bytes())
        assert {k: v for k, v in without.items() if "serialization_id" not in k} == {
            k: v for k, v in with_crc.items() if "serialization_id" not in k
        }

    def test_the_checksum_of_nothing_is_no_checksum(self) -> None:
        archive = ZipMap(Memory(Archive((Entry("a/data.pkl", b""), Entry("a/data/0", b"x"))).build()))
        assert archive.members["a/data.pkl"].crc is None
        assert archive.members["a/data/0"].crc == zlib.crc32(b"x")

    def test_names_that_are_not_ascii(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "\u6a21\u578b.pt", {"a": torch.ones(2)})
        assert any(name.endswith("/data/0") for name in contents(path.read_bytes()))

    def test_a_file_of_hundreds_of_tensors(self, tmp_path: Path) -> None:
        path = saved(tmp_path / "a.pt", {f"layer.{i}": torch.full((i % 5,), float(i)) for i in range(400)})
        found = contents(path.read_bytes())
        with zipfile.ZipFile(path) as judge:
            assert found == {name: judge.read(name) for name in judge.namelist()}

    def test_only_the_directory_is_read_before_a_member_is_asked_for(self, tmp_path: Path) -> None:
        source = Memory(saved(tmp_path / "a.pt", {"big": torch.zeros(1_000_000)}).read_bytes())
        archive = ZipMap(source)
        archive.locate("a/data/0")
        assert source.largest < 2_000


class TestOtherHonestArchives:
    def test_archives_of_zipfile_are_read(self) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("a/data.pkl", b"N.")
            archive.writestr("a/data/0", b"x" * 100)
        assert contents(buffer.getvalue()) == {"a/data.pkl": b"N.", "a/data/0": b"x" * 100}

    def test_the_hand_built_archive_of_these_tests_is_honest(self) -> None:
        data = HONEST.build()
        with zipfile.ZipFile(io.BytesIO(data)) as judge:
            assert judge.testzip() is None
            assert contents(data) == {name: judge.read(name) for name in judge.namelist()}

    def test_an_empty_archive_has_no_members(self) -> None:
        assert contents(Archive(()).build()) == {}

    def test_data_descriptors_of_both_widths(self) -> None:
        data = b"0123456789abcdef"
        narrow = struct.pack("<4s3L", b"PK\7\x08", zlib.crc32(data), 16, 16)
        assert contents(with_entry(flags=0x808, descriptor=narrow).build())["archive/data/0"] == data
        wide = struct.pack("<4sL2Q", b"PK\7\x08", zlib.crc32(data), 16, 16)
        extra = struct.pack("<2H2Q", 1, 16, 16, 16)
        built = with_entry(flags=0x808, descriptor=wide, extra=extra, local_extra=LOCAL_ZIP64, size=0xFFFFFFFF).build()
        assert contents(built)["archive/data/0"] == data

    def test_a_small_archive_with_zip64_records_everywhere(self) -> None:
        header = len(Archive(HONEST.entries[:1]).build()) - 22 - 46 - len("archive/data.pkl")
        extra = struct.pack("<2H3Q", 1, 24, 16, 16, header)
        lying = with_entry(extra=extra, size=0xFFFFFFFF, header=0xFFFFFFFF)
        data = replace(
            lying, zip64=True, end={8: ("<H", 0xFFFF), 10: ("<H", 0xFFFF), 12: ("<L", 0xFFFFFFFF), 16: ("<L", 0xFFFFFFFF)}
        ).build()
        assert contents(data)["archive/data/0"] == DATA.data
        with zipfile.ZipFile(io.BytesIO(data)) as judge:
            assert judge.getinfo("archive/data/0").header_offset == header

    def test_a_member_of_five_gigabytes_and_one_behind_it(self, tmp_path: Path) -> None:
        # A sparse file: the member is a hole, so nothing of this size is written.
        size, path = 5 << 30, tmp_path / "large.zip"
        first, second = b"a/data/0", b"a/data/1"
        with path.open("wb") as file:
            file.write(struct.pack("<4s5H3L2H", b"PK\3\4", 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 8, 20))
            file.write(first + struct.pack("<2H2Q", 1, 16, size, size))
            file.seek(size, os.SEEK_CUR)
            header = file.tell()
            file.write(struct.pack("<4s5H3L2H", b"PK\3\4", 45, 0, 0, 0, 0, zlib.crc32(b"behind"), 6, 6, 8, 0) + second + b"behind")
            start = file.tell()
            fixed = (20, 45, 0, 0, 0, 0)
            file.write(struct.pack("<4s6H3L5H2L", b"PK\1\2", *fixed, 0, 0xFFFFFFFF, 0xFFFFFFFF, 8, 20, 0, 0, 0, 0, 0))
            file.write(first + struct.pack("<2H2Q", 1, 16, size, size))
            file.write(struct.pack("<4s6H3L5H2L", b"PK\1\2", *fixed, zlib.crc32(b"behind"), 6, 6, 8, 12, 0, 0, 0, 0, 0xFFFFFFFF))
            file.write(second + struct.pack("<2HQ", 1, 8, header))
            stop = file.tell()
            file.write(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, stop - start, start))
            file.write(struct.pack("<4sLQL", b"PK\6\7", 0, stop, 1))
            file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2, 2, stop - start, 0xFFFFFFFF, 0))
        with Files() as files, zipfile.ZipFile(path) as judge:
            archive = ZipMap(files.source(path))
            offset, member = archive.locate("a/data/0")
            assert (offset, member.size) == (58, size) == (58, judge.getinfo("a/data/0").file_size)
            assert archive.read("a/data/1", 100) == b"behind" == judge.read("a/data/1")

    def test_more_members_than_the_old_record_can_count(self) -> None:
        count = 66_000
        built = Archive(tuple(Entry(f"a/data/{i}") for i in range(count)), zip64=True).build()
        archive = ZipMap(Memory(built))
        assert len(archive.members) == count
        assert archive.locate("a/data/65999")[1].size == 0


class TestReadingSmallMembers:
    def test_gives_their_content(self) -> None:
        assert ZipMap(Memory(HONEST.build())).read("archive/version", 64) == b"3\n"

    def test_above_the_limit_is_refused_without_reading(self) -> None:
        source = Memory(Archive((Entry("a/version", b"9" * 100_000),)).build())
        with pytest.raises(CorruptFile, match="version has 100000 bytes"):
            ZipMap(source).read("a/version", 64)
        assert source.largest < 1_000

    def test_a_member_that_is_not_there_is_a_key_error(self) -> None:
        with pytest.raises(KeyError):
            ZipMap(Memory(HONEST.build())).locate("archive/data/77")


class TestDamagedContainers:
    def test_nothing_at_all(self) -> None:
        refused(b"", CorruptFile, "the file is empty")

    def test_fewer_bytes_than_a_directory_needs(self) -> None:
        refused(b"PK\5\6", CorruptFile, "only 4 bytes")

    def test_cut_off_at_every_byte(self, tmp_path: Path) -> None:
        data = saved(tmp_path / "a.pt", {"a": torch.arange(4.0)}).read_bytes()
        for length in range(len(data)):
            with pytest.raises(CorruptFile) as caught:
                ZipMap(Memory(data[:length]))
            assert "empty" in caught.value.message or "only" in caught.value.message or "cut off" in caught.value.message

    def test_cut_off_and_padded_with_zeros_to_its_old_size(self, tmp_path: Path) -> None:
        data = saved(tmp_path / "a.pt", STATE).read_bytes()
        for length in range(0, len(data) - 1, 97):
            refused(data[:length] + bytes(len(data) - length), CorruptFile, "cut off or damaged")

    @pytest.mark.parametrize("garbage", [b"\0", b"\n", b"garbage" * 1_000])
    def test_bytes_behind_the_archive(self, garbage: bytes) -> None:
        refused(HONEST.build() + garbage, CorruptFile, "bytes are there, its end is missing")

    def test_bytes_before_the_archive(self) -> None:
        # Offsets as zipfile tolerates them (counted from the first header), and as an honest writer would count them.
        refused(b"#!/bin/sh\n" + HONEST.build(), CorruptFile, "does not end where it should")
        refused(replace(HONEST, before=b"#!/bin/sh\n").build(), CorruptFile, "bytes before the first zip member")

    def test_an_archive_behind_another_one(self) -> None:
        refused(HONEST.build() + HONEST.build(), CorruptFile, "does not end where it should")

    def test_bytes_between_the_last_member_and_the_directory(self) -> None:
        refused(replace(HONEST, gap=b"hidden").build(), CorruptFile, "not where the zip directory says")

    def test_a_comment_in_which_another_directory_could_hide(self) -> None:
        refused(replace(HONEST, end={20: ("<H", 5)}).build() + b"hello", CorruptFile, "cut off or damaged")

    @pytest.mark.parametrize(
        "end",
        [{4: ("<H", 1)}, {6: ("<H", 1)}, {8: ("<H", 3)}, {20: ("<H", 5)}],
        ids=["several disks", "directory on another disk", "counts differ", "comment that is not there"],
    )
    def test_an_end_record_that_contradicts_itself(self, end: dict[int, tuple[str, int]]) -> None:
        refused(replace(HONEST, end=end).build(), CorruptFile, "directory is inconsistent")

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_fewer_members_than_there_are(self, count: int) -> None:
        refused(replace(HONEST, end={8: ("<H", count), 10: ("<H", count)}).build(), CorruptFile, "directory is damaged")

    def test_more_members_than_there_are(self) -> None:
        refused(replace(HONEST, end={8: ("<H", 5), 10: ("<H", 5)}).build(), CorruptFile, "directory is damaged")
        refused(replace(HONEST, end={8: ("<H", 60_000), 10: ("<H", 60_000)}).build(), CorruptFile, "does not end where it should")

    @pytest.mark.parametrize(("offset", "value"), [(12, 1), (12, 0xFFFFFFF0), (16, 0), (16, 0xFFFFFFF0)])
    def test_a_directory_that_lies_elsewhere(self, offset: int, value: int) -> None:
        refused(replace(HONEST, end={offset: ("<L", value)}).build(), CorruptFile, "does not end where it should")

    @pytest.mark.parametrize(
        ("end64", "match"),
        [
            ({0: ("<L", 0)}, "zip64 directory record is inconsistent"),
            ({24: ("<Q", 5)}, "zip64 directory record is inconsistent"),
            ({32: ("<Q", 5)}, "disagree"),
            ({40: ("<Q", 5)}, "disagree"),
            ({48: ("<Q", 1 << 63)}, "disagree"),
        ],
        ids=["no record", "count of this disk", "count", "length", "start"],
    )
    def test_a_zip64_record_that_contradicts_the_old_one(self, end64: dict[int, tuple[str, int]], match: str) -> None:
        refused(replace(HONEST, zip64=True, end64=end64).build(), CorruptFile, match)

    def test_a_zip64_record_with_a_directory_of_exabytes(self) -> None:
        old = {12: ("<L", 0xFFFFFFFF), 16: ("<L", 0xFFFFFFFF)}
        for end64 in ({40: ("<Q", (1 << 64) - 1)}, {48: ("<Q", (1 << 64) - 1)}):
            refused(replace(HONEST, zip64=True, end=old, end64=end64).build(), CorruptFile, "does not end where it should")

    def test_a_million_members_in_a_directory_that_has_no_room_for_them(self) -> None:
        many = {24: ("<Q", 1_000_000), 32: ("<Q", 1_000_000)}
        built = replace(HONEST, zip64=True, end={8: ("<H", 0xFFFF), 10: ("<H", 0xFFFF)}, end64=many).build()
        refused(built, CorruptFile, "does not end where it should")


class TestMembersThatLie:
    def test_two_of_one_name(self) -> None:
        refused(Archive((*HONEST.entries, DATA)).build(), CorruptFile, "data/0 is there twice")

    def test_a_local_name_that_is_not_that_of_the_directory(self) -> None:
        refused(with_entry(local_name="archive/data/9").build(), CorruptFile, "local header of data/0 contradicts")
        refused(with_entry(local_name="archive/data/0000").build(), CorruptFile, "contradicts|not where")

    def test_a_local_method_that_is_not_that_of_the_directory(self) -> None:
        refused(with_entry(local_method=8).build(), CorruptFile, "local header of data/0 contradicts")

    def test_no_local_header_where_the_directory_says(self) -> None:
        data = bytearray(HONEST.build())
        data[data.index(b"PK\3\4", 4)] = 0
        refused(bytes(data), CorruptFile, "local header of data/0 contradicts")

    @pytest.mark.parametrize("shift", [4, -4, 60_000])
    def test_data_shifted_by_a_false_length_of_the_local_extra_field(self, tmp_path: Path, shift: int) -> None:
        # torch returns shifted tensors from such a file, without an error.
        data = bytearray(saved(tmp_path / "a.pt", {"a": torch.arange(100.0)}).read_bytes())
        header = ZipMap(Memory(bytes(data))).members["a/data/0"].header
        length = struct.unpack_from("<H", data, header + 28)[0]
        struct.pack_into("<H", data, header + 28, length + shift)
        refused(bytes(data), CorruptFile, "data of data/0 is not where the zip directory says")

    def test_two_members_with_one_header(self) -> None:
        # torch returns the other tensor from such a file, without an error.
        second = HONEST.build().index(b"PK\3\4", HONEST.build().index(b"archive/data/0"))
        refused(with_entry(header=second).build(), CorruptFile, "overlaps its neighbour|contradicts")

    def test_members_that_overlap(self) -> None:
        refused(with_entry(size=17).build(), CorruptFile, "data of data/0 is not where|overlaps its neighbour")
        refused(with_entry(size=1_000).build(), CorruptFile, "data/0 overlaps its neighbour")
        refused(with_entry(size=0xFFFFFFF0).build(), CorruptFile, "data/0 overlaps its neighbour")

    def test_a_member_that_is_shorter_than_its_room(self) -> None:
        refused(with_entry(size=15).build(), CorruptFile, "data of data/0 is not where")

    @pytest.mark.parametrize("header", [1, 5_000, 0xFFFFFFF0])
    def test_a_header_inside_another_member_or_outside_of_the_file(self, header: int) -> None:
        refused(with_entry(header=header).build(), CorruptFile, "overlaps|contradicts|not where")

    def test_stored_in_another_size_than_it_has(self) -> None:
        refused(with_entry(packed=12).build(), CorruptFile, "data/0 is stored in 12 bytes but has 16")

    @pytest.mark.parametrize("flag", [0x1, 0x20, 0x40])
    def test_encrypted_or_patched(self, flag: int) -> None:
        refused(with_entry(flags=flag).build(), Unsupported, "data/0 is encrypted or patched")

    @pytest.mark.parametrize("method", [8, 12, 14, 93, 99])
    def test_compressed(self, method: int) -> None:
        refused(with_entry(method=method).build(), Unsupported, rf"data/0 is compressed \(zip method {method}\)")

    def test_a_deflated_file_of_torch(self, tmp_path: Path) -> None:
        # torch.load(mmap=True) returns the compressed bytes as weights.
        buffer = io.BytesIO()
        with zipfile.ZipFile(saved(tmp_path / "a.pt", STATE)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
            for name in old.namelist():
                new.writestr(name, old.read(name))
        refused(buffer.getvalue(), Unsupported, "is compressed")

    def test_a_deflate_bomb_is_never_inflated(self) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a/data.pkl", bytes(30_000_000))
        refused(buffer.getvalue(), Unsupported, "data.pkl is compressed")

    def test_names_of_tens_of_thousands_of_characters(self) -> None:
        refused(Archive((Entry("a/" + "x" * 60_000),)).build(), CorruptFile, "directory is damaged")

    def test_a_name_that_is_not_utf_8(self) -> None:
        refused(HONEST.build().replace(b"data/0", b"data/\xff"), CorruptFile, "name is not UTF-8")

    def test_a_comment_on_a_member(self) -> None:
        refused(with_entry(comment=b"x").build(), CorruptFile, "directory is damaged")

    @pytest.mark.parametrize(
        "extra",
        [b"", struct.pack("<2H", 1, 0), struct.pack("<2HL", 1, 4, 16), struct.pack("<2HQ", 2, 8, 16), struct.pack("<2H", 1, 16) + b"x"],
        ids=["none", "empty", "too short", "another tag", "cut off"],
    )
    def test_a_zip64_size_without_its_field(self, extra: bytes) -> None:
        refused(with_entry(size=0xFFFFFFFF, packed=0xFFFFFFFF, extra=extra).build(), CorruptFile, "zip64 field is")

    @pytest.mark.parametrize("size", [15, 17, 1 << 40, (1 << 64) - 1])
    def test_a_zip64_field_with_another_size(self, size: int) -> None:
        extra = struct.pack("<2H2Q", 1, 16, size, size)
        refused(with_entry(size=0xFFFFFFFF, extra=extra).build(), CorruptFile, "data/0 overlaps|not where the zip directory says")

    def test_messages_stay_short_whatever_the_name(self) -> None:
        with pytest.raises(Unsupported) as caught:
            contents(Archive((Entry("a/" + "x" * 1_000, method=8),)).build())
        assert len(caught.value.message) < 200

    def test_names_that_would_lead_out_of_a_folder_are_only_names(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        names = ["../../evil", "/absolute", "a/../../evil", "C:\\evil", "a\0b"]
        assert list(contents(Archive(tuple(Entry(name, b"x") for name in names)).build())) == names
        assert list(tmp_path.iterdir()) == []


class TestDamagedArchives:
    def test_six_thousand_mutants_are_refused_or_read_as_zipfile_reads_them(self, tmp_path: Path) -> None:
        source = random.Random(8)
        seeds = [
            saved(tmp_path / "a.pt", {"a": torch.arange(3.0), "b": torch.ones(2)}).read_bytes(),
            HONEST.build(),
            replace(HONEST, zip64=True).build(),
        ]
        outcomes: Counter[str] = Counter()
        for number in range(6_000):
            seed = seeds[number % len(seeds)]
            data = bytearray(seed)
            structures = [i for magic in (b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7") for i in find(seed, magic)]
            for _ in range(source.choice((1, 1, 2, 3))):
                # Mostly in the headers, where a change matters.
                place = (
                    min(source.choice(structures) + source.randrange(60), len(data) - 1)
                    if source.random() < 0.9
                    else source.randrange(len(data))
                )
                data[place] = source.choice((0, 1, 0xFF, data[place] ^ 1 << source.randrange(8)))
            try:
                found = contents(bytes(data))
            except CkptError:
                outcomes["refused"] += 1
                continue
            try:
                with zipfile.ZipFile(io.BytesIO(data)) as judge:
                    theirs = {name: judge.read(name) for name in judge.namelist()}
            except (zipfile.BadZipFile, NotImplementedError) as error:
                # These say nothing about places: checksums are not computed, versions and disk numbers not needed here.
                outcomes["harmless reason"] += any(reason in str(error) for reason in ("CRC", "multiple disks", "zip file version"))
                outcomes["refused by zipfile"] += 1
                continue
            assert found == {name.replace("\\", "/"): content for name, content in theirs.items()}
            outcomes["alike"] += 1
        assert outcomes["harmless reason"] == outcomes["refused by zipfile"]
        assert min(outcomes["refused"], outcomes["alike"]) > 500


def find(data: bytes, magic: bytes) -> list[int]:
    places, at = [], data.find(magic)
    while at >= 0:
        places.append(at)
        at = data.find(magic, at + 1)
    return places
