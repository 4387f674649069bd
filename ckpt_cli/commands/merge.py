"""`merge`: from shards to a model folder. `merging.plan` decides names, dtypes, assets and place; `output.publish` writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from ckpt_cli.base_model.alike import laid_out_alike
from ckpt_cli.base_model.opened import Base, open_base
from ckpt_cli.commands.verify import damaged_of, verify_written
from ckpt_cli.discover.default_output import AMONG
from ckpt_cli.discover.forms.states_inside import state_inside_notes, states_beside_notes
from ckpt_cli.discover.open import Opened, describe_checkpoint, open_checkpoint
from ckpt_cli.drafting.job import Job
from ckpt_cli.engines.call import PartCall, lasting, part_call
from ckpt_cli.engines.orders import publish_orders
from ckpt_cli.errors import NotFound, within_memory
from ckpt_cli.files.source import Files
from ckpt_cli.given import PathLike, boundary, int_of, optional_path, options_of, path_of, path_text, paths_of, progress_of, text_of
from ckpt_cli.merging.options import MergeKeywords, MergeOptions
from ckpt_cli.merging.plan import planned_jobs
from ckpt_cli.merging.trained_on import opened_on_base
from ckpt_cli.output.key_map import read_key_map
from ckpt_cli.output.publish import Publication
from ckpt_cli.output.strict import refuse_warnings
from ckpt_cli.output.target import refuse_planned
from ckpt_cli.progress import Progress, warn_before
from ckpt_cli.pushing.destination import Destination, refuse_several
from ckpt_cli.pushing.upload import delivered, planned
from ckpt_cli.results.drift import BaseComparison
from ckpt_cli.results.verify import VerifyResult
from ckpt_cli.results.written import MergedComponent, MergeResult
from ckpt_cli.state.folder import state_files, state_sources
from ckpt_cli.state.training_state import read_state
from ckpt_cli.verifying.drift.compare import compare_with_base
from ckpt_cli.verifying.findings import refuse_wrong
from ckpt_cli.verifying.options import Reading


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
    complete or not at all. With ``push_to_hub`` the output is verified and then pushed; what comes of that is ``push`` of the result, also
    if it fails, since the output stands. Raises InputError (unreadable), IncompleteError (incomplete, or unlike the base), OutputError
    (cannot be written), CastOverflow, UsageError.
    """
    chosen, progress = options_of(MergeOptions, options), progress_of(progress)
    path, target = path_of(path), optional_path(output, "--output", use="output")
    component, step, nodes = text_of(type, "--type"), int_of(step, "--step"), paths_of(also, "--also")
    folder = path_text(base, "--base") if base is not None else None
    chosen.check_with(folder, target)
    chosen.check_place(target)
    to = Destination.of(chosen)
    started = time.monotonic()
    rules = read_key_map(chosen.key_map)
    with Files(progress=progress) as files:

        def opened_with(home: Path | None) -> Opened:
            return open_checkpoint(
                path,
                files,
                type=component,
                step=step,
                base=home,
                also=nodes,
                shard_order=chosen.shard_order,
                ema_from_model=chosen.ema_from_model,
            )

        opened, home = opened_on_base(folder, opened_with)
        to = to.of_step(opened.found.step, opened.found.numbered_at.parent.name) if to is not None else None
        reference = open_base(home, files, needed=chosen.needs_base_weights) if home is not None else None
        jobs = planned_jobs(opened, target, reference, rules, chosen)
        refuse_several(to, [job.output for job in jobs])
        if chosen.with_state:
            jobs = [_with_state(job, opened, files, chosen.dry_run) for job in jobs]
        checkpoint = describe_checkpoint(opened)
        if chosen.strict:
            refuse_warnings([*checkpoint.notes, *(note for job in jobs for note in job.notes)])
        for job in () if chosen.dry_run else jobs:
            for note in job.notes:
                if note.code == AMONG:
                    warn_before(progress, note.code, note.text, job.plan.bytes_written)

        def call() -> PartCall:
            """The same merge elsewhere: of this step, whatever is saved meanwhile."""
            where = [lasting(path), lasting(target) if target is not None else None]
            named: dict[str, Any] = {
                "type": component,
                "base": lasting(home) if home is not None else None,
                "also": tuple(map(lasting, nodes)),
            }
            if opened.target.run is not None and not nodes and opened.target.option(opened.found) is None:
                where[0] = lasting(opened.found.path)
            elif opened.target.run is not None:
                named["step"] = opened.found.step
            return part_call(merge, where, chosen, reads=(path, *nodes, home), **named)

        outputs = _run(jobs, opened, reference, chosen, progress, call)
    seconds = time.monotonic() - started - sum(verified.seconds for output in outputs for verified in output.verified)
    push = None
    if to is not None:
        push = planned(to) if chosen.dry_run else delivered(jobs[0].output, to, outputs[0].verified, progress, strict=chosen.strict)
    result = MergeResult(checkpoint=checkpoint, outputs=tuple(outputs), push=push, dry_run=chosen.dry_run, seconds=seconds)
    if chosen.dry_run and not chosen.in_place:
        refuse_planned([job.output for job in jobs], overwrite=chosen.overwrite, planned=result)
    return result


