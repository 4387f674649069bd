"""From a plan to a folder: files beside the weights, disk space, writing, and renaming into place."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_cli import shell
from ckpt_cli.dtypes import overflow_hint
from ckpt_cli.errors import CastOverflow, CkptError, OutputExists, Unreadable
from ckpt_cli.files.folders import holds_something
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.remote.source import MEMORY
from ckpt_cli.files.source import Watched, size_of
from ckpt_cli.formats.ages import unversioned
from ckpt_cli.hub.assets import CONFIG, Assets
from ckpt_cli.hub.config_text import config_with, config_with_dtype
from ckpt_cli.hub.critics import repaired_class
from ckpt_cli.hub.entries.wrapped import unwrapped_entries
from ckpt_cli.hub.text_assets import unmarked
from ckpt_cli.names import Write, plural
from ckpt_cli.output import plan
from ckpt_cli.output.interrupted.emptied import remains_notes
from ckpt_cli.output.interrupted.place import half_published, left_over_bytes, remove_published
from ckpt_cli.output.manifest import versions
from ckpt_cli.output.part import Part
from ckpt_cli.output.parts import publish_parts, write_part
from ckpt_cli.output.sinks.in_store import FolderInStore
from ckpt_cli.output.sinks.sink import Output
from ckpt_cli.output.sinks.upload import BATCH
from ckpt_cli.output.staging import Staging
from ckpt_cli.output.target import check_place, check_space, check_target, make_parents, refuse_existing, remove_empty
from ckpt_cli.output.writer import Written, execute, lanes_of
from ckpt_cli.progress import Progress
from ckpt_cli.results.written import FileInfo, PartDone
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.parallel import default_jobs
from ckpt_cli.tensors.reading import SLAB
from ckpt_cli.urls import is_remote

DEFAULT_SHARD_SIZE = 5_000_000_000
RESIDENT = 60 << 20
"""Memory of the program itself, in bytes; the buffers come on top."""

SideFiles = Mapping[str, bytes | Path]

SUM_MEMORY = 36
"""Bytes that one element of a weighted sum needs: accumulators, what was read, what will be written."""

WORTH_KEEPING = 2 * 10**9
"""Bytes of a file that one does not like to write twice."""


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """The folder of an output: a new one, or (``in_place``) an existing one whose files stay unchanged."""

    folder: Path
    overwrite: bool = False
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """One folder to be written.

    ``manifest`` and ``approve`` are called when the weights are written, ``watched`` are more files that must not have changed by then.
    ``check`` is called with the folder that holds the whole output, and raises if it must not have its name: before it has one; for
    files that are added to a folder right after, and then they are withdrawn; for an address not at all, which nobody can read before.
    """

    plan: plan.Plan
    side_files: SideFiles
    target: OutputFolder
    manifest: Callable[[Written], bytes]
    approve: Callable[[Written], None] | None = None
    watched: Sequence[Watched] = ()
    check: Callable[[Path], None] | None = None

    @property
    def checked_before(self) -> bool:
        """Whether the output is whole and can be read before it has its name."""
        return not self.target.in_place and not is_remote(self.target.folder)

    @property
    def bytes_written(self) -> int:
        """Weights, and side files that are copied."""
        copied = sum(size_of(path) for path in self.side_files.values() if isinstance(path, Path))
        return self.plan.bytes_written + copied


@dataclass(frozen=True, slots=True)
class Publication:
    """What was written, or in a dry run would be; ``free`` is the free disk space in bytes before that.

    ``replaced``: a folder of this name that held something was there.
    """

    written: Written
    free: int | None
    side_files: SideFiles
    part: PartDone | None = None
    notes: tuple[Note, ...] = ()
    replaced: bool = False


def model_files(assets: Assets, whole: plan.Plan) -> dict[str, bytes | Path]:
    """The assets of a model, with a config.json that names the dtype which most weights have, a critic's class, and no fused adapters."""
    side = {name: unmarked(path) for name, path in assets.files.items()}
    elements: Counter[str] = Counter()
    floats = [output for output in whole.tensors if output.dtype.kind == "float"]
    for output in [output for output in floats if output.name not in whole.kept] or floats:
        elements[output.dtype.torch] += output.tensor.numel
    if assets.made and elements:
        side[CONFIG] = config_with(b"{}", {**assets.config, "torch_dtype": elements.most_common(1)[0][0]})
    elif CONFIG in assets.files and elements:
        side[CONFIG] = config_with_dtype(assets.files[CONFIG], elements.most_common(1)[0][0], only=len(elements) == 1)
    if CONFIG in side:
        shapes = {output.name: output.tensor.shape for output in whole.tensors}
        repaired = {**repaired_class(assets.config, shapes), **unwrapped_entries(assets.config, shapes)}
        if repaired or assets.unsaid:
            side[CONFIG] = config_with(side[CONFIG], repaired, assets.unsaid)
    return side


