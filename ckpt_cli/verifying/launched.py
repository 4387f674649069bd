"""The parts of a verification that a launcher started, which meet in a folder beside what is verified, or that a Ray cluster does."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from ckpt_cli.engines.call import lasting, part_call
from ckpt_cli.errors import Inconsistent, NotWritable, UsageError
from ckpt_cli.launchers import environments_above, launcher_of
from ckpt_cli.output.part import Part
from ckpt_cli.output.parts import alone
from ckpt_cli.output.parts_folder import DIGITS, PartsFolder
from ckpt_cli.output.staging import sync_folder
from ckpt_cli.output.writer import output_errors
from ckpt_cli.paths import absolute
from ckpt_cli.progress import Progress
from ckpt_cli.results.verify import VerifyPart
from ckpt_cli.urls import is_remote
from ckpt_cli.verifying.gathering import unlike
from ckpt_cli.verifying.options import Asked

MARK = ".ckpt-verify-"


class _Meeting(PartsFolder):
    """The folder of one verification."""

    @property
    def root(self) -> Path:
        return self.target.parent / f".{self.target.name}{MARK}{self.digest[:DIGITS]}"


def check_beside_of(target: Path) -> None:
    """Raise UsageError or NotWritable if the parts cannot meet beside ``target``: said before anything is read."""
    parent = Path(absolute(target)).parent
    hint = "pass --part auto --json, and gather what each process prints: ckpt verify PATH --gather part-*.json"
    if is_remote(parent):
        raise UsageError("the parts meet in a folder beside what is verified, which is not on this machine", path=target, hint=hint)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise NotWritable("the parts meet in a folder beside what is verified, where this user may not write", path=parent, hint=hint)


@contextlib.contextmanager
def parts_that_meet(target: Path, part: VerifyPart) -> Iterator[list[Path]]:
    """Leave a part for the others. To the process that completes them: the documents of all, which are gone afterwards; to others: none.

    Raises Inconsistent if another process of the run did the same part: its document stays.
    """
    launcher = launcher_of(os.environ, environments_above())
    run = launcher.run_of(os.environ) if launcher is not None else ""
    name = hashlib.sha256(f"{part.digest}/{run}".encode()).hexdigest()
    meeting = _Meeting(Path(absolute(target)), name)
    once = launcher is not None and launcher.runs_once(os.environ)
    with output_errors(meeting.target):
        meeting.root.mkdir(exist_ok=True)
    with alone(meeting.root):
        with output_errors(meeting.target):
            _leave(meeting, part, once)
        if len(meeting.done(part.parts)) < part.parts:
            yield []
            return
        try:
            yield [meeting.record(Part(number, part.parts)) for number in range(part.parts)]
        finally:
            meeting.remove()


def _leave(meeting: _Meeting, part: VerifyPart, once: bool) -> None:
    """Write the document of a part. Raises Inconsistent if it is there, unless a run that is not ``once`` left it in an earlier try."""
    record = meeting.record(Part(part.part, part.parts))
    own = meeting.root / f".{uuid.uuid4().hex[:12]}"
    meeting.replace(own, part.model_dump_json().encode())
    try:
        # Both times are of the file system, so the clocks of machines do not matter: what is older than this process is of an earlier try.
        began = own.stat().st_mtime - part.seconds
        if record.exists() and (once or record.stat().st_mtime >= began):
            raise Inconsistent(
                f"another process of this run did part {part.part} of {part.parts} as well",
                path=record,
                expected="each part once: --part auto takes its number from the launcher, which gave two processes the same",
                hint="remove the folder of this file, pass --part K/N --json to each process, and gather what they print: "
                "ckpt verify PATH --gather part-*.json",
            )
        os.replace(own, record)
        sync_folder(record.parent)
    finally:
        own.unlink(missing_ok=True)


def parts_of_nodes(function: Callable[..., VerifyPart], asked: Asked, progress: Progress | None) -> list[VerifyPart]:
    """All parts, each from a task of a Ray cluster that calls ``function`` (`verify_part`).

    Raises what tasks raise, EngineFailed, and Inconsistent for nodes that see other files.
    """
    from ckpt_cli.engines.ray_checks import parts_by_ray

    options = asked.options
    named = {"type": asked.type, "step": asked.step, "also": [*map(lasting, asked.also)]}
    named["against"] = lasting(asked.against) if asked.against is not None else None
    call = part_call(function, [lasting(asked.path)], options, reads=(asked.path, asked.against, *asked.also), **named)
    found = parts_by_ray(call, options.ray_address, options.ray_parts, options.jobs, progress)
    node, first = found[0]
    for other, part in found[1:]:
        if part.digest != first.digest:
            text = f"node {other} verified something else than node {node}: {unlike(part, first)}"
            hint = "all nodes need one file system, and nothing may write to what is verified"
            raise Inconsistent(text, path=asked.path, hint=hint)
    return [part for _, part in found]