def _run(
    jobs: Sequence[Job],
    opened: Opened,
    base: Base | None,
    options: MergeOptions,
    progress: Progress | None,
    call: Callable[[], PartCall],
) -> list[MergedComponent]:
    orders = [job.order("merge", options, in_place=options.in_place, passing=("verify", "strict")) for job in jobs]
    # Before anything is written: what fails later would leave outputs beside an error.
    comparisons = [_comparison(job, base, options, progress) if _is_first(options) else None for job in jobs]
    how: Reading = {"jobs": options.jobs, "progress": progress}
    verified: dict[Path, tuple[VerifyResult, ...]] = {}

    asked = [name for name, given in (("--verify", options.verify), ("--push-to-hub", options.push_to_hub)) if given]

    def check(job: Job, records_checked: bool, folder: Path) -> None:
        records = () if records_checked else None
        told = verify_written(folder, job.output, job.drafts, opened.found.path, records, **how)
        errors = [item for one in told for item in one.findings]
        refuse_wrong(errors, job.output, asked, stands=folder == job.output and not options.in_place)
        verified[job.output] = told

    if asked and not options.dry_run:
        for at, (job, order) in enumerate(zip(jobs, orders, strict=True)):
            records_checked = options.engine == "ray" or not order.checked_before
            if records_checked:
                # Its files cannot be read before they have their names, and what they may replace then is gone.
                refuse_wrong(damaged_of(job.drafts, **how), job.output, asked)
            orders[at] = replace(order, check=partial(check, job, records_checked))
    published = publish_orders(orders, options, progress, call)
    for job, order in zip(jobs, orders, strict=True):
        if order.check is not None and job.output not in verified:
            order.check(job.output)  # it is in a store, or processes elsewhere published it
    results = [_result(job, options, done, compared) for job, done, compared in zip(jobs, published, comparisons, strict=True)]
    return [result.model_copy(update={"verified": verified.get(job.output, ())}) for job, result in zip(jobs, results, strict=True)]


def _is_first(options: MergeOptions) -> bool:
    """Whether this process does what is done once for an output: all of it, or its first part."""
    return options.chosen_part is None or options.chosen_part.number == 0


def _comparison(job: Job, base: Base | None, options: MergeOptions, progress: Progress | None) -> BaseComparison | None:
    """The planned output compared with the base, without what was taken from it; None without a base, and for adapters alone."""
    draft = job.drafts[-1]
    if base is None or base.component is None or draft.is_adapter:
        return None
    outputs = [output for output in draft.plan.tensors if output.name not in draft.from_base]
    configs = draft.assets.config, base.config
    alike, _ = laid_out_alike(base.component.tensors, draft.tensors, draft.selection.kind, draft.selection.naming, configs)
    held = {name: tensor for name, tensor in alike.items() if name not in draft.from_base}
    return compare_with_base(outputs, held, str(base.folder), values=options.compare, jobs=options.jobs, progress=progress)


def _result(job: Job, options: MergeOptions, published: Publication, comparison: BaseComparison | None) -> MergedComponent:
    tensors = [tensor for draft in job.drafts for tensor in draft.opened.component.tensors.values()]
    return MergedComponent(
        **job.result(options, published),
        state=job.state_files,
        lora=job.drafts[0].lora,
        covered_elements=sum(piece.box.numel for tensor in tensors for piece in tensor.pieces),
        source_elements=sum(tensor.numel for tensor in tensors),
        comparison=comparison,
    )


def _with_state(job: Job, opened: Opened, files: Files, dry_run: bool) -> Job:
    """With the training state of its first component beside the weights. Raises NotFound if there is none."""
    place = job.drafts[0].opened.place
    state = read_state(opened.found, place, files)
    told = [*state.notes, *state_inside_notes(opened.found), *states_beside_notes(opened.found, files)]
    if state.is_empty:
        hint, details = "leave out --with-state", [note.text for note in told]
        raise NotFound("there is no training state beside the weights", path=opened.found.path, hint=hint, details=details)
    extra = state_files(state, opened.found.trainer(opened.target.run), dry_run=dry_run)
    notes = (*job.notes, *(note for note in told if note not in opened.notes))
    side, watched = {**extra, **job.side_files}, (*job.watched, *state_sources(state, files))
    return replace(job, notes=notes, side_files=side, state_files=tuple(sorted(extra)), watched=watched)
