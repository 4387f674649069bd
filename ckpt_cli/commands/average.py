"""`average`: one model from several checkpoints, straight from their shards. `weighted_sum` does the arithmetic."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import Unpack

from ckpt_cli.averaging.options import AverageKeywords, AverageOptions
from ckpt_cli.averaging.plan import AverageJob, formula_of, planned_jobs
from ckpt_cli.averaging.steps import Snapshots, StepChoice, open_snapshots
from ckpt_cli.base_model.opened import open_base
from ckpt_cli.commands.verify import verify
from ckpt_cli.discover.open import describe_checkpoint
from ckpt_cli.engines.call import PartCall, lasting, part_call
from ckpt_cli.engines.orders import publish_orders
from ckpt_cli.errors import UsageError, within_memory
from ckpt_cli.files.source import Files
from ckpt_cli.given import PathLike, boundary, options_of, path_of, path_text, paths_of, progress_of, text_of
from ckpt_cli.merging.trained_on import opened_on_base
from ckpt_cli.output.key_map import read_key_map
from ckpt_cli.output.strict import refuse_warnings
from ckpt_cli.output.target import refuse_planned
from ckpt_cli.paths import absolute
from ckpt_cli.progress import Progress
from ckpt_cli.pushing.destination import Destination, refuse_several
from ckpt_cli.pushing.upload import delivered, planned
from ckpt_cli.results.checkpoint import NoteInfo
from ckpt_cli.results.written import AveragedComponent, AverageResult


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
    of the formula that the result reports. With ``push_to_hub`` every value of the output is read and checked, and then it is pushed,
    as `merge` does. Raises what `merge` raises, and NonFinite for sources with NaN or infinities.
    """
    chosen, progress = options_of(AverageOptions, options), progress_of(progress)
    given, target = paths_of(paths, "PATH"), path_of(output, "--output", use="output")
    component, nodes = text_of(type, "--type"), paths_of(also, "--also")
    home = path_text(base, "--base") if base is not None else None
    if not given:
        raise UsageError("there are no checkpoints to average", expected="a run, or at least two checkpoints")
    chosen.check(home)
    chosen.check_place(target)
    to = Destination.of(chosen)
    started = time.monotonic()
    rules = read_key_map(chosen.key_map)
    with Files(progress=progress) as files:

        def opened_with(folder: Path | None) -> Snapshots:
            return open_snapshots(
                given,
                StepChoice(chosen.everything, chosen.last, chosen.begin, chosen.end, chosen.every, chosen.steps),
                files,
                type=component,
                base=folder,
                also=nodes,
                shard_order=chosen.shard_order,
            )

        snapshots, folder = opened_on_base(home, opened_with)
        newest_found = snapshots.opened[-1].found
        to = to.of_step(newest_found.step, newest_found.numbered_at.parent.name) if to is not None else None
        method = chosen.implied_method
        mixed = formula_of(snapshots, method, chosen)
        reference = open_base(folder, files, needed=chosen.takes_from_base) if folder is not None else None
        jobs = planned_jobs(snapshots, mixed, method, Path(absolute(target)), reference, rules, chosen)
        refuse_several(to, [job.output for job in jobs])
        newest = describe_checkpoint(snapshots.opened[-1])
        if chosen.strict:
            refuse_warnings([*snapshots.notes, *newest.notes, *(note for job in jobs for note in job.notes)])

        def call() -> PartCall:
            named = {"type": component, "base": lasting(folder) if folder is not None else None, "also": tuple(map(lasting, nodes))}
            return part_call(average, [tuple(map(lasting, given)), lasting(target)], chosen, reads=(*given, *nodes, folder), **named)

        outputs = _run(jobs, chosen, progress, call)
    seconds = time.monotonic() - started
    push = None
    if to is not None and chosen.dry_run:
        push = planned(to)
    elif to is not None:
        checked = verify(jobs[0].output, full=True, jobs=chosen.jobs, progress=progress)
        outputs = [outputs[0].model_copy(update={"verified": (checked,)})]
        push = delivered(jobs[0].output, to, (checked,), progress, strict=chosen.strict)
    result = AverageResult(
        checkpoint=newest,
        method=method,
        divisor=mixed.divisor,
        outputs=tuple(outputs),
        dry_run=chosen.dry_run,
        push=push,
        seconds=seconds,
        passed_over=snapshots.passed_over,
        notes=tuple(note for note in map(NoteInfo.of, dict.fromkeys(snapshots.notes)) if note not in newest.notes),
    )
    if chosen.dry_run:
        refuse_planned([job.output for job in jobs], overwrite=chosen.overwrite, planned=result)
    return result


def _run(
    jobs: Sequence[AverageJob], options: AverageOptions, progress: Progress | None, call: Callable[[], PartCall]
) -> list[AveragedComponent]:
    orders = [job.order("average", options) for job in jobs]
    published = publish_orders(orders, options, progress, call)
    results = []
    for job, done in zip(jobs, published, strict=True):
        names = [output.name for output in job.plan.tensors]
        # What was taken from the base is told apart.
        copied = tuple(name for name in names if name not in job.drafts[0].combinations and name not in job.drafts[0].from_base)
        count = len(job.drafts[0].combinations)
        told = job.result(options, done)
        results.append(AveragedComponent(**told, sources=job.sources, averaged=count, copied=len(copied), copied_names=copied))
    return results
