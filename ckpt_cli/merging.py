"""`merge`: from shards to a model folder. Decides names, dtypes, assets and place; `execute` does the writing."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_cli import manifest
from ckpt_cli.assets import CONFIG, Assets, config_notes, config_with_dtype, resolve_base, tied_pair, ties_embeddings
from ckpt_cli.descriptor import NoteInfo
from ckpt_cli.errors import Inconsistent, NoSpace, NotFound, NotWritable, OutputExists, OutputInsideSource, Unsupported, UsageError
from ckpt_cli.execute import Written, default_jobs, execute
from ckpt_cli.files import Files
from ckpt_cli.formats.base import ShardOrder
from ckpt_cli.inspection import without_tensors
from ckpt_cli.locate import MAIN, Found
from ckpt_cli.model import Component, Note, Tensor
from ckpt_cli.names import printable, stripped_names
from ckpt_cli.opening import Opened, OpenedComponent, describe_checkpoint, open_checkpoint
from ckpt_cli.plan import TILE, Plan, make_plan
from ckpt_cli.probe import same_values, unequal_copies
from ckpt_cli.progress import Progress
from ckpt_cli.report import FileInfo, MergedComponent, MergeResult
from ckpt_cli.staging import Staging

DEFAULT_SHARD_SIZE = 5_000_000_000
RESIDENT = 60 << 20
"""Memory of the program itself, in bytes; the buffers come on top."""

LORA = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|base_layer)\.")


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """The options of `merge`, with the meaning that ``ckpt merge --help`` gives them."""

    dtype: str = "keep"
    max_shard_size: int = DEFAULT_SHARD_SIZE
    weights_name: str = "model.safetensors"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    overwrite: bool = False
    in_place: bool = False
    jobs: int | None = None
    dry_run: bool = False
    allow_overflow: bool = False
    allow_unequal_replicas: bool = False
    shard_order: ShardOrder = "auto"


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors to write, by output name, and what became of the others."""

    tensors: dict[str, Tensor]
    dropped: dict[str, str]
    renamed: int
    left_out: int
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One component on its way to one folder."""

    opened: OpenedComponent
    output: Path
    selection: Selection
    plan: Plan
    side_files: Mapping[str, bytes | Path]
    notes: tuple[Note, ...]


def merge(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    type: str | None = None,
    step: int | None = None,
    base: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> MergeResult:
    """Merge a checkpoint into one Hugging Face folder per component.

    ``path`` is a run, a checkpoint, a component folder or a file; ``output`` defaults to ``<checkpoint>_merged`` beside it;
    ``type`` and ``step`` choose component and step; ``options`` are the fields of `MergeOptions` (``dtype="bf16"``, ...).

    Every element of every tensor is proved to be there exactly once before the first byte is written; an output appears
    whole or not at all. Raises InputError (unreadable), IncompleteError (not whole), OutputError (cannot be written),
    CastOverflow, UsageError.
    """
    try:
        chosen = MergeOptions(**options)
    except TypeError as error:
        raise UsageError(f"unknown option: {error}", expected=", ".join(MergeOptions.__slots__)) from None
    _check_options(chosen, output)
    started = time.monotonic()
    folder = resolve_base(os.fspath(base)) if base is not None else None
    with Files() as files:
        opened = open_checkpoint(path, files, type=type, step=step, base=folder, shard_order=chosen.shard_order)
        jobs = [_prepare(opened, component, output, folder, chosen) for component in opened.components]
        outputs = [_run(job, opened, chosen, progress) for job in jobs]
        checkpoint = without_tensors(describe_checkpoint(opened))
    return MergeResult(checkpoint=checkpoint, outputs=tuple(outputs), dry_run=chosen.dry_run, seconds=time.monotonic() - started)


# -- deciding --------------------------------------------------------------------------------------------------------


def select_tensors(component: Component, config: Mapping[str, Any], options: MergeOptions) -> Selection:
    """Output names, filters, tied heads, unequal replicas: which tensors are written under which names."""
    notes: list[Note] = []
    names = stripped_names(component.tensors)
    renamed = sum(old != new for old, new in names.items())
    tensors = {names[old]: tensor for old, tensor in component.tensors.items()}
    kept = {name: tensor for name, tensor in tensors.items() if _wanted(name, options)}
    if not kept:
        raise NotFound("no tensor is left after --include and --exclude", hint="patterns are matched against whole names, as in '*.mlp.*'")
    lora = next((name for name in kept if LORA.search(name)), None)
    if lora is not None and not (options.include or options.exclude):
        raise Unsupported(
            "these are weights with PEFT adapters; written as they are, no model class would load them",
            tensor=lora,
            expected="weights without adapters",
            hint="load lora_adapter/ with PEFT, or pass --include '*' to write the tensors under the names they have",
        )
    for tensor in kept.values():
        if tensor.check_copies:
            notes += _compare_copies(tensor, options.allow_unequal_replicas)
    dropped: dict[str, str] = {}
    pair = tied_pair(list(kept)) if ties_embeddings(config) else None
    if pair is not None:
        head, embedding = pair
        if same_values(kept[head], kept[embedding]):
            dropped[head] = f"tied to {embedding}, which has the same values"
        elif component.name == "ema":
            dropped[head] = f"tied to {embedding}; trainers average that one only, so this copy is not an average"
        else:
            text = f"config.json ties {head} to {embedding}, but their values differ: both are written, and a loader will ignore one"
            notes.append(Note("warning", "tied-heads-differ", text))
    kept = {name: tensor for name, tensor in kept.items() if name not in dropped}
    return Selection(kept, dropped, renamed, len(tensors) - len(kept) - len(dropped), tuple(notes))


def default_output(found: Found, component: str) -> Path:
    """``<checkpoint>_merged`` beside the checkpoint, with ``_<component>`` for any but the main one."""
    path = Path(os.path.abspath(found.path))
    stem = path.name.removesuffix(".safetensors") if path.is_file() else path.name
    return path.parent / f"{stem}_merged{'' if component in MAIN else f'_{component}'}"


def _check_options(options: MergeOptions, output: object) -> None:
    if options.in_place and output is not None:
        raise UsageError("--in-place writes into the checkpoint, so --output says nothing", hint="leave one of them out")
    if options.in_place and options.overwrite:
        raise UsageError("--in-place never replaces a file, so --overwrite says nothing", hint="leave one of them out")
    if not re.fullmatch(r"[\w.-]+\.safetensors", options.weights_name):
        raise UsageError("the weights name is not a plain file name", expected="something like model.safetensors")
    if options.jobs is not None and not 1 <= options.jobs <= 256:
        raise UsageError("--jobs is out of range", expected="1 to 256")
    if options.max_shard_size < 1:
        raise UsageError("--max-shard-size is out of range", expected="a size such as 5GB")


def _prepare(
    opened: Opened, component: OpenedComponent, output: str | os.PathLike[str] | None, base: Path | None, options: MergeOptions
) -> Job:
    target = _target(opened, component, output, options)
    if not options.in_place:
        _check_target(target, [opened.found.path, component.component.root, *([base] if base else [])], options.overwrite)
    config = component.assets.config
    selection = select_tensors(component.component, config, options)
    plan = make_plan(
        selection.tensors,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        weights_name=options.weights_name,
        quantised="quantization_config" in config,
        dropped=selection.dropped,
    )
    dtypes = {tensor.tensor.dtype.code for tensor in plan.tensors if tensor.dtype.kind == "float"}
    notes = (*selection.notes, *config_notes(config, list(selection.tensors), dtypes if options.dtype == "keep" else set()))
    return Job(component, target, selection, plan, _side_files(component.assets, plan), notes)


def _target(opened: Opened, component: OpenedComponent, output: str | os.PathLike[str] | None, options: MergeOptions) -> Path:
    if options.in_place:
        return component.place.home
    if output is None:
        return default_output(opened.found, component.name)
    target = Path(os.path.abspath(output))
    return target / component.name if len(opened.components) > 1 else target


def _check_target(target: Path, sources: Sequence[Path], overwrite: bool) -> None:
    """Refuse an output in or around a source, and anything that stands there and is not ours to replace."""
    for source in sources:
        if _is_inside(target, source):
            raise OutputInsideSource(
                "the output would lie inside of what is read", path=target, expected="a folder outside of the checkpoint and the base",
                hint="choose another -o, or pass --in-place to add files to the checkpoint",
            )  # fmt: skip
        if _is_inside(source, target):
            raise OutputInsideSource("the output folder contains what is read", path=target, hint="choose another -o")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise OutputExists("the output is a file or a link, not a folder", path=target, hint="choose another -o")
    if not target.exists() or not any(target.iterdir()):
        return
    ours = manifest.is_ours(target)
    if not ours:
        raise OutputExists(
            "the output folder exists and was not written by ckpt, so it will not be replaced",
            path=target,
            hint="choose another -o, or move the folder away",
        )
    if not overwrite:
        raise OutputExists("the output folder exists", path=target, hint="pass --overwrite to replace it, or choose another -o")


def _side_files(assets: Assets, plan: Plan) -> dict[str, bytes | Path]:
    side: dict[str, bytes | Path] = dict(assets.files)
    floats = Counter(tensor.dtype.torch for tensor in plan.tensors for _ in range(1) if tensor.dtype.kind == "float")
    if CONFIG in assets.files and floats:
        elements: Counter[str] = Counter()
        for tensor in plan.tensors:
            if tensor.dtype.kind == "float":
                elements[tensor.dtype.torch] += tensor.tensor.numel
        side[CONFIG] = config_with_dtype(assets.files[CONFIG], elements.most_common(1)[0][0])
    return side


def _compare_copies(tensor: Tensor, allowed: bool) -> list[Note]:
    for piece, copy in unequal_copies(tensor):
        text = f"ranks {piece.rank} and {copy.rank} hold different values"
        if not allowed:
            raise Inconsistent(
                f"{text} although nothing says that it is sharded",
                tensor=tensor.name,
                expected="the same values on all ranks",
                hint=f"pass --allow-unequal-replicas to take those of rank {piece.rank}",
            )
        return [Note("warning", "replicas-differ", f"{printable(tensor.name)}: {text}; those of rank {piece.rank} were taken")]
    return []


def _wanted(name: str, options: MergeOptions) -> bool:
    included = not options.include or any(fnmatch.fnmatchcase(name, pattern) for pattern in options.include)
    return included and not any(fnmatch.fnmatchcase(name, pattern) for pattern in options.exclude)


def _is_inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return False


# -- doing -----------------------------------------------------------------------------------------------------------


def _run(job: Job, opened: Opened, options: MergeOptions, progress: Progress | None) -> MergedComponent:
    free = _check_space(job)
    if options.dry_run:
        return _result(job, options, free, Written({file.name: file.size for file in job.plan.files}, {}))
    if options.in_place:
        side = {name: content for name, content in job.side_files.items() if not (job.output / name).exists()}
        _refuse_existing(job, side)
        job = replace(job, side_files=side)

    def last_file(written: Written) -> tuple[str, bytes]:
        return manifest.NAME, _manifest(job, opened, options, written)

    created = _make_parents(job.output)
    existed = job.output.exists()
    try:
        with Staging(job.output) as staging:
            written = execute(
                job.plan,
                staging,
                job.side_files,
                jobs=options.jobs,
                allow_overflow=options.allow_overflow,
                progress=progress,
                last_file=last_file,
            )
            if options.in_place:
                staging.publish_into(job.output)
            else:
                _check_target(job.output, (), options.overwrite)
                staging.publish(replace=existed)
    except BaseException:
        for parent in reversed(created):
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise
    return _result(job, options, free, written)


def _refuse_existing(job: Job, side: Mapping[str, object]) -> None:
    planned = [*(file.name for file in job.plan.files), *([job.plan.index_name] if job.plan.index_name else []), manifest.NAME, *side]
    for name in planned:
        if (job.output / name).exists():
            raise OutputExists(
                "the checkpoint folder has a file of this name already", path=job.output / name, hint="use -o instead of --in-place"
            )


def _make_parents(target: Path) -> list[Path]:
    """Create the folders above the target; returns those that were missing, outermost first."""
    missing = [parent for parent in target.parents if not parent.exists()][::-1]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotWritable(
            f"the output folder cannot be created: {error.strerror}", path=target, hint="choose another place with -o"
        ) from error
    return missing


def _check_space(job: Job) -> int | None:
    parent = next(parent for parent in job.output.parents if parent.exists())
    try:
        free = shutil.disk_usage(parent).free
    except OSError:
        return None
    needed = job.plan.bytes_written
    if needed > free:
        raise NoSpace(
            f"the output needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free",
            path=job.output,
            hint="choose another disk with -o, or --dtype bf16 to halve float32 weights",
        )
    return free


def _manifest(job: Job, opened: Opened, options: MergeOptions, written: Written) -> bytes:
    facts = {
        "checkpoint": os.path.abspath(opened.found.path),
        "step": opened.found.step,
        "component": job.opened.name,
        "elements": job.plan.elements,
        "dropped": job.selection.dropped,
    }
    settings = {name: getattr(options, name) for name in MergeOptions.__slots__ if name not in ("dry_run", "overwrite", "jobs")}
    return manifest.build("merge", settings, _sources(job.plan), job.plan.digest, written.files, facts)


def _sources(plan: Plan) -> list[Any]:
    found = {piece.source.identity.path: piece.source for output in plan.tensors for piece in output.tensor.pieces}
    return list(found.values())


def _result(job: Job, options: MergeOptions, free: int | None, written: Written) -> MergedComponent:
    plan = job.plan
    extra = [FileInfo(name=plan.index_name, bytes=len(plan.index))] if plan.index is not None and plan.index_name else []
    component = job.opened.component
    dtypes: Counter[str] = Counter()
    for output in plan.tensors:
        dtypes[output.dtype.code] += output.tensor.numel
    notes = list(job.notes)
    if written.overflows:
        text = f"{sum(written.overflows.values())} finite values became infinite"
        notes.append(Note("warning", "cast-overflow", text))
    return MergedComponent(
        component=job.opened.name,
        output=str(job.output),
        files=(*(FileInfo(name=file.name, bytes=file.size) for file in plan.files), *extra),
        tensors=len(plan.tensors),
        elements=plan.elements,
        covered_elements=sum(piece.box.numel for tensor in component.tensors.values() for piece in tensor.pieces),
        source_elements=sum(tensor.numel for tensor in component.tensors.values()),
        bytes_read=plan.bytes_read,
        bytes_written=plan.bytes_written,
        dtypes=dict(dtypes),
        cast=sum(output.is_cast for output in plan.tensors),
        renamed=job.selection.renamed,
        dropped=job.selection.dropped,
        left_out=job.selection.left_out,
        assets=tuple(sorted(job.side_files)),
        lacking=tuple(job.opened.assets.lacking),
        overflows=written.overflows,
        disk_free=free,
        peak_memory=RESIDENT + (options.jobs or default_jobs()) * 2 * TILE,
        plan_digest=plan.digest,
        notes=tuple(NoteInfo.of(note) for note in notes),
    )
