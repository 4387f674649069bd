"""An output that several processes write, without a word between them: parts of one plan, in any order, on any machine, again if need be.

The parts of an output share a folder beside it, which is named after the digest of the plan: whoever plans the same output from the
same files finds the same folder. It holds the output as it grows, and a record per part that is done; part 0 also leaves the side files
and the manifest, without the checksums that only the others know. `publish_parts` proves from the records that all is there, and renames.

1. `write_part`: `share_of` says what belongs to the part, `writer.write_share` writes it, the record comes last.
2. `publish_parts`: the records are those of one plan, one division and all parts; all parts found the same files beside the weights, and
   sources that did not change in between; their bytes add up to the files; the files have the sizes and headers of the plan, the side
   files the bytes that part 0 wrote, and samples of what each part wrote are in them. All weights are read again by `verify` only.
   The manifest is completed, with the checksums of all parts and what any of them allowed, the folder claimed (`PartsFolder.claim`),
   renamed, and the records removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_cli.errors import CkptError, CorruptFile, Inconsistent, MissingParts, NotFound, NotWritable, Unreadable, reading
from ckpt_cli.files.crc32 import combined, crc_of_content
from ckpt_cli.files.descriptors import MadeFrom
from ckpt_cli.files.folders import entries_in
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.manifest import read_manifest
from ckpt_cli.files.safetensors_file import read_header
from ckpt_cli.files.source import Files, Watched, read_small, size_of
from ckpt_cli.names import few
from ckpt_cli.output.interrupted.place import remove_leftovers
from ckpt_cli.output.part import MAX_PARTS, Part
from ckpt_cli.output.parts_folder import DIGITS, MARK, SCHEMA, PartsFolder, Record, Whole
from ckpt_cli.output.plan import Plan, known_checksums
from ckpt_cli.output.share import Share, cutting, share_of
from ckpt_cli.output.sinks.files import takes_positions
from ckpt_cli.output.staging import Staging, files_beneath, sync_folder
from ckpt_cli.output.target import check_target, remove_empty
from ckpt_cli.output.writer import Written, output_errors, write_share
from ckpt_cli.progress import Progress

MAX_RECORD = 1 << 30
ALLOWING = "allow_"
"""How the options begin that permit values, which one part may have needed and another not."""

AGAIN = "remove it and run the part again"


@dataclass(frozen=True, slots=True)
class Published:
    """An output that has its name: its files of weights with their sizes in bytes; ``parts`` is 0 if it was there before.

    ``overflows`` and ``non_finite`` are what all parts found, as in `Written`.
    """

    folder: Path
    parts: int
    files: Mapping[str, int]
    tensors: int
    overflows: dict[str, int] = field(default_factory=dict)
    non_finite: dict[str, dict[int, int]] = field(default_factory=dict)


def write_part(
    plan: Plan,
    part: Part,
    target: Path,
    side_files: Mapping[str, bytes | Path],
    manifest: Callable[[Written], bytes],
    *,
    approve: Callable[[Written], None] | None = None,
    watched: Sequence[Watched] = (),
    overwrite: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> tuple[Written, list[int]]:
    """Write one part; returns what it wrote, and the parts that are done by now. Raises what `write_share` and ``approve`` raise."""
    shared, share = PartsFolder(target, plan.digest), share_of(plan, part)
    with output_errors(target):
        shared.output.mkdir(parents=True, exist_ok=True)
        if not takes_positions(shared.root):
            remove_empty((shared.root, shared.output))
            message = "the file system only appends to files, and parts are written to their positions in them"
            raise NotWritable(message, path=target, hint="leave out --part, or choose another place with -o")
        done = write_share(share, shared.output, jobs=jobs, progress=progress)
        if approve is not None:
            approve(done.written)
        beside = dict(side_files) if plan.index is None or plan.index_name is None else {plan.index_name: plan.index, **side_files}
        if part.number == 0:
            _remove_others(shared.output, {*beside, *(file.name for file in plan.files)})
            crcs = {name: shared.replace(shared.output / name, content) for name, content in beside.items()}
            whole = _whole(plan, {name: crcs[name] for name in side_files}, manifest, overwrite=overwrite)
        else:
            crcs, whole = _crcs(beside), None
        for source in watched:
            source.check_unchanged()
        options = json.loads(manifest(done.written))["options"]
        sync_folder(shared.output)
        record = Record(
            schema_version=SCHEMA,
            plan_digest=plan.digest,
            part=part.number,
            parts=part.count,
            cutting=cutting(part),
            wrote=share.wrote,
            tiles=done.tiles,
            samples=_sampled(share, shared.output),
            overflows=done.written.overflows,
            non_finite=done.written.non_finite,
            side_files=crcs,
            allowed=sorted(name for name, value in options.items() if name.startswith(ALLOWING) and value is True),
            made_from=MadeFrom.of(source.identity for source in plan.sources),
            whole=whole,
        )
        shared.replace(shared.record(part), record.model_dump_json().encode())
        return done.written, shared.done(part.count)


def _sampled(share: Share, output: Path) -> dict[str, list[tuple[int, int, int]]]:
    """The samples of a share, as they are in the files."""
    with Files() as files:
        return {
            name: [(at, length, zlib.crc32(files.source(output / name).read(at, length))) for at, length in places]
            for name, places in share.samples.items()
        }


def _whole(plan: Plan, side_files: dict[str, int], manifest: Callable[[Written], bytes], *, overwrite: bool) -> Whole:
    """All that publishing needs to know of the plan."""
    written = Written({file.name: file.size for file in plan.files}, {}, side_files=side_files)
    written.checksums.update({file.name: known_checksums(file) for file in plan.files})
    headers = {file.name: (file.size, len(file.header), zlib.crc32(file.header)) for file in plan.files}
    return Whole(manifest=json.loads(manifest(written)), headers=headers, overwrite=overwrite, tensors=len(plan.tensors))


def _remove_others(output: Path, names: set[str]) -> None:
    """Remove what an earlier run of part 0 copied, and a source no longer has."""
    for path in files_beneath(output):
        if path.relative_to(output).as_posix() not in names:
            path.unlink(missing_ok=True)


def _crcs(contents: Mapping[str, bytes | Path]) -> dict[str, int]:
    with Files() as files:
        return {name: crc_of_content(content, files) for name, content in contents.items()}


# -- publishing ------------------------------------------------------------------------------------------------------


def publish_parts(targets: Sequence[Path], *, digests: Sequence[str] = (), overwrite: bool = False) -> list[Published]:
    """Give outputs their names, once all parts of all of them are proved to be written: all outputs appear, or none.

    ``digests`` are those of the plans, where they are known; otherwise each output must have parts of one plan only. Raises NotFound if no
    part was written, MissingParts (naming them), Inconsistent if parts of different plans are there or the files are not those that the
    parts wrote, CorruptFile, and OutputError. Nothing is lost then. It is no error if an output has its name already.
    """
    found = [PartsFolder(target, digests[i]) if digests else _shared(target) for i, target in enumerate(targets)]
    with contextlib.ExitStack() as stack:
        for root in sorted({shared.root for shared in found if shared is not None}):
            stack.enter_context(alone(root))
        waiting: list[tuple[PartsFolder, Staging]] = []
        outputs: list[Published] = []
        for target, shared in zip(targets, found, strict=True):
            if shared is not None and shared.has_its_name:
                shared.remove()
            remove_leftovers(target)
            if shared is None or not shared.root.is_dir():
                outputs.append(_there_before(target))
                continue
            with output_errors(target):
                outputs.append(_completed(shared, overwrite=overwrite))
            waiting.append((shared, stack.enter_context(Staging.of(shared.output, target))))
        try:
            for shared, staging in waiting:
                with output_errors(shared.target):
                    shared.claim()
                    staging.publish(replace=os.path.isdir(shared.target))
        except BaseException:
            for _, staging in reversed(waiting):
                staging.withdraw()
            raise
        for shared, _ in waiting:
            shared.remove()
    return outputs


def _completed(shared: PartsFolder, *, overwrite: bool) -> Published:
    """An output that is proved to be whole, with its manifest."""
    if shared.was_renamed:
        hint = f"remove {shared.root} and run all parts again"
        raise Inconsistent("the parts were published before, and that output is gone", path=shared.target, hint=hint)
    whole, records = _records(shared)
    _check_same_files(shared, records)
    _check_files(shared, whole, records[0].side_files)
    _check_samples(shared, records)
    manifest = dict(whole.manifest)
    with reading(shared.record(Part(0, len(records)))):
        try:
            known = manifest["checksums"]
            manifest["checksums"] = {**known, "files": _checksums(known["files"], records)}
            manifest["options"] = {**manifest["options"], **{name: True for record in records for name in record.allowed}}
        except (KeyError, TypeError, AttributeError):
            raise CorruptFile("the manifest in the record of part 0 is damaged", hint="run part 0 again") from None
    shared.replace(shared.output / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    check_target(shared.target, (), overwrite=overwrite or whole.overwrite)
    sizes = {name: size for name, (size, _, _) in whole.headers.items()}
    return Published(shared.target, len(records), sizes, whole.tensors, *_counts(records))


def _counts(records: Sequence[Record]) -> tuple[dict[str, int], dict[str, dict[int, int]]]:
    """The values that all parts counted: per tensor, and of sums also by the place in the formula."""
    overflows: Counter[str] = Counter()
    non_finite: dict[str, Counter[int]] = {}
    for record in records:
        overflows.update(record.overflows)
        for name, counts in record.non_finite.items():
            non_finite.setdefault(name, Counter()).update(counts)
    return dict(overflows), {name: dict(counts) for name, counts in non_finite.items()}


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
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
            hint="sources, options or installed packages differ between parts: remove the folders of those that are not wanted",
        )
    return PartsFolder(target, found[0].name.removeprefix(start)) if found else None


def _records(shared: PartsFolder) -> tuple[Whole, list[Record]]:
    """What part 0 knows, and the records of all parts in order. Raises MissingParts, Inconsistent, CorruptFile."""
    listed = [entry for entry in entries_in(shared.root) if entry.name.startswith("part-") and entry.suffix == ".json"]
    records = {(record.parts, record.part): record for record in (_record(path, shared) for path in listed)}
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
    if len({record.cutting for record in records.values()}) > 1:
        hint = f"remove {shared.root} and run all parts in one way"
        raise Inconsistent(
            "the output was cut in several ways: by several versions of ckpt, or with and without :files", path=shared.root, hint=hint
        )
    whole = records[count, 0].whole
    if whole is None:
        raise CorruptFile("the record of part 0 lacks the manifest", path=shared.record(Part(0, count)), hint="run part 0 again")
    for name, (size, _, _) in whole.headers.items():
        wrote = sum(record.wrote.get(name, 0) for record in records.values())
        if wrote != size:
            hint = f"remove {shared.root} and run all parts again"
            raise Inconsistent(f"the parts wrote {wrote} bytes of {name}", path=shared.root, expected=f"{size} bytes", hint=hint)
    return whole, [records[count, number] for number in range(count)]


def _record(path: Path, shared: PartsFolder) -> Record:
    """The record of a part. Raises CorruptFile, Inconsistent."""
    from pydantic import ValidationError

    with reading(path):
        try:
            record = Record.model_validate_json(read_small(path, MAX_RECORD))
        except ValidationError:
            raise CorruptFile("the record of a part is damaged, or of another version of ckpt", hint=AGAIN) from None
        if not record.plan_digest.startswith(shared.digest[:DIGITS]):
            raise Inconsistent("this is the record of a part of another plan", hint=AGAIN)
        if not 0 <= record.part < record.parts <= MAX_PARTS or shared.record(Part(record.part, record.parts)).name != path.name:
            raise Inconsistent("the name of this record is that of another part", hint=AGAIN)
        return record


def _check_same_files(shared: PartsFolder, records: Sequence[Record]) -> None:
    """All parts found the same files. Raises Inconsistent, naming those that changed in between."""
    first = records[0]
    for record in records[1:]:
        beside = {**first.side_files, **record.side_files}
        names = [name for name in beside if first.side_files.get(name) != record.side_files.get(name)]
        names += first.made_from.differences(record.made_from, copies=False)
        if names or first.made_from.files.keys() != record.made_from.files.keys():
            again = "run all parts again, with the files as they are now; then publish again"
            if record.made_from.machine != first.made_from.machine:
                again = f"if each machine reads a copy of its own, put one where all of them see it; {again}"
            raise Inconsistent(
                f"files changed between part {first.part} and part {record.part}: {few(names)}",
                path=shared.target,
                expected="the same files for all parts, and not other copies of them",
                hint=again,
            )


def _check_samples(shared: PartsFolder, records: Sequence[Record]) -> None:
    """The files hold what each part wrote, by samples. Raises Inconsistent."""
    with Files() as files:
        for record in records:
            for name, samples in record.samples.items():
                path = shared.output / name
                source = files.source(path)
                if any(zlib.crc32(source.read(at, length)) != crc for at, length, crc in samples):
                    raise Inconsistent(
                        f"this file does not hold what part {record.part} wrote",
                        path=path,
                        expected="one file that all parts wrote to",
                        hint="if the disks of the machines are not shared, write all parts to one that is; or run this part again",
                    )


def _check_files(shared: PartsFolder, whole: Whole, side_files: Mapping[str, int]) -> None:
    """The files have the sizes and headers of the plan, on this machine too. Raises Inconsistent."""
    with Files() as opened:
        for name, (size, length, crc) in whole.headers.items():
            path = shared.output / name
            try:
                right = size_of(path) == size and zlib.crc32(opened.source(path).read(0, length)) == crc
            except Unreadable:
                raise
            except CkptError:
                right = False
            if not right:
                raise Inconsistent(
                    "this file is not what the parts wrote",
                    path=path,
                    expected=f"{size} bytes with the header of the plan",
                    hint="if another machine wrote it, its file system may not be shared, or not show it yet; or run the parts again",
                )
        for name, crc in side_files.items():
            path = shared.output / name
            try:
                right = crc_of_content(path, opened) == crc
            except Unreadable:
                raise
            except CkptError:
                right = False
            if not right:
                raise Inconsistent("this file is not what part 0 wrote", path=path, hint="run part 0 again")


def _checksums(known: Mapping[str, Mapping[str, str]], records: list[Record]) -> dict[str, dict[str, str]]:
    """The CRC-32 of every tensor, by file and name, from the tiles of all parts."""
    whole: dict[str, dict[str, str]] = {}
    for file, crcs in known.items():
        tiles: dict[str, list[tuple[int, int, int]]] = {}
        for record in records:
            for name, parts in record.tiles.get(file, {}).items():
                tiles.setdefault(name, []).extend(parts)
        found = {name: f"{combined((crc, length) for _, crc, length in sorted(parts)):08x}" for name, parts in tiles.items()}
        whole[file] = dict(sorted({**crcs, **found}.items()))
    return whole


def _there_before(target: Path) -> Published:
    """An output that is there without any parts, so that it was published before: a job may run again. Raises NotFound if there is none."""
    with contextlib.suppress(CkptError):
        manifest = read_manifest(target)
        if manifest is not None:
            with Files() as files:
                tensors = sum(len(read_header(files.source(target / name)).entries) for name in manifest.outputs)
            return Published(target, 0, manifest.outputs, tensors)
    hint = "write the parts first, with this -o: --part 0/8 to --part 7/8 of ckpt merge or ckpt average (not needed without --part)"
    raise NotFound("no part of this output was written", path=target, hint=hint)
