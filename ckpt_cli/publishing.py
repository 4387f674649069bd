"""From a plan to a folder: what lies beside the weights, room for it, writing, and giving it its name."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_cli import plan
from ckpt_cli.assets import CONFIG, Assets, config_with, config_with_dtype
from ckpt_cli.dtypes import overflow_hint
from ckpt_cli.errors import CastOverflow, OutputExists, UsageError
from ckpt_cli.execute import Written, default_jobs, execute
from ckpt_cli.files import Source, size_of
from ckpt_cli.kernels import SLAB
from ckpt_cli.manifest import NAME as MANIFEST
from ckpt_cli.model import Note
from ckpt_cli.placing import check_space, check_target, make_parents, remove_empty
from ckpt_cli.progress import Progress
from ckpt_cli.report import FileInfo
from ckpt_cli.staging import Staging
from ckpt_cli.value_models import repaired_class

DEFAULT_SHARD_SIZE = 5_000_000_000
RESIDENT = 60 << 20
"""Memory of the program itself, in bytes; the buffers come on top."""

SideFiles = Mapping[str, bytes | Path]


@dataclass(frozen=True, slots=True)
class Target:
    """The folder that an output becomes: a new one, or (``in_place``) one whose files are all left alone."""

    folder: Path
    overwrite: bool = False
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Publication:
    """What was written, or in a dry run would be; ``free`` is the room on the disk in bytes before that."""

    written: Written
    free: int | None
    side_files: SideFiles


def as_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with one value where several may be given, as a tuple of it: include="*.mlp.*", steps=100."""
    several = ("include", "exclude", "steps", "weights")
    return {name: (value,) if name in several and isinstance(value, (str, int, float)) else value for name, value in options.items()}


def check_writing(weights_name: str | None, jobs: int | None, max_shard_size: int | None) -> None:
    """Raise UsageError for options of writing that make no sense."""
    if weights_name is not None and not re.fullmatch(r"[\w-][\w.-]*\.safetensors", weights_name):
        raise UsageError("the weights name is not a plain name of a safetensors file", expected="something like model.safetensors")
    if jobs is not None and not 1 <= jobs <= 256:
        raise UsageError("--jobs is out of range", expected="1 to 256")
    if max_shard_size is not None and max_shard_size < 1:
        raise UsageError("--max-shard-size is out of range", expected="a size such as 5GB")


def model_files(assets: Assets, whole: plan.Plan) -> dict[str, bytes | Path]:
    """The assets of a model, with a config.json that names the dtype which most weights have, and the class of a critic."""
    side: dict[str, bytes | Path] = dict(assets.files)
    elements: Counter[str] = Counter()
    for output in whole.tensors:
        if output.dtype.kind == "float":
            elements[output.dtype.torch] += output.tensor.numel
    if CONFIG in assets.files and elements:
        side[CONFIG] = config_with_dtype(assets.files[CONFIG], elements.most_common(1)[0][0])
        repaired = repaired_class(assets.config, {output.name: output.tensor.shape for output in whole.tensors})
        if repaired:
            side[CONFIG] = config_with(side[CONFIG], repaired)
    return side


def publish(
    whole: plan.Plan,
    side_files: SideFiles,
    target: Target,
    manifest: Callable[[Written], bytes],
    *,
    dry_run: bool = False,
    jobs: int | None = None,
    watched: Sequence[Source] = (),
    approve: Callable[[Written], None] | None = None,
    checksum: bool = False,
    progress: Progress | None = None,
) -> Publication:
    """Write a plan and its side files as a folder that appears whole or not at all; ``dry_run``: only check for room.

    ``manifest`` and ``approve`` are called when the weights are there, ``checksum`` is for `execute`; ``watched`` are more
    sources that must not have changed by then. Raises OutputError, and what `execute` raises.
    """
    copied = sum(size_of(path) for path in side_files.values() if isinstance(path, Path))
    free = check_space(target.folder, whole.bytes_written + copied, _space_hint(whole, target))
    if target.in_place:
        _refuse_existing(whole, target.folder)
        side_files = {name: content for name, content in side_files.items() if not os.path.lexists(target.folder / name)}
    if dry_run:
        return Publication(Written({file.name: file.size for file in whole.files}, {}), free, side_files)
    created = make_parents(target.folder)
    existed = os.path.isdir(target.folder)
    try:
        with Staging(target.folder) as staging:
            written = execute(
                whole,
                staging,
                side_files,
                jobs=jobs,
                watched=watched,
                approve=approve,
                checksum=checksum,
                progress=progress,
                last_file=lambda written: (MANIFEST, manifest(written)),
            )
            if target.in_place:
                staging.publish_into(target.folder)
            else:
                # Something may have come to stand there while the weights were written.
                check_target(target.folder, (), overwrite=target.overwrite)
                staging.publish(replace=existed)
    except BaseException:
        remove_empty(created)
        raise
    return Publication(written, free, side_files)


