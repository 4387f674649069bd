"""An output that several processes write, without a word between them: parts of one plan, in any order, on any machine, again if need be.

The parts of an output share a folder beside it, which is named after the digest of the plan: whoever plans the same output from the
same files finds the same folder. It holds the output as it grows, and a record per part that is done; part 0 also leaves the side files
and the manifest, without the checksums that only the others know. `published` proves from the records that all is there, and renames.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError, CorruptFile, Inconsistent, MissingParts, NotFound, reading
from ckpt_cli.files.crc32 import combined
from ckpt_cli.files.folders import entries_in, is_file
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.manifest import read_manifest
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import Files, read_small, size_of
from ckpt_cli.output.plan import Plan, known_checksum
from ckpt_cli.output.share import MAX_PARTS, Part, share_of
from ckpt_cli.output.staging import MARK as STAGED
from ckpt_cli.output.staging import Staging, sync_folder
from ckpt_cli.output.target import check_target
from ckpt_cli.output.writer import Written, write_bytes, write_share
from ckpt_cli.progress import Progress

MARK = ".ckpt-parts-"
SCHEMA = 1
DIGITS = 16
MAX_RECORD = 1 << 30


@dataclass(frozen=True, slots=True)
class PartsFolder:
    """The folder that the parts of one plan for one output share."""

    target: Path
    digest: str

    @property
    def root(self) -> Path:
        return self.target.parent / f".{self.target.name}{MARK}{self.digest[:DIGITS]}"

    @property
    def output(self) -> Path:
        """What will be the output: a name that `Staging` knows."""
        return self.root / f".{self.target.name}{STAGED}whole"

    def record(self, part: Part) -> Path:
        return self.root / f"part-{part.number}-of-{part.count}.json"

    def done(self, count: int) -> list[int]:
        """The parts, of so many, that are written."""
        return [number for number in range(count) if is_file(self.record(Part(number, count)))]


@dataclass(frozen=True, slots=True)
class Published:
    """An output that was published: its files of weights with their sizes in bytes, and how many parts wrote it."""

    folder: Path
    parts: int
    files: Mapping[str, int]
    tensors: int


def write_part(
    plan: Plan,
    part: Part,
    target: Path,
    side_files: Mapping[str, bytes | Path],
    manifest: Callable[[Written], bytes],
    *,
    approve: Callable[[Written], None] | None = None,
    overwrite: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> tuple[Written, list[int]]:
    """Write one part; returns what it wrote, and the parts that are done by now. Raises what `write_share` and ``approve`` raise."""
    shared = PartsFolder(target, plan.digest)
    shared.output.mkdir(parents=True, exist_ok=True)
    done = write_share(share_of(plan, part), shared.output, jobs=jobs, progress=progress)
    if approve is not None:
        approve(done.written)
    record: dict[str, Any] = {"schema": SCHEMA, "plan_digest": plan.digest, "part": part.number, "parts": part.count, "tiles": done.tiles}
    if part.number == 0:
        record |= _whole(plan, shared, side_files, manifest, overwrite=overwrite)
    sync_folder(shared.output)
    _replace(shared.record(part), json.dumps(record).encode())
    return done.written, shared.done(part.count)


def _whole(
    plan: Plan, shared: PartsFolder, side_files: Mapping[str, bytes | Path], manifest: Callable[[Written], bytes], *, overwrite: bool
) -> dict[str, Any]:
    """What part 0 does beside its share: the files beside the weights, and all that publishing needs to know of the plan."""
    written = Written({file.name: file.size for file in plan.files}, {})
    if plan.index is not None and plan.index_name is not None:
        _replace(shared.output / plan.index_name, plan.index)
    for name, content in side_files.items():
        written.side_files[name] = _side_file(shared.output / name, content)
    for file in plan.files:
        known = {output.name: known_checksum(output) for output in file.tensors}
        written.checksums[file.name] = {name: crc for name, crc in known.items() if crc is not None}
    headers = {file.name: [len(file.header), zlib.crc32(file.header)] for file in plan.files}
    return {"manifest": json.loads(manifest(written)), "headers": headers, "overwrite": overwrite, "tensors": len(plan.tensors)}


def _side_file(path: Path, content: bytes | Path) -> int:
    """Write or copy a small file as a whole; returns the CRC-32 of its bytes."""
    if isinstance(content, bytes):
        _replace(path, content)
        return zlib.crc32(content)
    temporary, crc = _beside(path), 0
    with Files() as files, temporary.open("xb") as copy:
        source = files.source(content)
        for start in range(0, source.size, 1 << 20):
            block = source.read(start, min(1 << 20, source.size - start))
            crc = zlib.crc32(block, crc)
            copy.write(block)
        copy.flush()
        os.fsync(copy.fileno())
        source.check_unchanged()
    os.replace(temporary, path)
    return crc


def _replace(path: Path, content: bytes) -> None:
    """Give a file this content in one step, whether another process does the same or not."""
    temporary = _beside(path)
    write_bytes(temporary, content)
    os.replace(temporary, path)
    sync_folder(path.parent)


def _beside(path: Path) -> Path:
    """A name for the unfinished form of a file, outside of what will be the output."""
    folder = path.parent if MARK in path.parent.name else path.parent.parent
    return folder / f".{uuid.uuid4().hex[:12]}"


# -- publishing ------------------------------------------------------------------------------------------------------


def published(target: Path, *, overwrite: bool = False) -> Published:
    """Rename what all parts wrote to ``target``, once it is proved to be whole.

    Raises NotFound if no part was written, MissingParts (naming them), Inconsistent if parts of different plans are there or the files
    are not those that the parts wrote, and OutputError. Nothing is lost then.
    """
    shared = _shared(target)
    if shared is None:
        again = _is_published(target)
        if again is not None:
            return again
        raise NotFound(
            "no part of this output was written",
            path=target,
            hint="write the parts first, all with this -o: --part 0/8 to --part 7/8 of ckpt merge or ckpt average;"
            " without --part an output needs no ckpt publish",
        )
    with _alone(shared.root):
        return _published(shared, overwrite=overwrite) if shared.root.is_dir() else published(target, overwrite=overwrite)


def _published(shared: PartsFolder, *, overwrite: bool) -> Published:
    target, records = shared.target, _records(shared)
    first = records[0]
    manifest = first["manifest"]
    files = {str(name): int(size) for name, size in manifest["outputs"].items()}
    _check_files(shared, files, first["headers"])
    manifest["checksums"]["files"] = _checksums(manifest["checksums"]["files"], records)
    _replace(shared.output / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    check_target(target, (), overwrite=overwrite or bool(first["overwrite"]))
    sync_folder(shared.output)
    with Staging.of(shared.output, target) as staging:
        staging.publish(replace=os.path.isdir(target))
    with contextlib.suppress(OSError):
        shutil.rmtree(shared.root)
    return Published(target, len(records), files, int(first["tensors"]))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time, where the file system has locks: the others find that all is done."""
    import fcntl

    fd = -1
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _shared(target: Path) -> PartsFolder | None:
    """The folder of the parts. Raises Inconsistent for several: the sources or the options changed between parts."""
    start = f".{target.name}{MARK}"
    found = [entry for entry in entries_in(target.parent) if entry.name.startswith(start)] if target.parent.is_dir() else []
    if len(found) > 1:
        raise Inconsistent(
            f"the parts belong to {len(found)} different plans",
            path=target,
            details=[str(path) for path in found],
            hint="the sources or options changed between parts: remove the folders of those that are not wanted",
        )
    return PartsFolder(target, found[0].name.removeprefix(start)) if found else None


