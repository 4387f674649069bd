"""`extract_state`: everything in a checkpoint but the weights, in files that other programs read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from ckpt_cli import shell
from ckpt_cli.discover.beside.marks import mark_notes
from ckpt_cli.discover.beside.other_steps import other_step_notes
from ckpt_cli.discover.between import is_chosen
from ckpt_cli.discover.components import component_names, expanded, several_notes, why_none
from ckpt_cli.discover.default_output import AMONG, among_steps_notes, default_output
from ckpt_cli.discover.forms.inner_runs import inner_run_notes
from ckpt_cli.discover.forms.inner_steps import notes_of_state
from ckpt_cli.discover.forms.not_taken import refused_notes
from ckpt_cli.discover.forms.passed_over import passed_over_state
from ckpt_cli.discover.forms.states_inside import state_inside_notes, states_beside_notes, steps_inside_notes, steps_with_state
from ckpt_cli.discover.found import Found, Place, Target
from ckpt_cli.discover.locate import locate
from ckpt_cli.discover.newest import Passed, ambiguous, newest_first, short_reason
from ckpt_cli.discover.nodes.also import also_notes, check_more, contradicts
from ckpt_cli.discover.open import bare_notes
from ckpt_cli.discover.optimizers.mixed_saves import mixed_notes
from ckpt_cli.discover.places import unread_notes
from ckpt_cli.discover.step_infos import listed_component, newer_infos, step_info
from ckpt_cli.discover.steps import newest_notes
from ckpt_cli.errors import CkptError, Inconsistent, NotFetched, NotFound, Unreadable, Unsupported, UsageError, within_memory
from ckpt_cli.files.folders import is_file
from ckpt_cli.files.source import Files, size_of
from ckpt_cli.formats.ages import APART, age_notes, unversioned_notes
from ckpt_cli.formats.registry import format_of
from ckpt_cli.formats.step_names import numbered
from ckpt_cli.formats.trainers import trainer_of
from ckpt_cli.given import PathLike, boundary, int_of, optional_path, options_of, path_of, paths_of, progress_of, text_of
from ckpt_cli.output import manifest, plan
from ckpt_cli.output.options import check_way, check_writing
from ckpt_cli.output.publish import Order, OutputFolder, SideFiles, publish
from ckpt_cli.output.strict import refuse_warnings
from ckpt_cli.output.target import check_target, refuse_planned
from ckpt_cli.output.writer import Written
from ckpt_cli.paths import absolute
from ckpt_cli.progress import Progress, warn_before
from ckpt_cli.results.checkpoint import NoteInfo, StepInfo
from ckpt_cli.results.written import ExtractResult, FileInfo, OptimizerInfo
from ckpt_cli.state.agreement.learning_rates import rate_notes
from ckpt_cli.state.folder import OPTIMIZER, OPTIMIZER_WEIGHTS, json_bytes, state_files, state_sources
from ckpt_cli.state.optimizer import optimizer_notes, read_optimizer
from ckpt_cli.state.optimizer_tensors import Optimizer, steps_of
from ckpt_cli.state.options import ExtractKeywords, ExtractOptions
from ckpt_cli.state.training_state import TrainingState, read_state
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.plain_values import to_json


@boundary
@within_memory
def extract_state(
    path: PathLike,
    output: PathLike | None = None,
    *,
    type: str | None = None,
    step: int | None = None,
    also: PathLike | Sequence[PathLike] = (),
    progress: Progress | None = None,
    **options: Unpack[ExtractKeywords],
) -> ExtractResult:
    """Write the training state of a checkpoint into a folder: scheduler, random states, counters, dataloaders, optimizer.

    ``output`` defaults to ``<checkpoint>_state`` beside the checkpoint; ``options`` are those of `ExtractKeywords`.
    Nothing in a file is executed; what only its own class could rebuild is listed, and its file is copied. Raises NotFound
    if there is no state, InputError for files that cannot be read, Undecidable for an optimizer whose parameters cannot
    be told, OutputError.
    """
    chosen, progress = options_of(ExtractOptions, options), progress_of(progress)
    path, given = path_of(path), optional_path(output, "--output", use="output")
    component, step, nodes = text_of(type, "--type"), int_of(step, "--step"), paths_of(also, "--also")
    check_writing(None, chosen.jobs, None)
    check_way(chosen.write, given)
    started = time.monotonic()
    with Files(progress=progress) as files:
        found, place, notes, newer = choose(path, files, component, step, nodes)
        state = read_state(found, place, files, optimizer=True)
        notes += other_step_notes(found, place, state.sources, weights=False)
        notes += passed_over_state(found, place, files)
        optimizer = _optimizer(found, place, files, chosen, state) if chosen.optimizer else None
        if state.is_empty and optimizer is None:
            if format_of(place.match).is_refused and place.match.trouble is not None:
                raise place.match.trouble
            raise NotFound(
                "there is no training state beside the weights",
                path=found.path,
                expected="schedulers, random states or dataloaders, as trainers save them",
                hint=_hint(found, place, files, chosen),
                details=[note.text for note in (*notes, *state.notes)],
            )
        target = Path(absolute(given)) if given is not None else default_output(found, place.name, "state")
        notes += among_steps_notes(found, target) if given is None else []
        roots = [place.match.root, *place.match.more_roots, *place.more_homes]
        sources = [found.path] if is_file(found.path) else [found.path, place.home, *roots]
        read = [*state.sources, *state.copies.values()]
        check_target(target, sources, overwrite=chosen.overwrite, read=read, dry_run=chosen.dry_run)
        if optimizer is not None:
            state.lost += optimizer.lost
            notes = [*notes, *optimizer_notes(found, place, files, component is not None)]
        framework = trainer_of(place.match, found.path, None)
        side = state_files(state, framework, dry_run=chosen.dry_run)
        whole = plan.Plan((), None, None)
        if optimizer is not None:
            side[OPTIMIZER] = json_bytes(optimizer.content)
            whole = plan.make_plan(optimizer.tensors, weights_name=OPTIMIZER_WEIGHTS)
        watched = state_sources(state, files)
        notes = [*notes, *_told(found, place, state, optimizer, whole, files), *unversioned_notes([*watched, *whole.sources])]
        if chosen.strict:
            refuse_warnings(notes)
        for note in () if chosen.dry_run else (note for note in notes if note.code == AMONG):
            warn_before(progress, note.code, note.text, whole.bytes_written)
        order = Order(
            whole,
            side,
            OutputFolder(target, chosen.overwrite),
            lambda written: _manifest(found, place, state, whole, side, written, chosen),
            watched=watched,
        )
        (published,) = publish([order], dry_run=chosen.dry_run, jobs=chosen.jobs, progress=progress, write=chosen.write)
    written = [FileInfo(name=name, bytes=size) for name, size in published.written.files.items()]
    written += [FileInfo(name=n, bytes=size_of(c) if isinstance(c, Path) else len(c)) for n, c in side.items()]
    result = ExtractResult(
        path=str(found.path),
        step=found.step,
        component=place.name,
        framework=framework,
        output=str(target),
        files=tuple(sorted(written, key=lambda file: file.name)),
        ranks=state.ranks,
        scheduler=to_json(_summary(state.scheduler)),
        training=to_json({name: value for name, value in state.training.items() if name not in ("trainer_state", "metadata")}),
        random=tuple(state.extra.get("rng", ())),
        copied=tuple(sorted(state.copies)),
        not_represented=tuple(state.lost),
        optimizer=_optimizer_info(optimizer),
        dry_run=chosen.dry_run,
        seconds=time.monotonic() - started,
        replaced=published.replaced,
        passed_over=newer,
        notes=tuple(NoteInfo.of(note) for note in dict.fromkeys((*notes, *published.notes))),
    )
    if chosen.dry_run:
        refuse_planned([target], overwrite=chosen.overwrite, planned=result)
    return result


def _optimizer(found: Found, place: Place, files: Files, options: ExtractOptions, state: TrainingState) -> Optimizer:
    """What `read_optimizer` reads; the error that there is none says what is known of the state, and where else some may be."""
    try:
        return read_optimizer(found, place, files, options.shard_order)
    except NotFound as error:
        error.details = (*error.details, *(note.text for note in state.notes if note.level == "warning"))
        hints = [_elsewhere(found), error.hint if not state.is_empty else None]
        error.hint = ", or ".join(filter(None, hints)) or None
        raise


def _told(found: Found, place: Place, state: TrainingState, optimizer: Optimizer | None, whole: plan.Plan, files: Files) -> list[Note]:
    """What is said of the state and of the optimizer, whose files are from one save if they are from the same step."""
    if optimizer is None:
        return state.notes
    told = [*optimizer.notes, *rate_notes(state.training.get("lr"), optimizer.content["param_groups"])]
    if not any(note.code == "step-differs" for note in (*state.notes, *told)):
        told += mixed_notes(found, place, files, lambda: steps_of(optimizer))
    apart = age_notes([*whole.sources, *map(files.source, state.of_ranks)])
    if not apart or any(note.code == APART for note in optimizer.notes):
        return [*state.notes, *told]
    return [*(note for note in state.notes if note.code != APART), *told, *apart]


def _hint(found: Found, place: Place, files: Files, options: ExtractOptions) -> str | None:
    """What else can be extracted: the optimizer's state, or the state of the step that the weights come from."""
    try:
        if not options.optimizer and read_optimizer(found, place, files, options.shard_order).tensors:
            return "pass --optimizer: only optimizer state was found"
    except CkptError:
        pass  # only asked for the hint
    return _elsewhere(found)