def publish(
    orders: Sequence[Order],
    *,
    dry_run: bool = False,
    jobs: int | None = None,
    checksum: bool = False,
    progress: Progress | None = None,
    part: Part | None = None,
    write: Write = "auto",
) -> list[Publication]:
    """Write plans and their side files as folders that appear complete and all together, or not at all.

    All are written and approved before the first is renamed into place; if a later one cannot be renamed, the earlier ones are withdrawn
    again. ``dry_run``: only check what can be checked without writing: space, permissions, existing files. ``checksum`` is for
    `execute`. ``part``: write one part of each, and publish nothing, unless a launcher started all parts and this is the last one to be
    done. ``write``: whether files are filled front to back; "auto" where the file system takes nothing else, which a note says.
    Raises OutputError, and what `execute` raises.
    """
    try:
        orders = [_checked(order) for order in orders]
    except OutputExists:
        for order in orders if not dry_run else ():
            remove_published(order.target.folder)
        raise
    if part is not None and not dry_run:
        return _parts(orders, part, jobs, progress)
    replaced = [order.target.overwrite and not order.target.in_place and holds_something(order.target.folder) for order in orders]
    # What an interrupted run left is kept or removed.
    needed = {order.target.folder: max(0, order.bytes_written - left_over_bytes(order.target.folder)) for order in orders}
    free = check_space(needed, _space_hint(orders))
    notes: list[tuple[Note, ...]] = [()] * len(orders)
    if dry_run:
        planned = [Written({file.name: file.size for file in order.plan.files}, {}) for order in orders]
    else:
        created: list[Path] = []
        outputs: list[Output] = []
        try:
            with contextlib.ExitStack() as stack:
                _stage(orders, stack, created, outputs, write, checksum=checksum)
                planned = _written(orders, outputs, jobs=jobs, checksum=checksum, progress=progress)
                notes = [_way_notes(output, write, done) for output, done in zip(outputs, planned, strict=True)]
            notes = [(*said, *remains_notes(order.target.folder)) for said, order in zip(notes, orders, strict=True)]
        except BaseException as error:
            remove_empty(created)
            kept = [output.kept for output in outputs if output.kept is not None]
            _tell_kept(error, kept, whole=orders[0].bytes_written if sum(len(order.plan.files) for order in orders) == 1 else 0)
            raise
    return [
        Publication(written, free[order.target.folder], order.side_files, notes=said, replaced=had)
        for order, written, said, had in zip(orders, planned, notes, replaced, strict=True)
    ]


