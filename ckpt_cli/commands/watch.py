"""`watch`: every new step of live runs is merged (or averaged) as soon as it is written to its end, and a command runs for it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from ckpt_cli.commands.average import average
from ckpt_cli.commands.merge import merge
from ckpt_cli.commands.verify import verify
from ckpt_cli.discover.newest import short_reason
from ckpt_cli.errors import CkptError, InputError, NotFound, OutputInsideSource, UsageError, within_memory
from ckpt_cli.given import PathLike, boundary, optional_path, options_of, path_text, paths_of, progress_of, text_of
from ckpt_cli.hub.assets import resolve_base
from ckpt_cli.output.target import make_parents
from ckpt_cli.paths import absolute
from ckpt_cli.progress import Progress
from ckpt_cli.pushing.destination import Destination, refuse_several
from ckpt_cli.pushing.folder import add_card, manifest_of
from ckpt_cli.pushing.upload import delivered, not_delivered
from ckpt_cli.results.checkpoint import NoteInfo
from ckpt_cli.results.watch import WatchEvent, WatchResult
from ckpt_cli.results.written import AverageResult, MergeResult, PushInfo
from ckpt_cli.watching.due import beside_text
from ckpt_cli.watching.evaluation import check_command
from ckpt_cli.watching.journal import Journal
from ckpt_cli.watching.lock import only_watch
from ckpt_cli.watching.options import WatchKeywords, WatchOptions
from ckpt_cli.watching.readiness import Readiness
from ckpt_cli.watching.watched_run import Listener, Maker, Pusher, WatchedRun


@boundary
@within_memory
def watch(
    runs: PathLike | Sequence[PathLike],
    output: PathLike | None = None,
    *,
    type: str | None = None,
    base: PathLike | None = None,
    listener: Listener | None = None,
    progress: Progress | None = None,
    **options: Unpack[WatchKeywords],
) -> WatchResult:
    """Merge every new step of live runs as soon as it is written to its end: until it is interrupted, or ``once`` through all steps.

    Outputs are ``<output>/step-N``, with several runs ``<output>/<name of the run>/step-N``; without ``output`` they lie in
    ``<run>_merged`` beside the run. What is done is noted in ``watch.jsonl`` there, so that a watch that is started again does no step
    twice. ``options`` are those of `WatchKeywords`, and ``listener`` is told what happens. What a step lacks is waited for, and what
    cannot be written is reported as an event. Raises UsageError, NotFound for a run that is not there, Watched, NotWritable.
    """
    chosen, told = options_of(WatchOptions, options), listener or Listener()
    given, target = [Path(absolute(path)) for path in paths_of(runs, "RUN")], optional_path(output, "--output", use="local")
    component, home = text_of(type, "--type"), path_text(base, "--base") if base is not None else None
    chosen.check(home)
    if chosen.execute is not None:
        check_command(chosen.execute, {})

    def decide() -> dict[str, Any]:
        return chosen.deciding(component, resolve_base(home) if home is not None else None)

    deciding = decide()
    to = chosen.destination([run.name for run in given])
    make = _maker(chosen, component, home, progress_of(progress), to)
    events: list[WatchEvent] = []

    def tell(event: WatchEvent) -> None:
        events.append(event)
        told.event(event)

    homes = _homes(given, target)
    if chosen.execute is not None:
        check_command(chosen.execute, homes)
    with contextlib.ExitStack() as stack:
        watched = []
        for run, folder in homes.items():
            make_parents(folder / "step")
            stack.enter_context(only_watch(folder))
            journal = Journal.of(folder)
            journal.refuse_other(run, deciding)
            shown, ready = replace(told, event=tell), Readiness(chosen.settle)
            watched.append(WatchedRun(run, folder, chosen, deciding, journal, make, shown, ready, to, _pusher(progress)))
        while True:
            due = [seconds for run in watched if (seconds := _looked(run, decide, once=chosen.once)) is not None]
            if chosen.once and not due:
                break
            time.sleep(min([chosen.interval, *due]))
    notes = [
        NoteInfo(level="warning", code="step-waits", text=f"step {step} of {run.path.name}: {reason}")
        for run in watched
        for step, reason in sorted(run.waiting.items())
    ]
    notes += [
        NoteInfo(level="warning", code="older-steps", text=f"{run.path.name}: {run.older}") for run in watched if run.older is not None
    ]
    notes += [NoteInfo(level="warning", code="uncounted", text=f"{run.path.name}: {run.uncounted}") for run in watched if run.uncounted]
    notes += [
        NoteInfo(level="warning", code="output-kept", text=f"{folder} is not removed: {why}")
        for run in watched
        for folder, why in run.kept.items()
    ]
    notes += [NoteInfo(level="info", code="weights-beside", text=beside_text(run.path, each)) for run in watched for each in run.beside]
    newest = tuple(made for run in watched if (made := run.journal.newest()) is not None)
    notes += [
        NoteInfo(level="warning", code="output-changed", text=f"{output.output} is not what was written: {output.trouble}")
        for output in newest
        if output.trouble is not None
    ]
    return WatchResult(
        runs=tuple(str(run.path) for run in watched),
        events=tuple(events),
        waiting={str(run.path): dict(run.waiting) for run in watched if run.waiting},
        newest=newest,
        notes=tuple(notes),
    )


def _looked(run: WatchedRun, decide: Callable[[], Mapping[str, Any]], *, once: bool) -> float | None:
    """What `WatchedRun.look` returns. A run that cannot be read for now, on a disk of the network, does not end a watch that goes on."""
    try:
        if decide() != run.deciding:
            hint = "put it back, or start another watch with another -o"
            raise UsageError("the key map or the base is another one than when the watch began", path=run.path, hint=hint)
        return run.look()
    except InputError as error:
        if once:
            raise
        run.listener.waits(run.path, None, short_reason(error))
        return None


def _homes(runs: Sequence[Path], output: Path | None) -> dict[Path, Path]:
    """Where the outputs of each run go. Raises UsageError, NotFound, and OutputInsideSource for a place in a run."""
    if not runs:
        raise UsageError("there is no run to watch", expected="the folders of one or more runs")
    names = [run.name for run in runs]
    if output is not None and len(set(names)) < len(names):
        raise UsageError("two of the runs have the same name", expected="runs with names of their own", hint="watch them one by one")
    homes: dict[Path, Path] = {}
    for run in runs:
        if not run.is_dir():
            raise NotFound("there is no such run", path=run, expected="the folder into which training saves its steps")
        home = run.with_name(f"{run.name}_merged") if output is None else Path(absolute(output))
        homes[run] = home / run.name if output is not None and len(runs) > 1 else home
    for home in homes.values():
        for run in runs:
            if Path(os.path.realpath(home)).is_relative_to(os.path.realpath(run)):
                raise OutputInsideSource("the outputs would lie in the run that is watched", path=home, hint="choose another -o")
    return homes


def _pusher(progress: Progress | None) -> Pusher:
    """What pushes an output; one that is not known to be right is verified first."""

    def push(output: Path, to: Destination, *, verified: bool) -> PushInfo:
        try:
            found = () if verified else (verify(output, full=True, progress=progress),)
        except CkptError as error:
            return not_delivered(output, to, error)
        return delivered(output, to, found, progress)

    return push


def _maker(options: WatchOptions, component: str | None, base: str | None, progress: Progress | None, to: Destination | None) -> Maker:
    """What makes the output of a step: `merge`, or `average` as ``--average`` says. What will be pushed is verified, and gets a card."""
    said = options.averaging

    def make(run: Path, steps: tuple[int, ...], output: Path, *, overwrite: bool, dry_run: bool) -> MergeResult | AverageResult:
        shared = {**options.handed_on, "type": component, "base": base, "progress": progress, "overwrite": overwrite, "dry_run": dry_run}
        if said is None:
            return merge(run, output, step=steps[0], verify=options.verify or to is not None, **shared)
        method = {name: value for name, value in said.items() if name != "last"}
        return average(run, output, steps=steps, **method, **shared)

    def make_for_hub(run: Path, steps: tuple[int, ...], output: Path, *, overwrite: bool, dry_run: bool) -> MergeResult | AverageResult:
        if component in ("both", "all"):
            refuse_several(to, [Path(each.output) for each in make(run, steps, output, overwrite=overwrite, dry_run=True).outputs])
        result = make(run, steps, output, overwrite=overwrite, dry_run=dry_run)
        if dry_run:
            return result
        folder = Path(result.outputs[0].output)
        if said is not None:
            checked = verify(folder, full=True, jobs=options.jobs, progress=progress)
            result = result.model_copy(update={"outputs": (result.outputs[0].model_copy(update={"verified": (checked,)}),)})
        if not result.exit_code:
            add_card(folder, manifest_of(folder), result.outputs[0].verified)
        return result

    return make if to is None else make_for_hub
