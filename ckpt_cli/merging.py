"""`merge`: from shards to a model folder. Decides names, dtypes, assets and place; `execute` does the writing."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_cli import manifest, plan
from ckpt_cli.assets import auxiliary_weights, config_notes, resolve_base, tied_pair
from ckpt_cli.comparing import compare_with_base
from ckpt_cli.descriptor import NoteInfo
from ckpt_cli.errors import NotFound, UsageError
from ckpt_cli.execute import Written
from ckpt_cli.files import Files, as_paths
from ckpt_cli.formats.base import Naming, ReadOptions, ShardOrder
from ckpt_cli.formats.registry import describe, recognise
from ckpt_cli.frameworks import framework_of
from ckpt_cli.key_map import Rule, read_key_map
from ckpt_cli.matching import match_base
from ckpt_cli.model import Component, Note, Tensor
from ckpt_cli.model_config import Config, ties_embeddings
from ckpt_cli.opening import Opened, OpenedComponent, describe_checkpoint, open_checkpoint
from ckpt_cli.placing import check_target, default_output
from ckpt_cli.progress import Progress
from ckpt_cli.publishing import (
    DEFAULT_SHARD_SIZE,
    Publication,
    Target,
    as_tuples,
    check_writing,
    model_files,
    publish,
    refuse_overflows,
    written_facts,
)
from ckpt_cli.report import MergedComponent, MergeResult
from ckpt_cli.selecting import Selection, compare_copies, select_tensors
from ckpt_cli.state_folder import state_files
from ckpt_cli.states import read_state
from ckpt_cli.styles import FolderStyle, style_of

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """The options of `merge`, with the meaning that ``ckpt merge --help`` gives them.

    ``dtype``, ``max_shard_size`` (bytes) and ``weights_name`` may be None: then the base (with ``match_base``) or the kind
    of folder decides, otherwise "keep", 5 GB and "model.safetensors".
    """

    dtype: str | None = None
    max_shard_size: int | None = None
    weights_name: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    key_map: str | os.PathLike[str] | None = None
    match_base: bool = False
    fill_missing_from_base: bool = False
    drop_extra: bool = False
    compare: bool = False
    names: Naming = "hub"
    ema_from_model: bool = False
    with_state: bool = False
    overwrite: bool = False
    in_place: bool = False
    jobs: int | None = None
    dry_run: bool = False
    allow_overflow: bool = False
    allow_unequal_replicas: bool = False
    shard_order: ShardOrder = "auto"


@dataclass(frozen=True, slots=True)
class Base:
    """The base model: its folder, and its weights if it has any."""

    folder: Path
    component: Component | None


@dataclass(frozen=True, slots=True)
class Part:
    """One component on its way into a folder."""

    opened: OpenedComponent
    selection: Selection
    plan: plan.Plan
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One output folder: one component, or several that share it."""

    parts: tuple[Part, ...]
    output: Path
    plan: plan.Plan
    side_files: Mapping[str, bytes | Path]
    state_files: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "+".join(part.opened.name for part in self.parts)


def merge(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    type: str | None = None,
    step: int | None = None,
    base: str | os.PathLike[str] | None = None,
    also: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    progress: Progress | None = None,
    **options: Any,
) -> MergeResult:
    """Merge a checkpoint into one model folder per component.

    ``path`` is a run, a checkpoint, a component folder or a file; ``output`` defaults to ``<checkpoint>_merged`` beside it;
    ``type`` and ``step`` choose component and step; ``also`` are folders with more files of the same checkpoint (other nodes);
    ``options`` are the fields of `MergeOptions` (``dtype="bf16"``, ...).

    Every element of every tensor is proved to be there exactly once before the first byte is written; an output appears
    whole or not at all. Raises InputError (unreadable), IncompleteError (not whole, or not like the base), OutputError
    (cannot be written), CastOverflow, UsageError.
    """
    try:
        chosen = MergeOptions(**as_tuples(options))
    except TypeError as error:
        raise UsageError(f"unknown option: {error}", expected=", ".join(MergeOptions.__slots__)) from None
    _check_options(chosen, output, base)
    started = time.monotonic()
    rules = read_key_map(Path(chosen.key_map)) if chosen.key_map is not None else ()
    folder = resolve_base(os.fspath(base)) if base is not None else None
    with Files() as files:
        opened = open_checkpoint(
            path,
            files,
            type=type,
            step=step,
            base=folder,
            also=as_paths(also),
            shard_order=chosen.shard_order,
            ema_from_model=chosen.ema_from_model,
        )
        reference = _open_base(folder, files, chosen) if folder is not None else None
        jobs = [_with_state(job, opened, files) if chosen.with_state else job for job in _jobs(opened, output, reference, rules, chosen)]
        outputs = [_run(job, opened, reference, chosen, progress) for job in jobs]
        checkpoint = describe_checkpoint(opened).without_tensors()
    return MergeResult(checkpoint=checkpoint, outputs=tuple(outputs), dry_run=chosen.dry_run, seconds=time.monotonic() - started)


# -- deciding --------------------------------------------------------------------------------------------------------


