"""`merge`: from shards to a model folder. `merging.plan` decides names, dtypes, assets and place; `output.publish` writes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from typing_extensions import Unpack

from ckpt_cli.base_model.opened import Base, open_base
from ckpt_cli.commands.strict import refuse_warnings
from ckpt_cli.commands.verify import verify_written
from ckpt_cli.discover.open import Opened, describe_checkpoint, open_checkpoint
from ckpt_cli.errors import NotFound, within_memory
from ckpt_cli.files.manifest import FUSED, LEFT_OUT
from ckpt_cli.files.source import Files
from ckpt_cli.given import PathLike, boundary, int_of, optional_path, options_of, path_of, path_text, paths_of, progress_of, text_of
from ckpt_cli.hub.assets import lacking_notes, resolve_base
from ckpt_cli.hub.text_assets import text_notes
from ckpt_cli.hub.tokenizer_file import TOKENIZER
from ckpt_cli.merging.job import Job
from ckpt_cli.merging.options import MergeKeywords, MergeOptions, check_options
from ckpt_cli.merging.plan import planned_jobs
from ckpt_cli.output import manifest, plan
from ckpt_cli.output.key_map import read_key_map
from ckpt_cli.output.publish import Order, Publication, Target, class_comparison, overflow_notes, publish, refuse_overflows, written_facts
from ckpt_cli.output.writer import Written
from ckpt_cli.progress import Progress
from ckpt_cli.results.checkpoint import NoteInfo
from ckpt_cli.results.drift import BaseComparison
from ckpt_cli.results.written import MergedComponent, MergeResult
from ckpt_cli.state.folder import state_files
from ckpt_cli.state.training_state import read_state
from ckpt_cli.tensors.component import Note
from ckpt_cli.verifying.drift.compare import compare_with_base


@boundary
@within_memory
def merge(
    path: PathLike,
    output: PathLike | None = None,
    *,
    type: str | None = None,
    step: int | None = None,
    base: PathLike | None = None,
    also: PathLike | Sequence[PathLike] = (),
    progress: Progress | None = None,
    **options: Unpack[MergeKeywords],
) -> MergeResult:
    """Merge a checkpoint into one model folder per component.

    ``path`` is a run, a checkpoint, a component folder or a file; ``output`` defaults to ``<checkpoint>_merged`` beside it;
    ``type`` and ``step`` choose component and step; ``also`` are folders with more files of the same checkpoint (other nodes);
    ``options`` are those of `MergeKeywords` (``dtype="bf16"``, ``max_shard_size="5GB"``, ...).

    Every element of every tensor is proved to be present exactly once before the first byte is written; an output appears
    complete or not at all. Raises InputError (unreadable), IncompleteError (incomplete, or unlike the base), OutputError
    (cannot be written), CastOverflow, UsageError.
    """
    chosen, progress = options_of(MergeOptions, options), progress_of(progress)
    path, target = path_of(path), optional_path(output, "--output", output=True)
    component, step, nodes = text_of(type, "--type"), int_of(step, "--step"), paths_of(also, "--also")
    folder = path_text(base, "--base") if base is not None else None
    check_options(chosen, target, folder)
    started = time.monotonic()
    rules = read_key_map(Path(chosen.key_map)) if chosen.key_map is not None else ()
    home = resolve_base(folder) if folder is not None else None
    with Files(progress=progress) as files:
        opened = open_checkpoint(
            path,
            files,
            type=component,
            step=step,
            base=home,
            also=nodes,
            shard_order=chosen.shard_order,
            ema_from_model=chosen.ema_from_model,
        )
        reference = open_base(home, files, needed=chosen.needs_base_weights) if home is not None else None
        jobs = [
            _with_state(job, opened, files, chosen.dry_run) if chosen.with_state else job
            for job in planned_jobs(opened, target, reference, rules, chosen)
        ]
        checkpoint = describe_checkpoint(opened)
        known = [_known_notes(job, home) for job in jobs]
        if chosen.strict:
            refuse_warnings([*checkpoint.notes, *(note for notes in known for note in notes)])
        outputs = _run(jobs, known, opened, reference, chosen, progress)
    seconds = time.monotonic() - started - sum(verified.seconds for output in outputs for verified in output.verified)
    return MergeResult(checkpoint=checkpoint, outputs=tuple(outputs), dry_run=chosen.dry_run, seconds=seconds)


def _run(
    jobs: Sequence[Job],
    known: Sequence[Sequence[Note]],
    opened: Opened,
    base: Base | None,
    options: MergeOptions,
    progress: Progress | None,
) -> list[MergedComponent]:
    """Write all jobs; ``known`` are the notes of each, made before: nothing is read once outputs have their names."""
    orders = [
        Order(
            job.plan,
            job.side_files,
            Target(job.output, options.overwrite, options.in_place),
            partial(_manifest, job, opened, base, options),
            approve=_approval(options, job.plan),
        )
        for job in jobs
    ]
    # Before anything is written: what fails later would leave outputs beside an error.
    comparisons = [_comparison(job, base, options, progress) for job in jobs]
    published = publish(orders, dry_run=options.dry_run, jobs=options.jobs, checksum=options.checksum, progress=progress)
    results = [
        _result(job, notes, options, done, compared) for job, notes, done, compared in zip(jobs, known, published, comparisons, strict=True)
    ]
    if not options.verify or options.dry_run:
        return results
    return [
        result.model_copy(
            update={"verified": verify_written(job.output, job.parts, opened.found.path, jobs=options.jobs, progress=progress)}
        )
        for job, result in zip(jobs, results, strict=True)
    ]


def _approval(options: MergeOptions, whole: plan.Plan) -> Callable[[Written], None]:
    def approve(written: Written) -> None:
        if not options.allow_overflow:
            refuse_overflows(written, whole)
        if options.strict:
            refuse_warnings(overflow_notes(written))

    return approve


def _known_notes(job: Job, base: Path | None) -> list[Note]:
    """What is known about an output before it is written."""
    exported = job.parts[0].lora is not None and job.parts[0].lora.outcome == "exported"
    assets = job.parts[0].opened.assets
    lacking = () if exported else lacking_notes(assets, base)
    return [
        *(note for part in job.parts for note in part.notes),
        *lacking,
        *text_notes({name: path for name, path in assets.files.items() if name in job.side_files}, {TOKENIZER: assets.tokenizer}),
    ]


def _manifest(job: Job, opened: Opened, base: Base | None, options: MergeOptions, written: Written) -> bytes:
    facts = {
        "checkpoint": os.path.abspath(opened.found.path),
        "step": opened.found.step,
        "component": job.name,
        "base": None if base is None else os.path.abspath(base.folder),
        "elements": job.plan.elements,
        "dropped": dict(job.plan.dropped),
        "names": [part.claim.text for part in job.parts],
        LEFT_OUT: sorted({name for part in job.parts for name in part.left_out}),
        FUSED: sorted({digest for part in job.parts for digest in part.fused}),
    }
    unwanted = ("dry_run", "overwrite", "jobs", "checksum", "verify", "strict")
    settings = {name: getattr(options, name) for name in (field.name for field in fields(MergeOptions)) if name not in unwanted}
    settings["key_map"] = None if options.key_map is None else os.path.abspath(options.key_map)
    side = [*job.side_files, *([job.plan.index_name] if job.plan.index_name else [])]
    return manifest.build(
        "merge", settings, job.plan.sources, job.plan.digest, written.files, written.checksums, side, written.side_files, facts
    )


def _comparison(job: Job, base: Base | None, options: MergeOptions, progress: Progress | None) -> BaseComparison | None:
    """The planned output compared with the base, without what was taken from it; None without a base, and for adapters alone."""
    exported = job.parts[0].lora is not None and job.parts[0].lora.outcome == "exported"
    if base is None or base.component is None or exported:
        return None
    part = job.parts[-1]
    outputs = [output for output in part.plan.tensors if output.name not in part.from_base]
    held = {name: tensor for name, tensor in base.component.tensors.items() if name not in part.from_base}
    return compare_with_base(outputs, held, str(base.folder), values=options.compare, jobs=options.jobs, progress=progress)


def _result(
    job: Job, known: Sequence[Note], options: MergeOptions, published: Publication, comparison: BaseComparison | None
) -> MergedComponent:
    """The result of a job; ``known`` are its notes from before it was written."""
    tensors = [tensor for part in job.parts for tensor in part.opened.component.tensors.values()]
    notes = [*known, *overflow_notes(published.written)]
    exported = job.parts[0].lora is not None and job.parts[0].lora.outcome == "exported"
    return MergedComponent(
        **written_facts(job.plan, published, options.jobs, not_assets=job.state_files),
        state=job.state_files,
        lora=job.parts[0].lora,
        naming=job.parts[0].claim.text,
        compared=class_comparison(job.parts[0].claim),
        carried=tuple(name for part in job.parts for name in part.carried),
        component=job.name,
        output=str(job.output),
        covered_elements=sum(piece.box.numel for tensor in tensors for piece in tensor.pieces),
        source_elements=sum(tensor.numel for tensor in tensors),
        renamed=sum(part.selection.renamed for part in job.parts),
        left_out=sum(part.selection.left_out for part in job.parts),
        lacking=() if exported else tuple(job.parts[0].opened.assets.lacking),
        comparison=comparison,
        notes=tuple(NoteInfo.of(note) for note in dict.fromkeys(notes)),
    )


def _with_state(job: Job, opened: Opened, files: Files, dry_run: bool) -> Job:
    """With the training state of its first component beside the weights. Raises NotFound if there is none."""
    place = job.parts[0].opened.place
    state = read_state(opened.found, place, files)
    if state.is_empty:
        hint = "leave out --with-state"
        raise NotFound("there is no training state beside the weights", path=opened.found.path, hint=hint)
    extra = state_files(state, opened.found.trainer(opened.target.run), dry_run=dry_run)
    first, *others = job.parts
    said = [note for note in state.notes if note not in opened.notes]
    parts = (replace(first, notes=(*first.notes, *said)), *others)
    return replace(job, parts=parts, side_files={**extra, **job.side_files}, state_files=tuple(sorted(extra)))