def _parts(orders: Sequence[Order], part: Part, jobs: int | None, progress: Progress | None) -> list[Publication]:
    """Write one part of each order; the last part of a launched run publishes all of them."""
    for order in orders:
        make_parents(order.target.folder)
    free = check_space({order.target.folder: order.bytes_written // part.count for order in orders}, _space_hint(orders))
    written = [
        write_part(
            order.plan,
            part,
            order.target.folder,
            order.side_files,
            order.manifest,
            approve=order.approve,
            watched=order.watched,
            overwrite=order.target.overwrite,
            jobs=jobs,
            progress=progress,
        )
        for order in orders
    ]
    complete = part.launched and all(len(done) == part.count for _, done in written)
    if complete:
        found = publish_parts([order.target.folder for order in orders], digests=[order.plan.digest for order in orders])
        # What all parts counted, and not only this one.
        written = [
            (replace(made, overflows=whole.overflows, non_finite=whole.non_finite), done)
            for (made, done), whole in zip(written, found, strict=True)
        ]
    return [
        Publication(
            made,
            free[order.target.folder],
            order.side_files,
            PartDone(number=part.number, count=part.count, done=tuple(done), launched=part.launched, published=complete),
        )
        for order, (made, done) in zip(orders, written, strict=True)
    ]


def _checked(order: Order) -> Order:
    """An order that seems possible, without the side files that already exist. Raises OutputError."""
    target = order.target
    check_place(target.folder, in_place=target.in_place)
    for path in order.side_files.values():
        if isinstance(path, Path) and not is_remote(path) and not os.access(path, os.R_OK):
            raise Unreadable("a file that belongs beside the weights cannot be read", path=path)
    if not target.in_place:
        return order
    linked = half_published(target.folder)
    refuse_existing(target.folder, [file.name for file in order.plan.files], order.plan.index_name, order.plan.sources, linked)
    missing = {n: c for n, c in order.side_files.items() if target.folder / n in linked or not os.path.lexists(target.folder / n)}
    return replace(order, side_files=missing)


def _stage(
    orders: Sequence[Order], stack: contextlib.ExitStack, created: list[Path], outputs: list[Output], write: Write, *, checksum: bool
) -> None:
    """Add where the outputs are built to ``outputs``, and the parent folders that were made to ``created``.

    Where there are several files of weights, and a change of the sources would show, a run that is interrupted can go on with those
    that are finished.
    """
    several = sum(len(order.plan.files) for order in orders) > 1
    for order in orders:
        folder = order.target.folder
        created += make_parents(folder)
        resumable = several and not unversioned(order.plan.sources)
        key = _key(order.plan, checksum=checksum) if resumable else None
        output: Output = FolderInStore(folder) if is_remote(folder) else Staging(folder, write, key)
        outputs.append(output)
        stack.enter_context(output)


def _key(whole: plan.Plan, *, checksum: bool) -> str:
    """What finished files of an earlier run must have in common with this one: the plan, and what carries it out."""
    return hashlib.sha256(json.dumps([whole.digest, versions(), checksum]).encode()).hexdigest()[:16]


def _tell_kept(error: BaseException, kept: Sequence[Path], *, whole: int) -> None:
    """Add to an error that the same command goes on with what is finished; of one file of ``whole`` bytes, that nothing ever is."""
    if kept:
        again = "run the same command again to go on with the files that are finished, or give them up"
        text = f"{again}: rm -r {' '.join(map(shell.path, kept))}"
        if isinstance(error, CkptError):
            error.hint = f"{error.advice}; then {text}" if error.advice else text
        else:
            error.__notes__ = ["finished files are kept", text]  # as `add_note` of Python 3.11
    elif whole >= WORTH_KEEPING and not isinstance(error, Exception):
        error.__notes__ = [
            "no unfinished output is left",
            "only finished files are kept, and this output has one: --max-shard-size 1GB makes several",
        ]


def _written(
    orders: Sequence[Order], outputs: Sequence[Output], *, jobs: int | None, checksum: bool, progress: Progress | None
) -> list[Written]:
    """Write all outputs, then publish all."""
    existed = [os.path.isdir(order.target.folder) for order in orders]
    written = [
        execute(
            order.plan,
            output,
            order.side_files,
            jobs=jobs,
            watched=order.watched,
            approve=order.approve,
            checksum=checksum,
            progress=progress,
            last_file=_manifest_of(order),
        )
        for order, output in zip(orders, outputs, strict=True)
    ]
    try:
        for order, output in zip(orders, outputs, strict=True):
            if order.check is not None and order.checked_before:
                order.check(output.folder)
        for order, output, replaces in zip(orders, outputs, existed, strict=True):
            if order.target.in_place:
                output.publish_into(order.target.folder)
            else:
                # Something may have come to stand there while the weights were written.
                check_target(order.target.folder, (), overwrite=order.target.overwrite)
                output.publish(replace=replaces)
        for order in orders:
            if order.check is not None and order.target.in_place:
                order.check(order.target.folder)
    except BaseException:
        for output in reversed(outputs):
            output.withdraw()
        raise
    return written


def _way_notes(output: Output, write: Write, written: Written) -> tuple[Note, ...]:
    notes = []
    if write == "auto" and output.in_order and not is_remote(output.target):
        text = "the file system of the output only appends to files, so they were written front to back"
        notes.append(Note("warning", "sequential", text))
    if written.kept:
        text = f"{len(written.kept)} of {len(written.files)} files from the interrupted run, read and compared"
        notes.append(Note("info", "resumed", text))
    return tuple(notes)


def _manifest_of(order: Order) -> Callable[[Written], tuple[str, bytes]]:
    return lambda written: (MANIFEST, order.manifest(written))


def refuse_overflows(written: Written, whole: plan.Plan | None = None) -> None:
    """Raise CastOverflow if finite values became infinite; the hint follows from the plan."""
    overflows = written.overflows
    if overflows:
        within = f"in {plural(len(overflows), 'tensor')}"
        values = plural(sum(overflows.values()), f"finite value {within} is", f"finite values {within} are")
        raise CastOverflow(
            f"{values} too large for the requested dtype",
            tensor=max(overflows, key=lambda name: overflows[name]),
            expected="values that stay finite",
            hint=overflow_hint([output.dtype for output in whole.tensors if output.name in overflows]) if whole is not None else None,
        )


def overflow_notes(written: Written) -> list[Note]:
    """Notes about values that became infinite, if that is allowed."""
    count = sum(written.overflows.values())
    return [Note("warning", "cast-overflow", f"{count} finite values became infinite")] if count else []


def written_facts(
    whole: plan.Plan, folder: Path, published: Publication, jobs: int | None, not_assets: Sequence[str] = ()
) -> dict[str, Any]:
    """The fields of a result that every written folder has; side files are assets, except ``not_assets``."""
    dtypes: Counter[str] = Counter()
    for output in whole.tensors:
        dtypes[output.dtype.code] += output.tensor.numel
    extra = [FileInfo(name=whole.index_name, bytes=len(whole.index))] if whole.index is not None and whole.index_name else []
    buffers = plan.TILE + SLAB + 2 * plan.TILE * any(output.is_cast for output in whole.tensors)
    if any(output.combination is not None for output in whole.tensors):
        buffers = max(buffers, SLAB + SUM_MEMORY * plan.SUM_ELEMENTS)
    workers = jobs or default_jobs()
    stores = 2 * BATCH * lanes_of(whole.files, workers) if is_remote(folder) else 0
    stores += MEMORY if any(is_remote(source.path) for source in whole.sources) else 0
    return {
        "files": (*(FileInfo(name=file.name, bytes=file.size) for file in whole.files), *extra),
        "tensors": len(whole.tensors),
        "elements": whole.elements,
        "bytes_read": whole.bytes_read,
        "bytes_written": whole.bytes_written,
        "dtypes": dict(dtypes),
        "cast": sum(output.is_cast for output in whole.tensors),
        "kept_in_fp32": tuple(sorted(whole.kept)),
        "dropped": dict(whole.dropped),
        "assets": tuple(sorted(set(published.side_files) - set(not_assets))),
        "overflows": published.written.overflows,
        "disk_free": published.free,
        "peak_memory": RESIDENT + workers * buffers + stores,
        "plan_digest": whole.digest,
        "part": published.part,
        "replaced": published.replaced,
    }


def _space_hint(orders: Sequence[Order]) -> str:
    """What helps against a full disk: another one, and a narrower dtype if most of the weights are float32."""
    wide = sum(output.nbytes for order in orders for output in order.plan.tensors if output.dtype.code in ("F32", "F64"))
    in_place = any(order.target.in_place for order in orders)
    elsewhere = "use -o with another disk instead of --in-place" if in_place else "choose another disk with -o"
    written = sum(order.bytes_written for order in orders)
    return f"{elsewhere}, or pass --dtype bf16, which halves float32 weights" if 2 * wide > written else elsewhere