def _check_options(options: MergeOptions, output: object, base: object) -> None:
    if options.in_place and output is not None:
        raise UsageError("--in-place writes into the checkpoint, so --output says nothing", hint="leave one of them out")
    if options.in_place and options.overwrite:
        raise UsageError("--in-place never replaces a file, so --overwrite says nothing", hint="leave one of them out")
    check_writing(options.weights_name, options.jobs, options.max_shard_size)
    wants_base = [name for name in ("match_base", "fill_missing_from_base", "drop_extra", "compare") if getattr(options, name)]
    if wants_base and base is None:
        raise UsageError(f"--{wants_base[0].replace('_', '-')} needs a base", hint="pass --base with the folder of the base model")
    if (options.fill_missing_from_base or options.drop_extra) and not options.match_base:
        raise UsageError("--fill-missing-from-base and --drop-extra belong to --match-base", hint="pass --match-base as well")


def _open_base(folder: Path, files: Files, options: MergeOptions) -> Base:
    matches = [match for match in recognise(folder) if match.trouble is None]
    if matches:
        return Base(folder, describe(matches[0], files, ReadOptions()))
    if options.match_base or options.compare:
        hint = "pass the folder of the model with its weights"
        raise NotFound("the base has no weights to compare with", path=folder, expected="safetensors or pytorch_model.bin", hint=hint)
    return Base(folder, None)


def _jobs(
    opened: Opened, output: str | os.PathLike[str] | None, base: Base | None, rules: tuple[Rule, ...], options: MergeOptions
) -> list[Job]:
    style = style_of(opened.found, base.folder if base else None)
    shared = style.shared or options.in_place
    groups = [opened.components] if shared else [(component,) for component in opened.components]
    jobs = [_job(opened, group, output, len(groups) > 1, style, base, rules, options) for group in groups]
    if len({job.output for job in jobs}) < len(jobs):
        raise UsageError("two components would go to the same folder", hint="merge them one by one with --type and -o")
    return jobs


def _job(
    opened: Opened,
    group: tuple[OpenedComponent, ...],
    output: str | os.PathLike[str] | None,
    one_of_many: bool,
    style: FolderStyle,
    base: Base | None,
    rules: tuple[Rule, ...],
    options: MergeOptions,
) -> Job:
    first = group[0]
    if options.in_place:
        target = first.place.home
    elif output is None:
        target = default_output(opened.found, first.name)
    else:
        given = Path(os.path.abspath(output))
        target = given / first.name if one_of_many else given
    if not options.in_place:
        roots = [root for component in group for root in (component.component.root, *component.place.match.more_roots)]
        sources = [opened.found.path, *roots, *([base.folder] if base else [])]
        check_target(target, sources, overwrite=options.overwrite)
    names = [component.name for component in group]
    if options.weights_name is not None and len(group) > 1:
        raise UsageError("one weights name for several components", hint="merge them one by one with --type")
    parts = tuple(
        _part(component, options.weights_name or style.weights_name(component.name, names), style, base, rules, options)
        for component in group
    )
    loaded = options.weights_name or style.loaded
    whole = plan.united(
        [part.plan for part in parts], INDEX if style.loaded else parts[0].plan.index_name, loaded if style.loaded else None
    )
    names = [file.name for file in whole.files]
    if len(set(names)) < len(names):
        raise UsageError("two components would have the same weights file", hint="merge them one by one with --type")
    if not options.in_place:
        read = [Path(source.path) for source in whole.sources]
        check_target(target, [path for path in read if path.resolve().is_relative_to(target.resolve())], overwrite=options.overwrite)
    return Job(parts, target, whole, _side_files(first, whole, base))


def _part(
    component: OpenedComponent, weights_name: str, style: FolderStyle, base: Base | None, rules: tuple[Rule, ...], options: MergeOptions
) -> Part:
    config = component.assets.config
    selection = select_tensors(
        component.component,
        config,
        names=options.names,
        rules=rules,
        include=options.include,
        exclude=options.exclude,
        allow_unequal_replicas=options.allow_unequal_replicas,
    )
    notes = list(selection.notes)
    dtypes = None
    if options.match_base and base is not None and base.component is not None:
        for head, embedding in _lacking_heads(selection, base.component.tensors, config, options).items():
            selection = selection.with_head(head, embedding)
            notes.append(Note("info", "tied-head", f"{head} is written as {embedding}, to which it is tied, as the base stores both"))
        matched = match_base(
            selection.tensors,
            base.component.tensors,
            fill_missing=options.fill_missing_from_base,
            drop_extra=options.drop_extra,
        )
        for name, tensor in matched.tensors.items():
            if name not in selection.tensors and tensor.check_copies:
                notes += compare_copies(tensor, options.allow_unequal_replicas)
        selection = replace(selection, tensors=matched.tensors, dropped={**selection.dropped, **matched.dropped})
        dtypes = matched.dtypes if options.dtype is None else None
        notes += matched.notes
    made = plan.make_plan(
        selection.tensors,
        dtype=options.dtype or "keep",
        dtypes=dtypes,
        max_shard_size=options.max_shard_size or (DEFAULT_SHARD_SIZE if style.splits else None),
        weights_name=weights_name,
        quantised="quantization_config" in config,
        dropped=selection.dropped,
    )
    if base is not None and base.component is not None and not set(selection.tensors) & set(base.component.tensors):
        text = "the base has no tensor of the same name: it is another model, or the names differ (see --key-map)"
        notes.append(Note("warning", "other-base", text))
    if weights_name == style.loaded:
        notes.append(Note("info", "weights-name", f"written as {weights_name}, the file that {style.name}'s loader reads"))
    stored = {output.dtype.code for output in made.tensors if output.dtype.kind == "float"}
    notes += config_notes(config, {name: tensor.shape for name, tensor in selection.tensors.items()}, stored)
    return Part(component, selection, made, tuple(notes))