def refuse_overflows(written: Written, whole: plan.Plan | None = None) -> None:
    """Raise CastOverflow if finite values became infinite; the plan tells what helps."""
    overflows = written.overflows
    if overflows:
        raise CastOverflow(
            f"{sum(overflows.values())} finite values in {len(overflows)} tensors are too large for the requested dtype",
            tensor=max(overflows, key=lambda name: overflows[name]),
            expected="values that stay finite",
            hint=overflow_hint([output.dtype for output in whole.tensors if output.name in overflows]) if whole is not None else None,
        )


def overflow_notes(written: Written) -> list[Note]:
    """What is said about values that became infinite, where that is allowed."""
    count = sum(written.overflows.values())
    return [Note("warning", "cast-overflow", f"{count} finite values became infinite")] if count else []


def written_facts(whole: plan.Plan, published: Publication, jobs: int | None, not_assets: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of a result that every written folder has; side files are assets but for ``not_assets``."""
    dtypes: Counter[str] = Counter()
    for output in whole.tensors:
        dtypes[output.dtype.code] += output.tensor.numel
    extra = [FileInfo(name=whole.index_name, bytes=len(whole.index))] if whole.index is not None and whole.index_name else []
    buffers = plan.TILE + SLAB + 2 * plan.TILE * any(output.is_cast for output in whole.tensors)
    if any(output.combination is not None for output in whole.tensors):
        buffers = max(buffers, SLAB + SUM_MEMORY * plan.SUM_ELEMENTS)
    return {
        "files": (*(FileInfo(name=file.name, bytes=file.size) for file in whole.files), *extra),
        "tensors": len(whole.tensors),
        "elements": whole.elements,
        "bytes_read": whole.bytes_read,
        "bytes_written": whole.bytes_written,
        "dtypes": dict(dtypes),
        "cast": sum(output.is_cast for output in whole.tensors),
        "dropped": dict(whole.dropped),
        "assets": tuple(sorted(set(published.side_files) - set(not_assets))),
        "overflows": published.written.overflows,
        "disk_free": published.free,
        "peak_memory": RESIDENT + (jobs or default_jobs()) * buffers,
        "plan_digest": whole.digest,
    }


def _space_hint(whole: plan.Plan, target: Target) -> str:
    """What helps against a full disk: another one, and a narrower dtype if most of the weights are float32."""
    wide = sum(output.nbytes for output in whole.tensors if output.dtype.code in ("F32", "F64"))
    elsewhere = "use -o with another disk instead of --in-place" if target.in_place else "choose another disk with -o"
    return f"{elsewhere}, or pass --dtype bf16, which halves float32 weights" if 2 * wide > whole.bytes_written else elsewhere


SUM_MEMORY = 36
"""Bytes that one element of a weighted sum needs: accumulators, what was read, what will be written."""


def _refuse_existing(whole: plan.Plan, folder: Path) -> None:
    for name in (*(file.name for file in whole.files), *([whole.index_name] if whole.index_name else []), MANIFEST):
        if os.path.lexists(folder / name):
            hint = "use -o instead of --in-place"
            raise OutputExists("the checkpoint folder has a file of this name already", path=folder / name, hint=hint)