def _records(shared: PartsFolder) -> list[dict[str, Any]]:
    """The records of all parts in order. Raises MissingParts, Inconsistent, CorruptFile."""
    listed = [entry for entry in entries_in(shared.root) if entry.name.startswith("part-") and entry.suffix == ".json"]
    records = {}
    for path in listed:
        with reading(path):
            record = parse_json(read_small(path, MAX_RECORD), "the record of a part")
            if not isinstance(record, dict) or record.get("schema") != SCHEMA or not _is_part(record, shared.digest):
                raise CorruptFile("the record of a part was not written by this version of ckpt", hint="remove it and run the part again")
            records[record["parts"], record["part"]] = record
    counts = sorted({count for count, _ in records})
    if len(counts) > 1:
        raise Inconsistent(
            f"the output was cut into {' and into '.join(map(str, counts))} parts",
            path=shared.root,
            hint="remove the records (part-*.json) of those that are not wanted",
        )
    count = counts[0] if counts else 0
    missing = [number for number in range(count) if (count, number) not in records]
    if missing or not count:
        named = ", ".join(map(str, missing[:12])) + (f" and {len(missing) - 12} more" if len(missing) > 12 else "")
        text = f"{len(missing)} of {count} parts are not written yet: {named}" if count else "no part is written yet"
        raise MissingParts(text, path=shared.target, hint="run each of them (again), as the others were run; then publish again")
    return [records[count, number] for number in range(count)]


def _is_part(record: Mapping[str, Any], digest: str) -> bool:
    number, count, whole = record.get("part"), record.get("parts"), record.get("plan_digest")
    numbers = type(number) is int and type(count) is int and 0 <= number < count <= MAX_PARTS
    return numbers and isinstance(whole, str) and whole.startswith(digest) and (number != 0 or isinstance(record.get("manifest"), dict))


def _check_files(shared: PartsFolder, files: Mapping[str, int], headers: Mapping[str, list[int]]) -> None:
    """The files have the sizes and headers of the plan, on this machine too. Raises Inconsistent."""
    with Files() as opened:
        for name, size in files.items():
            path = shared.output / name
            try:
                length, crc = headers[name]
                right = size_of(path) == size and zlib.crc32(opened.source(path).read(0, length)) == crc
            except (CkptError, KeyError, ValueError):
                right = False
            if not right:
                raise Inconsistent(
                    "this file is not what the parts wrote",
                    path=path,
                    expected=f"{size} bytes with the header of the plan",
                    hint="if another machine wrote it, its file system may not be shared, or not show it yet; or run the parts again",
                )


def _checksums(known: Mapping[str, Mapping[str, str]], records: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The CRC-32 of every tensor, by file and name, from the tiles of all parts."""
    whole: dict[str, dict[str, str]] = {}
    for file, crcs in known.items():
        tiles: dict[str, list[tuple[int, int, int]]] = {}
        for record in records:
            for name, parts in record["tiles"].get(file, {}).items():
                tiles.setdefault(name, []).extend(tuple(part) for part in parts)
        found = {name: f"{combined((crc, length) for _, crc, length in sorted(parts)):08x}" for name, parts in tiles.items()}
        whole[file] = dict(sorted({**crcs, **found}.items()))
    return whole


def _is_published(target: Path) -> Published | None:
    """An output that was published before, which is no error: a job may run again."""
    with contextlib.suppress(CkptError):
        manifest = read_manifest(target)
        if manifest is not None:
            return Published(target, 0, manifest.outputs, sum(len(known) for known in manifest.checksums.values()))
    return None