def _lacking_heads(selection: Selection, base: Mapping[str, Tensor], config: Config, options: MergeOptions) -> dict[str, str]:
    """Tied tensors that a base stores and the selection lacks because they are tied, not because a filter or a key map left them out."""
    lacking = {head: embedding for head, embedding in selection.tied.items() if head in base and embedding in base}
    pair = tied_pair(list(base)) if ties_embeddings(config) else None
    filtered = options.include or options.exclude
    if pair is not None and not filtered and pair[0] not in {*selection.tensors, *selection.dropped} and pair[1] in selection.tensors:
        lacking[pair[0]] = pair[1]
    return lacking


def _side_files(component: OpenedComponent, whole: plan.Plan, base: Base | None) -> dict[str, bytes | Path]:
    side = model_files(component.assets, whole)
    if base is not None:
        written = {file.name for file in whole.files}
        extra = auxiliary_weights(base.folder, base.component.files if base.component else ())
        side |= {name: path for name, path in extra.items() if name not in written}
    return side


def _with_state(job: Job, opened: Opened, files: Files) -> Job:
    """With the training state of its first component beside the weights. Raises NotFound if there is none."""
    place = job.parts[0].opened.place
    state = read_state(opened.found, place, files)
    if state.is_empty:
        hint = "leave out --with-state"
        raise NotFound("there is no training state beside the weights", path=opened.found.path, hint=hint)
    extra = state_files(state, framework_of(opened.found, opened.target.run))
    first, *others = job.parts
    parts = (replace(first, notes=(*first.notes, *state.notes)), *others)
    return replace(job, parts=parts, side_files={**extra, **job.side_files}, state_files=tuple(sorted(extra)))


# -- doing -----------------------------------------------------------------------------------------------------------


def _run(job: Job, opened: Opened, base: Base | None, options: MergeOptions, progress: Progress | None) -> MergedComponent:
    published = publish(
        job.plan,
        job.side_files,
        Target(job.output, options.overwrite, options.in_place),
        lambda written: _manifest(job, opened, options, written),
        dry_run=options.dry_run,
        jobs=options.jobs,
        approve=None if options.allow_overflow else refuse_overflows,
        progress=progress,
    )
    return _result(job, base, options, published, progress)


def _manifest(job: Job, opened: Opened, options: MergeOptions, written: Written) -> bytes:
    facts = {
        "checkpoint": os.path.abspath(opened.found.path),
        "step": opened.found.step,
        "component": job.name,
        "elements": job.plan.elements,
        "dropped": dict(job.plan.dropped),
    }
    unwanted = ("dry_run", "overwrite", "jobs")
    settings = {name: getattr(options, name) for name in MergeOptions.__slots__ if name not in unwanted}
    settings["key_map"] = None if options.key_map is None else os.fspath(options.key_map)
    side = [*job.side_files, *([job.plan.index_name] if job.plan.index_name else [])]
    return manifest.build("merge", settings, job.plan.sources, job.plan.digest, written.files, side, facts)


def _result(job: Job, base: Base | None, options: MergeOptions, published: Publication, progress: Progress | None) -> MergedComponent:
    tensors = [tensor for part in job.parts for tensor in part.opened.component.tensors.values()]
    notes = [note for part in job.parts for note in part.notes]
    overflows = published.written.overflows
    if overflows:
        notes.append(Note("warning", "cast-overflow", f"{sum(overflows.values())} finite values became infinite"))
    comparison = None
    if base is not None and base.component is not None:
        outputs = job.parts[-1].plan.tensors
        comparison = compare_with_base(
            outputs, base.component.tensors, str(base.folder), values=options.compare, jobs=options.jobs, progress=progress
        )
    return MergedComponent(
        **written_facts(job.plan, published, options.jobs, not_assets=job.state_files),
        state=job.state_files,
        naming=job.parts[0].selection.naming,
        component=job.name,
        output=str(job.output),
        covered_elements=sum(piece.box.numel for tensor in tensors for piece in tensor.pieces),
        source_elements=sum(tensor.numel for tensor in tensors),
        renamed=sum(part.selection.renamed for part in job.parts),
        left_out=sum(part.selection.left_out for part in job.parts),
        lacking=tuple(job.parts[0].opened.assets.lacking),
        comparison=comparison,
        notes=tuple(NoteInfo.of(note) for note in dict.fromkeys(notes)),
    )
