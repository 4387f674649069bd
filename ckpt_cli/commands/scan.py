"""`scan`: what a stock loader would have run of the pickles below a path. They are followed opcode by opcode, and nothing is run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_cli.errors import CkptError, NotFound, within_memory
from ckpt_cli.files.folders import is_folder, is_there, similar_hint
from ckpt_cli.files.source import Files
from ckpt_cli.given import PathLike, boundary, path_of, progress_of
from ckpt_cli.hub_ids import of_path
from ckpt_cli.progress import Progress, stages
from ckpt_cli.results.scan import NotScanned, ScanFinding, ScanResult
from ckpt_cli.scanning.blobs import Part
from ckpt_cli.scanning.containers import Found, NotSeen, pickles_in
from ckpt_cli.scanning.severity import Severity, severity, shown
from ckpt_cli.scanning.tree import files_below, remote_code

MOST = 10_000
"""Findings that are kept: beyond them a file is hostile, and one would be enough."""


@dataclass(slots=True)
class _Tally:
    """What was found so far."""

    files: int = 0
    bytes: int = 0
    pickles: int = 0
    names: Counter[str] = field(default_factory=Counter)
    findings: list[ScanFinding] = field(default_factory=list)
    not_scanned: list[NotScanned] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    custom_code: list[str] = field(default_factory=list)


@boundary
@within_memory
def scan(path: PathLike, *, progress: Progress | None = None) -> ScanResult:
    """What ``torch.load`` or ``pickle.load`` would look up and call in every pickle below ``path``, a file or a folder.

    All files are looked at, whatever they are called, and what is in them: archives, compressed data, pickles in pickles. Of other data the
    first and last bytes are read. Raises NotFound, or Unreadable if ``path`` itself cannot be read; what cannot be read below it is
    listed in ``not_scanned``.
    """
    start, found = time.perf_counter(), _Tally()
    root, display = path_of(path), stages(progress_of(progress))
    if not is_there(root):
        named = of_path(str(root))
        raise NotFound("no such file or folder", path=root, hint=similar_hint(root) or (named.advice() if named is not None else None))
    if not is_folder(root):
        _scan_file(root, root.name, found)
    else:

        def missed(path: Path, why: str) -> None:
            found.not_scanned.append(NotScanned(file=path.relative_to(root).as_posix(), entry=None, why=why))

        folders = list(files_below(root, missed))
        total = sum(map(len, folders))
        for files in folders:
            found.custom_code += [file.relative_to(root).as_posix() for file in remote_code(files)]
            for file in files:
                display.reading(found.files, total, "files")
                try:
                    _scan_file(file, file.relative_to(root).as_posix(), found)
                except CkptError as error:
                    missed(file, error.message)
        display.reading(total, total, "files")
    return ScanResult(
        path=str(root),
        files=found.files,
        bytes=found.bytes,
        pickles=found.pickles,
        names=dict(sorted(found.names.items())),
        findings=tuple(sorted(found.findings, key=lambda finding: (finding.severity, finding.file))),
        not_scanned=tuple(found.not_scanned),
        incomplete=tuple(found.incomplete),
        custom_code=tuple(found.custom_code),
        seconds=time.perf_counter() - start,
    )


def _scan_file(path: Path, name: str, found: _Tally) -> None:
    found.files += 1
    with Files() as files:
        source = files.source(path)
        found.bytes += source.size
        seen = set[int]()
        for item in pickles_in(Part(source, 0, source.size)):
            if isinstance(item, NotSeen):
                found.not_scanned.append(NotScanned(file=name, entry=item.entry or None, why=item.why))
                continue
            if item.at is not None:
                # An archive at the end of another one is reached through both.
                place = item.at + item.trace.start
                if place in seen:
                    continue
                seen.add(place)
            found.pickles += 1
            if not item.trace.complete:
                found.incomplete.append(f"{name}: {item.entry}" if item.entry else name)
            found.findings += list(_findings(item, name, found.names))[: MOST - len(found.findings)]


def _findings(item: Found, file: str, names: Counter[str]) -> Iterator[ScanFinding]:
    """What is not expected in a pickle, each name once."""
    alike: dict[tuple[Severity, str], list[tuple[int, bool]]] = {}
    for name in item.trace.names:
        names[shown(name)] += 1
        kind = severity(name)
        if kind != "expected":
            alike.setdefault((kind, shown(name)), []).append((name.offset, bool(name.calls)))
    for (kind, text), places in alike.items():
        offset = places[0][0]
        yield ScanFinding(
            severity="dangerous" if kind == "dangerous" else "unknown",
            name=text,
            file=file,
            entry=item.entry or None,
            offset=item.base + offset,
            position=None if item.at is None else item.at + offset,
            count=len(places),
            called=any(called for _, called in places),
        )
