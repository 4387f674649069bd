"""The steps of a run, by the names of their folders, and what is reported about the one that is used as the newest.

Tracker files are only compared; the files decide.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_cli.discover.beside.outputs import is_output
from ckpt_cli.discover.beside.uncounted import uncounted_notes
from ckpt_cli.discover.forms.archives import archive_of, archived_steps, way_to, where_it_is
from ckpt_cli.discover.found import Blocked, Found, Place, Target, Tracker, counted, is_in_epoch, same_step
from ckpt_cli.discover.newest import ambiguous, counter_notes, mixed_notes, numbered_alike, oldest_first
from ckpt_cli.discover.places import places_in, places_of_file, steps_of_epoch
from ckpt_cli.discover.tags import RELEASE, step_at, trackers_in
from ckpt_cli.errors import CkptError, NotFound, Unreadable
from ckpt_cli.files.folders import Folders, broken_link, entries_in, is_folder, status_of
from ckpt_cli.formats.registry import format_of, recognise
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.formats.trainers import PARTIAL, RUNS, WEIGHTS, has_form
from ckpt_cli.formats.weight_names import may_hold_weights
from ckpt_cli.names import few, span_text
from ckpt_cli.tensors.component import Note

MAX_LOOKED = 64
"""Of how many lower steps the time is asked: all of most runs. Of longer ones the nearest half, and others at equal distances."""

SECONDS = 3600
"""How much younger a lower step must be: no save takes as long, and neither does copying most runs."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a run by their number, and the ``folders`` in which they lie: its own, or those of `RUNS`.

    ``made`` are outputs of ckpt that somebody put among them under the name of a step.
    """

    found: tuple[Found, ...] = ()
    made: tuple[Path, ...] = ()
    blocked: tuple[Blocked, ...] = ()
    folders: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.found or self.blocked)


def step_folders(run: Path, there: Folders, *, files: bool = False) -> list[Path]:
    """Entries named like a step of a run: folders, and entries that cannot be accessed, or are links that lead nowhere.

    ``files``: files that may hold weights count too, as Lightning writes one for each step.
    """
    folders = []
    for path in there.entries(run):
        if step_at(path, there) is not None:
            with contextlib.suppress(Unreadable):
                is_file = files and there.is_file(path) and bool(recognise(path, there))
                if not is_file and not there.is_folder(path) and not there.is_broken(path):
                    continue
            folders += steps_of_epoch(path, there) or [path]
    return folders


def steps_in(
    folder: Path, there: Folders, only: int | None = None, *, files: bool = False
) -> tuple[tuple[Found, ...], tuple[Blocked, ...]]:
    """The checkpoints in the step folders of a run, by step number; and the step folders that cannot be looked at.

    ``only``: nothing is looked at but this step.
    """
    found: list[Found] = []
    blocked: list[Blocked] = []
    for path in step_folders(folder, there, files=files):
        step = step_at(path, there) or 0
        if only is not None and step != only:
            continue
        try:
            places = places_of_file(path, there) or places_in(path, there) or _refuse_broken(path, there)
        except Unreadable as error:
            blocked.append(Blocked(path, step, error))
            continue
        if places:
            found.append(Found(path, step, places))
    return tuple(oldest_first(found)), tuple(blocked)


def _refuse_broken(folder: Path, there: Folders) -> tuple[Place, ...]:
    """Raise Unreadable for a step without weights that is a link that leads nowhere, or holds one in place of weights."""
    inside = (entry for entry in there.entries(folder) if may_hold_weights(entry.name) or has_form(entry.name, WEIGHTS))
    broken = next(filter(there.is_broken, (folder, *inside)), None)
    if broken is not None:
        raise broken_link(broken)
    return ()


def steps_of_run(given: Path, there: Folders, only: int | None = None, *, files: bool = False) -> Steps:
    """The steps in a folder and in those inside of it where some trainers keep them: all are one run.

    A trainer that was given another name for its folder goes on in it, so that none of them is the right one by its name.
    """
    found: list[Found] = []
    blocked: list[Blocked] = []
    folders: list[Path] = []
    for folder in _folders_of(given):
        try:
            checkpoints, unknown = steps_in(folder, there, only, files=files)
        except Unreadable as error:
            if folders:
                error.hint = ", or ".join(filter(None, (error.hint, "pass the folder of the step itself")))
            raise
        if (checkpoints or unknown) and not any(_is_same(folder, other) for other in folders):
            found += checkpoints
            blocked += unknown
            folders.append(folder)
    made = [listed.path for listed in found if is_output(listed.places[0])]
    if only is None and len(made) == len(found):
        made = []  # a folder of outputs has no other steps
    trained = [listed for listed in found if listed.path not in made]
    return Steps(_without_links(trained), tuple(made), tuple(blocked), tuple(folders))


def without_tags(steps: Steps) -> Steps:
    """The steps in a folder that is a step itself: a save in a tag (``global_step500``) is a part of it, and no step of its own."""
    found = tuple(step for step in steps.found if not all(_is_tag(step.path, place) for place in step.places))
    return replace(steps, found=found)


def _is_tag(folder: Path, place: Place) -> bool:
    """Whether a folder is a tag itself, and no step that holds one."""
    return format_of(place.match).in_tags and place.match.root == folder


def bare_in(given: Path, steps: Steps, there: Folders, only: int | None) -> tuple[Path, ...]:
    """The step folders without weights, and steps in archives, but for those whose step lies in another folder of the run."""
    known = {*(found.path for found in steps.found), *(unknown.path for unknown in steps.blocked), *steps.made}
    bare = []
    for folder in _folders_of(given):
        elsewhere = {counted(found) for found in steps.found if _folder_of(found.path) != folder}
        for path in dict.fromkeys((*step_folders(folder, there), *archived_steps(folder, there))):
            step = step_of(path)
            if path in known or counted(path) in elsewhere or (only is not None and step != only):
                continue
            if not any(_is_same(path, found.path) for found in steps.found if found.step == step):
                bare.append(path)
    return tuple(bare)


def partial_in(folders: Sequence[Path], there: Folders) -> tuple[Path, ...]:
    """The folders of saves that did not finish: trainers rename them when they are whole."""
    return tuple(entry for folder in folders for entry in there.entries(folder) if has_form(entry.name, PARTIAL))


def _folder_of(step: Path) -> Path:
    """The folder of steps that one lies in, which may lie in that of its epoch."""
    return step.parent.parent if is_in_epoch(step) else step.parent


def _folders_of(given: Path) -> list[Path]:
    return [given, *(given / name for name in RUNS)]


def _without_links(found: Sequence[Found]) -> tuple[Found, ...]:
    """The steps in their order; a link to the folder of the same step is not a second one."""
    kept: list[Found] = []
    for checkpoint in oldest_first(found):
        alike = (other for other in reversed(kept) if other.step == checkpoint.step and same_step(other, checkpoint))
        twin = next((other for other in alike if _is_same(other.path, checkpoint.path)), None)
        if twin is None:
            kept.append(checkpoint)
        elif twin.path.is_symlink():
            kept[kept.index(twin)] = checkpoint
    return tuple(kept)


def _is_same(folder: Path, other: Path) -> bool:
    """Whether two paths lead to one folder."""
    first, second = status_of(folder), status_of(other)
    return first is not None and second is not None and os.path.samestat(first, second)


def with_step(target: Target, step: int | None) -> Target:
    if step is None:
        return target
    if alike := numbered_alike(target, step):
        raise ambiguous(target, step, alike)
    blocked = next((blocked for blocked in target.blocked if blocked.step == step), None)
    if blocked is not None:
        raise blocked.error
    chosen = tuple(found for found in target.checkpoints if found.step == step)
    bare = next((folder for folder in target.bare if step_of(folder) == step), None)
    if bare is not None and not chosen:
        archive = archive_of(bare)
        if archive is not None:
            raise NotFound(f"this step is {where_it_is(archive)}", path=archive, expected=f"a folder {bare.name}", hint=way_to(archive))
        raise NotFound("no weights were recognised in this step folder", path=bare)
    if len(chosen) > 1:
        raise ambiguous(target, step, chosen)
    if not chosen:
        raise no_step(target, step)
    return replace(target, checkpoints=chosen)


def no_step(target: Target, step: int) -> NotFound:
    """The error for a step that the run does not have."""
    there = ", ".join(dict.fromkeys(str(found.step) for found in target.checkpoints if found.step is not None))
    made = next((folder for folder in target.made if step_of(folder) == step), None)
    return NotFound(
        f"there is no step {step}",
        path=target.path,
        expected=f"one of the steps {there}" if there else None,
        hint=f"{made.name} is an output of ckpt, not a save of the training: if you mean it, pass {made}"
        if made
        else _sibling(target, step),
    )


def _sibling(target: Target, step: int) -> str | None:
    """What helps whoever passed one step and asks for another one beside it."""
    with contextlib.suppress(CkptError, OSError):
        beside = entries_in(target.path.parent) if step_of(target.path) is not None else ()
        return next((f"pass {each}, which is beside it" for each in beside if step_of(each) == step), None)
    return None


def release_of(run: Path, there: Folders) -> Path | None:
    """The folder of a model that Megatron converted, before any step: it loads that one if its tracker says so."""
    folder = run / RELEASE
    told = any(tracker.said == RELEASE for tracker in trackers_in((run,), there)[0])
    return folder if told and there.is_folder(folder) else None


# -- the step that is taken for the newest ------------------------------------------------------------------------


def newest_notes(target: Target, taken: Found, is_whole: Callable[[Found], bool]) -> list[Note]:
    """What is said of a step of a run that nobody asked for by number; ``is_whole`` says whether another one can be read."""
    return [
        *folder_notes(target),
        *counter_notes(target, taken),
        *mixed_notes(target, taken),
        *partial_notes(target, taken),
        *uncounted_notes(target, taken),
        *older_notes(target, taken),
        *tracker_notes(target, taken, is_whole),
        *(Note("warning", "unread", f"{text}: step {taken.step} is the newest by its name") for text in target.unread_trackers),
    ]


def folder_notes(target: Target) -> list[Note]:
    """Where the steps lie, if in several folders."""
    if not target.folders:
        return []
    where = []
    for folder in target.folders:
        steps = [str(found.step) for found in target.checkpoints if found.path.parent == folder]
        where.append(f"{few(steps, 5)} in {target.label(folder)}")
    return [Note("info", "step-folders", f"the steps lie in several folders, and count as those of one run: {'; '.join(where)}")]


def partial_notes(target: Target, taken: Found) -> list[Note]:
    """A warning about a newer step that was still being saved."""
    age = target.age
    newer = [folder for folder in target.partial if age(folder) > age(taken)]
    text = "is skipped: its name says that the save did not finish"
    return [Note("warning", "step-skipped", f"{target.label(folder)} {text}") for folder in newer]


def older_notes(target: Target, taken: Found) -> list[Note]:
    """A warning if a lower step was written more than an hour after the one that is taken for the newest.

    Training that is started again in its old folder overwrites the low steps first, and the high ones of the run before stay until it gets
    there. Times of files tell: `rsync -a`, `cp -a` and moving keep them, and after a plain copy they are those of the copying, in any
    order but minutes apart. (A plain copy that takes hours and begins with a high step gives a false alarm, which is why this is no error.)
    The time is that of one weights file per step: folders change when something is written beside the weights.
    """
    written = written_at(taken)
    if written is None:
        return []
    age = target.age
    lower = [found for found in target.checkpoints if age(found) < age(taken)]
    times = [(time, found) for found in _some_of(lower) if (time := written_at(found)) is not None and time - written > SECONDS]
    if not times:
        return []
    latest, other = max(times, key=lambda pair: pair[0])
    names = f"{target.label(taken.path)} was taken, and {target.label(other.path)} was written {span_text(latest - written)} later"
    text = f"{names}: if training was started again in this folder, the former is of the training before"
    return [Note("warning", "older-steps", text)]


def _some_of(steps: Sequence[Found]) -> Sequence[Found]:
    """At most `MAX_LOOKED` of the steps, the lowest among them: a training that began anew wrote that one first."""
    if len(steps) <= MAX_LOOKED:
        return steps
    half = MAX_LOOKED // 2
    far = steps[:-half]
    return [*(far[place * (len(far) - 1) // (half - 1)] for place in range(half)), *steps[-half:]]


def written_at(found: Found) -> float | None:
    """When the first weights file of a step was written; None where that cannot be told."""
    files = found.places[0].match.files
    try:
        status = status_of(files[0]) if files else None
    except Unreadable:
        return None  # only asked for a warning
    return None if status is None else status.st_mtime


def tracker_notes(target: Target, taken: Found, is_whole: Callable[[Found], bool]) -> list[Note]:
    """What is said where a tracker file names another step than the one that was taken for the newest.

    A lower one that is whole may be where training went back to. A higher one that is not there was saved, and lost since.
    """
    notes, age = [], target.age
    for tracker in target.trackers:
        if _is_taken(tracker, target, taken):
            continue
        named = [found for found in target.checkpoints if found.step == tracker.step]
        if tracker.said and target.run is not None and is_folder(target.run / tracker.said):
            which = "which Megatron would load" if tracker.said == RELEASE else "which is a save too"
            text = f"{tracker}, {which}, but step {taken.step} was taken: to take the former, give {tracker.said}/ itself"
            notes.append(Note("warning", "tracker", text))
        elif tracker.step > (taken.step or 0) and not named and all(step_of(folder) != tracker.step for folder in target.bare):
            text = f"{tracker}, and that step is not there: the newest whole one is {taken.step}; did a copy end early?"
            notes.append(Note("warning", "tracker", text))
        elif any(age(found) < age(taken) and is_whole(found) for found in named):
            text = f"{tracker}, which is whole, but the newer step {taken.step} was taken: did training go back to {tracker.step}?"
            notes.append(Note("warning", "tracker", text))
        else:
            notes += told_by_trackers(target, taken, tracker.step)
    return notes


def _is_taken(tracker: Tracker, target: Target, taken: Found) -> bool:
    if tracker.said in ("", RELEASE):
        return tracker.step == taken.step
    return target.run is not None and taken.places[0].match.root.is_relative_to(target.run / tracker.said)


def told_by_trackers(target: Target, taken: Found, only: int | None = None) -> list[Note]:
    """That trackers name another step than one that was asked for."""
    others = [tracker for tracker in target.trackers if tracker.step != taken.step and only in (None, tracker.step)]
    return [Note("info", "tracker", f"{tracker}, but step {taken.step} was chosen") for tracker in others]
