"""`average`: one model from several checkpoints, straight from their shards. `weighted_sum` does the arithmetic."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from typing_extensions import Unpack

from ckpt_cli.averaging.options import AverageKeywords, AverageOptions, Method
from ckpt_cli.averaging.plan import Job, Source, formula_of, planned_jobs
from ckpt_cli.averaging.steps import StepChoice, open_snapshots
from ckpt_cli.base_model.opened import open_base
from ckpt_cli.commands.strict import refuse_warnings
from ckpt_cli.discover.open import describe_checkpoint
from ckpt_cli.dtypes import BASE
from ckpt_cli.errors import NonFinite, UsageError, within_memory
from ckpt_cli.files.manifest import FUSED, LEFT_OUT
from ckpt_cli.files.source import Files
from ckpt_cli.given import PathLike, boundary, options_of, path_of, path_text, paths_of, progress_of, text_of
from ckpt_cli.hub.assets import resolve_base
from ckpt_cli.names import few
from ckpt_cli.output import manifest
from ckpt_cli.output.key_map import read_key_map
from ckpt_cli.output.options import check_writing
from ckpt_cli.output.publish import (
    Order,
    Publication,
    Target,
    class_comparison,
    model_files,
    overflow_notes,
    publish,
    refuse_overflows,
    written_facts,
)
from ckpt_cli.output.writer import Written
from ckpt_cli.progress import Progress
from ckpt_cli.results.checkpoint import NoteInfo
from ckpt_cli.results.written import AveragedComponent, AverageResult, AverageSource
from ckpt_cli.tensors.component import Note


@boundary
@within_memory
def average(
    paths: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    type: str | None = None,
    base: PathLike | None = None,
    also: PathLike | Sequence[PathLike] = (),
    progress: Progress | None = None,
    **options: Unpack[AverageKeywords],
) -> AverageResult:
    """Average checkpoints into one model folder.

    ``paths`` are runs, checkpoints, component folders or files, from old to new; ``type`` chooses the component; ``options``
    are those of `AverageKeywords` (``last=5``, ``weights=(0.7, 0.3)``, ...). Every element is the exactly rounded value
    of the formula that the result reports. Raises what `merge` raises, and NonFinite for sources with NaN or infinities.
    """
    chosen, progress = options_of(AverageOptions, options), progress_of(progress)
    given, target = paths_of(paths, "PATH"), path_of(output, "--output", output=True)
    component, nodes = text_of(type, "--type"), paths_of(also, "--also")
    home = path_text(base, "--base") if base is not None else None
    if not given:
        raise UsageError("there are no checkpoints to average", expected="a run, or at least two checkpoints")
    check_writing(chosen.weights_name, chosen.jobs, chosen.max_shard_size)
    if base is None and (chosen.carry_from_base or chosen.dtype == BASE):
        option = "--carry-from-base" if chosen.carry_from_base else "--dtype base"
        raise UsageError(f"{option} needs a base", hint="pass --base with the folder of the base model")
    started = time.monotonic()
    rules = read_key_map(Path(chosen.key_map)) if chosen.key_map is not None else ()
    folder = resolve_base(home) if home is not None else None
    with Files(progress=progress) as files:
        snapshots = open_snapshots(
            given,
            StepChoice(chosen.everything, chosen.last, chosen.begin, chosen.end, chosen.every, chosen.steps),
            files,
            type=component,
            base=folder,
            also=nodes,
            shard_order=chosen.shard_order,
        )
        method = chosen.implied_method
        mixed = formula_of(snapshots, method, chosen)
        reference = None
        if folder is not None:
            reference = open_base(folder, files, needed=bool(chosen.carry_from_base) or chosen.dtype == BASE)
        jobs = planned_jobs(snapshots, mixed, method, Path(os.path.abspath(target)), reference, rules, chosen)
        newest = describe_checkpoint(snapshots.opened[-1])
        if chosen.strict:
            refuse_warnings([*snapshots.notes, *newest.notes, *(note for job in jobs for note in job.notes)])
        outputs = _run(jobs, method, chosen, progress)
    return AverageResult(
        checkpoint=newest,
        method=method,
        divisor=mixed.divisor,
        outputs=tuple(outputs),
        dry_run=chosen.dry_run,
        seconds=time.monotonic() - started,
        notes=tuple(note for note in map(NoteInfo.of, dict.fromkeys(snapshots.notes)) if note not in newest.notes),
    )


# -- deciding --------------------------------------------------------------------------------------------------------


# -- doing -----------------------------------------------------------------------------------------------------------


def _run(jobs: Sequence[Job], method: Method, options: AverageOptions, progress: Progress | None) -> list[AveragedComponent]:
    orders = [
        Order(
            job.plan,
            model_files(job.assets, job.plan),
            Target(job.target, options.overwrite),
            partial(_manifest, job, method, options),
            approve=_approval(job, options),
        )
        for job in jobs
    ]
    published = publish(orders, dry_run=options.dry_run, jobs=options.jobs, checksum=options.checksum, progress=progress)
    return [_result(job, options, done) for job, done in zip(jobs, published, strict=True)]


def _approval(job: Job, options: AverageOptions) -> Callable[[Written], None]:
    used = job.used

    def approve(written: Written) -> None:
        non_finite = written.non_finite
        if non_finite and not options.allow_non_finite:
            where = {place for counts in non_finite.values() for place in counts}
            raise NonFinite(
                f"NaN or infinite values in {len(non_finite)} tensors of {few([used[place].label for place in sorted(where)])}",
                details=_non_finite_lines(non_finite, used),
                hint="leave out these checkpoints or tensors (--exclude), or pass --allow-non-finite to average them anyway",
            )
        if not options.allow_overflow:
            refuse_overflows(written, job.plan)
        if options.strict:
            refuse_warnings(_met_notes(job, written))

    return approve


def _met_notes(job: Job, written: Written) -> list[Note]:
    """Notes about values found while writing, if they are allowed."""
    non_finite = [Note("warning", "non-finite", f"NaN or infinite: {line}") for line in _non_finite_lines(written.non_finite, job.used)]
    return [*overflow_notes(written), *non_finite]


def _non_finite_lines(non_finite: Mapping[str, Mapping[int, int]], used: Sequence[Source]) -> list[str]:
    found = [(name, used[place], count) for name, counts in non_finite.items() for place, count in counts.items()]
    return [f"{name}: {count} in {source.label}" for name, source, count in found]


def _source_facts(job: Job) -> list[AverageSource]:
    return [
        AverageSource(
            path=str(source.path),
            step=source.step,
            component=source.opened.name,
            format=source.opened.component.format,
            weight=weight,
            coefficient=weight / job.formula.divisor,
            bytes=sum(tensor.nbytes for tensor in source.selection.tensors.values()),
        )
        for source, weight in zip(job.sources, job.formula.weights, strict=True)
    ]


def _manifest(job: Job, method: Method, options: AverageOptions, written: Written) -> bytes:
    facts = {
        "method": method,
        "divisor": job.formula.divisor,
        "averaged": [
            {**source.model_dump(include={"step", "component", "weight", "coefficient"}), "path": os.path.abspath(source.path)}
            for source in _source_facts(job)
        ],
        "component": job.name,
        "elements": job.plan.elements,
        "dropped": dict(job.plan.dropped),
        "names": [job.claim.text],
        LEFT_OUT: sorted(job.left_out),
        FUSED: sorted({digest for source in job.used if (made := source.opened.made) is not None for digest in made.fused_adapters}),
    }
    unwanted = ("dry_run", "overwrite", "jobs", "checksum")
    settings = {name: getattr(options, name) for name in (field.name for field in fields(AverageOptions)) if name not in unwanted}
    settings["key_map"] = None if options.key_map is None else os.path.abspath(options.key_map)
    side = [*job.assets.names, *([job.plan.index_name] if job.plan.index_name else [])]
    return manifest.build(
        "average", settings, job.plan.sources, job.plan.digest, written.files, written.checksums, side, written.side_files, facts
    )


def _result(job: Job, options: AverageOptions, published: Publication) -> AveragedComponent:
    notes = [*job.notes, *_met_notes(job, published.written)]
    return AveragedComponent(
        **written_facts(job.plan, published, options.jobs),
        component=job.name,
        output=str(job.target),
        sources=tuple(_source_facts(job)),
        averaged=len(job.agreed.combinations),
        copied=len(job.plan.tensors) - len(job.agreed.combinations),
        renamed=job.sources[-1].selection.renamed,
        naming=job.claim.text,
        compared=class_comparison(job.claim),
        carried=job.carried,
        left_out=job.sources[-1].selection.left_out,
        lacking=tuple(job.assets.lacking),
        notes=tuple(NoteInfo.of(note) for note in notes),
    )