def _elsewhere(found: Found) -> str | None:
    """Where the state of weights may be that have none beside them."""
    if steps := steps_with_state(found):
        return f"pass {shell.path(steps[0])}, which holds training state"
    return "pass the folder of the training step that these weights come from" if found.step is None else None


def choose(
    path: Path, files: Files, type: str | None, step: int | None, also: tuple[Path, ...]
) -> tuple[Found, Place, list[Note], tuple[StepInfo, ...]]:
    """The checkpoint and component whose state is meant: the newest step that has all files, unless ``step`` says which.

    The last value are the newer steps that were passed over.

    If no step has all files, the newest one: state is useful even if weights are incomplete. What is refused by
    name (DeepSpeed) is refused here too. Raises NotFound, Unsupported, UsageError.
    """
    target = locate(path, step, also)
    candidates: list[tuple[Found, Place, str | None]] = []
    notes: list[Note] = []
    passed = Passed()

    def named(listed: Found) -> tuple[Found, list[str]]:
        found = expanded(listed, files)
        return found, component_names(found, type)

    def may_pass(_: Found, error: CkptError) -> bool:
        return not isinstance(error, (Unreadable, NotFetched))

    for _, (found, names) in newest_first(reversed(target.checkpoints), named, passed, may_pass):
        if len(names) > 1:
            raise UsageError("state is extracted for one component at a time", expected=f"--type with one of: {', '.join(names)}")
        place = found.known_place(names[0])
        trouble = place.match.trouble
        if trouble is not None and (
            isinstance(trouble, (Unreadable, NotFetched, Unsupported)) or not is_chosen(place) or contradicts(found, trouble)
        ):
            raise trouble
        check_more(found, place)
        problem, linked = listed_component(place).problem, list[Note]()
        try:
            linked = other_step_notes(found, place, place.match.files)
        except Inconsistent as error:
            problem = problem or error.message
        if step is None and target.run is not None:
            option = target.option(found) if problem is None else None
            target.check_readable(target.since(found), None if option is None else f"pass {option}")
        newer = bare_notes(target, target.since(found)) if step is None and target.run is not None else []
        notes += several_notes(target, found, type) if problem is None or not candidates else []
        if problem is None:
            if step is None and target.run is not None:
                newer += _notes_of_twins(found, target)
                newer += newest_notes(target, found, lambda other: step_info(other).problem is None)
                newer += inner_run_notes(target, found, files)
            newer += also_notes(target, [(found, [place.name])])
            skipped = [*((other, why) for other, _, why in candidates), *((other, short_reason(why)) for other, why in passed.errors)]
            beside = [*linked, *unread_notes(found, place), *mark_notes(found, place), *_of_steps_inside(target, found, place, files)]
            told = [*newer, *passed.notes(target, "skipped"), *notes, *beside]
            return found, place, told, newer_infos(target, found, skipped)
        candidates.append((found, place, problem))
        if step is not None or target.run is None:
            break
        notes.append(Note("warning", "step-skipped", f"{target.label(found.path)} is skipped: {problem}"))
    if not candidates:
        raise why_none(target, passed.errors, type, files) or NotFound("there is no checkpoint", path=path)
    found, place, problem = candidates[0]
    age = target.age
    twins = [other for other, _, _ in candidates if age(other) == age(found)]
    if step is None and target.run is not None and len(twins) > 1:
        raise ambiguous(target, found.step, twins)
    incomplete = Note("warning", "incomplete-weights", f"the weights of {found.path.name} are not whole: {problem}")
    notes = [incomplete, *also_notes(target, [(found, [place.name])]), *_of_steps_inside(target, found, place, files)]
    return found, place, notes, ()


