"""Outputs written by the machines of a Ray cluster: a task per part, each of which plans for itself and writes to the shared file system.

The driver has planned the output already. It leaves a mark in the folder of the parts, submits the tasks, and publishes as
`ckpt publish` does. If a task fails, or the driver is interrupted, the mark is taken away, which ends the others, and nothing is left.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt_cli import __version__
from ckpt_cli.engines.call import PartCall
from ckpt_cli.engines.ray_cluster import connected, imported, run_tasks, threads_of_a_task
from ckpt_cli.engines.ray_task import Outcome, mark_of, write_part
from ckpt_cli.output.options import WritingOptions
from ckpt_cli.output.part import Part
from ckpt_cli.output.parts import publish_parts
from ckpt_cli.output.parts_folder import PartsFolder
from ckpt_cli.output.publish import Order, Publication, publish
from ckpt_cli.output.target import make_parents, remove_empty
from ckpt_cli.output.writer import Written, output_errors
from ckpt_cli.progress import Progress, Silent


def publish_by_ray(orders: Sequence[Order], call: PartCall, options: WritingOptions, progress: Progress | None) -> list[Publication]:
    """Write and publish all orders, by default a task per output file.

    Raises what `publish` and the tasks raise, EngineFailed, and Unsupported without Ray.
    """
    ray = imported()
    planned = publish(orders, dry_run=True)
    count = options.ray_parts or max(len(order.plan.files) for order in orders) or 1
    parts = [Part(number, count, whole_files=options.ray_parts is None) for number in range(count)]
    shared = [PartsFolder(order.target.folder, order.plan.digest) for order in orders]
    mark, created = uuid.uuid4().hex, list[Path]()
    try:
        for folder in shared:
            with output_errors(folder.target):
                created += make_parents(folder.target)
                # Left by a run that was killed: everything is written again.
                folder.remove()
                folder.root.mkdir()
                mark_of(folder).write_text(mark)
        shown = _Shown(progress or Silent(), shared, sum(order.plan.bytes_written for order in orders), count)
        with shown, connected(ray, options.ray_address):
            _write(ray, call, parts, options.jobs, shared, mark, shown)
        published = publish_parts([order.target.folder for order in orders], digests=[order.plan.digest for order in orders])
    except BaseException:
        for folder in shared:
            folder.remove()
        remove_empty(created)
        raise
    return [
        Publication(Written(before.written.files, done.overflows, done.non_finite), before.free, before.side_files)
        for before, done in zip(planned, published, strict=True)
    ]


def _write(
    ray: Any, call: PartCall, parts: Sequence[Part], jobs: int | None, shared: Sequence[PartsFolder], mark: str, shown: _Shown
) -> None:
    """Run a task per part. Raises the error of the first that fails, when the others have ended."""
    threads = threads_of_a_task(ray, jobs)

    def count(_: Part, outcome: Outcome) -> None:
        shown.done += 1

    def take_marks_away() -> None:
        for folder in shared:
            with contextlib.suppress(OSError):
                mark_of(folder).unlink()

    run_tasks(
        ray,
        write_part,
        parts,
        lambda part: (call, str(part), threads, shared, mark, __version__),
        threads=threads,
        done=count,
        look=shown.look,
        call_off=take_marks_away,
    )


class _Shown:
    """Progress by what lies on the disk, so that no task has to report; what is begun again does not count twice."""

    def __init__(self, progress: Progress, shared: Sequence[PartsFolder], total: int, count: int) -> None:
        self.done = 0
        self._progress, self._shared, self._total, self._count, self._seen = progress, shared, total, count, 0

    def __enter__(self) -> _Shown:
        self._progress.start(self._total, self._label)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.finish()

    @property
    def _label(self) -> str:
        return f"{self.done} of {self._count} parts"

    def look(self) -> None:
        """Tell what came since the last look."""
        now = self._total if self.done == self._count else min(sum(map(_on_disk, self._shared)), self._total)
        if now > self._seen:
            self._progress.advance(now - self._seen, self._label)
            self._seen = now


def _on_disk(shared: PartsFolder) -> int:
    """Bytes of the files that have been written: they are sparse before."""
    with contextlib.suppress(OSError), os.scandir(shared.output) as entries:
        return sum(min(status.st_blocks * 512, status.st_size) for status in (entry.stat(follow_symlinks=False) for entry in entries))
    return 0