def _of_steps_inside(target: Target, found: Found, place: Place, files: Files) -> list[Note]:
    notes = [*notes_of_state(found, place, files), *(state_inside_notes(found) or steps_inside_notes(target))]
    return [*notes, *states_beside_notes(found, files), *refused_notes(target)]


def _notes_of_twins(taken: Found, target: Target) -> list[Note]:
    """What is said of other folders of the step that is taken, which lack files. Raises AmbiguousStep if one has them, or is not read."""
    notes, age = [], target.age
    for other in target.checkpoints:
        if age(other) != age(taken) or other.path == taken.path:
            continue
        problem = step_info(other).problem
        unknown = any(isinstance(place.match.trouble, (Unreadable, NotFetched, Unsupported)) for place in other.places)
        if problem is None or unknown:
            rivals = sorted((taken, other), key=lambda one: one.path.name)
            raise ambiguous(target, taken.step, rivals)
        notes.append(Note("warning", "step-skipped", f"{target.label(other.path)} is skipped: {problem}"))
    return notes


def _summary(scheduler: Any) -> Any:
    """A summary of a scheduler: its step and the learning rates."""
    if isinstance(scheduler, list):
        return {"schedulers": len(scheduler)}
    if not isinstance(scheduler, dict):
        return None
    return {name: scheduler[name] for name in ("last_epoch", "_last_lr", "base_lrs") if name in scheduler}


def _optimizer_info(optimizer: Optimizer | None) -> OptimizerInfo | None:
    if optimizer is None:
        return None
    return OptimizerInfo(
        layout=optimizer.layout,
        assumed=optimizer.assumed,
        parameters=len(optimizer.content["state"]),
        tensors=len(optimizer.tensors),
        elements=sum(tensor.numel for tensor in optimizer.tensors.values()),
        bytes=sum(tensor.nbytes for tensor in optimizer.tensors.values()),
        groups=len(optimizer.content["param_groups"]),
    )


def _manifest(
    found: Found, place: Place, state: TrainingState, whole: plan.Plan, side: SideFiles, written: Written, options: ExtractOptions
) -> bytes:
    facts: dict[str, Any] = {"checkpoint": absolute(found.path), **numbered(found.numbered_at, found.step), "component": place.name}
    facts["read"] = sorted(absolute(source) for source in (*state.sources, *state.copies.values()))
    settings = {"optimizer": options.optimizer, "shard_order": options.shard_order}
    return manifest.build("extract-state", whole, written, options=settings, side_files=side, facts=facts)
