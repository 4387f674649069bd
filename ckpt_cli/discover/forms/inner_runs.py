"""Runs below a folder: beside the weights of a model, or inside of another run.

The latter is a run that was copied into its own copy (``cp -r run run``, ``rsync`` without the slash at the end), or a training that
went on in a folder of the run; saves without weights are neither. Its steps are none of the run around it, so that the newest step may
be one that was not looked at.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from ckpt_cli.discover.around.given_otherwise import is_given_otherwise
from ckpt_cli.discover.beside.folders import LOGS, kind_of
from ckpt_cli.discover.beside.models import comparison_of
from ckpt_cli.discover.beside.outputs import is_output
from ckpt_cli.discover.components import expanded
from ckpt_cli.discover.forms.states_inside import holds_no_weights
from ckpt_cli.discover.found import Blocked, Found, Target, ages
from ckpt_cli.discover.steps import SECONDS, steps_of_run, written_at
from ckpt_cli.errors import CkptError, Unreadable
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.registry import describe
from ckpt_cli.formats.step_names import counter_of, is_like_step, step_of
from ckpt_cli.formats.trainers import ROLES, RUNS
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

CODE = "run-below"

MOST_FOLDERS = 64
"""Folders that are looked into for runs: each is a listing."""

Step = Found | Blocked
"""A step of such a run; what cannot be looked at is one too."""


def runs_below(top: Path, taken: Collection[Path], there: Folders, *, files: bool = False) -> Iterator[tuple[Path, tuple[Step, ...]]]:
    """The nearest folders that hold steps of their own, a level or two below one that is no step, each with its steps, oldest first.

    Folders around what is ``taken`` are none, nor are those that count as the folder itself (`RUNS`); ``files``: files may be steps too.
    """
    if step_of(top) is not None:
        return
    level, left = [top], MOST_FOLDERS
    for _ in range(2):
        inner: list[Path] = []
        for folder in (child for parent in level for child in there.folders(parent, lambda name: not name.startswith("."))):
            is_own = folder.parent == top and folder.name in RUNS
            if not left or is_own or step_of(folder) is not None or any(path.is_relative_to(folder) for path in taken):
                continue
            left -= 1
            # What cannot be looked at is no reason to say nothing of the others.
            with contextlib.suppress(Unreadable):
                listed = steps_of_run(folder, there, files=files)
                steps: list[Step] = [step for step in listed.found if not is_output(step.places[0])]
                steps += listed.blocked
                if steps:
                    yield folder, tuple(sorted(steps, key=ages(steps)))
                else:
                    inner.append(folder)
        level = inner


def inner_run_notes(target: Target, taken: Found, files: Files) -> list[Note]:
    """What is said of runs inside of the run that ``taken`` is the newest step of.

    A warning for one that goes further, or may; for one with the same newest step only if that has other weights. Else a remark, as for
    folders whose names say that they hold an older copy, an average or another model.
    """
    there = Folders()
    own = _folders_of(target)
    inner: dict[Path, tuple[Step, ...]] = {}
    is_file = there.is_file(taken.path)
    # No weights are read from there, so that what cannot be looked at does not matter.
    with contextlib.suppress(Unreadable):
        for top in dict.fromkeys(filter(None, (target.path, target.run, *target.folders))):
            found = runs_below(top, own, there, files=is_file) if there.is_folder(top) else ()
            inner |= {folder: steps for folder, steps in found if not _is_told_otherwise(folder, top, own)}
    inner = {folder: steps for folder, steps in inner.items() if not is_given_otherwise(folder, taken.path, files)}
    notes = [(folder, _note(folder, steps, target, taken, files)) for folder, steps in inner.items()]
    later = [(folder, text) for folder, (level, text) in notes if level == "warning"]
    others = [text for _, (level, text) in notes if level == "info"]
    told = [Note("info", CODE, "; ".join(others))] if others else []
    if later:
        one = "that" if len(later) == 1 else "one of them"
        text = f"{'; '.join(text for _, text in later[:3])}: if a copy of the run landed in it, or training went on there, {one} is meant"
        told.append(Note("warning", CODE, f"{text}, and is read by passing {few([str(folder) for folder, _ in later], 3)}"))
    return told


def _folders_of(target: Target) -> set[Path]:
    """Where everything that belongs to the run lies: its steps, also the parts of these in the folders of other nodes."""
    steps = [step for found in target.checkpoints for step in (found, *found.more)]
    places = [place for step in steps for place in step.places]
    own = {step.path for step in steps}
    own |= {path for other in target.also for path in (other.path, *(found.path for found in other.checkpoints))}
    return own | {folder for place in places for folder in (place.match.root, *place.match.more_roots, *place.more_homes)}


def _is_told_otherwise(folder: Path, top: Path, own: Collection[Path]) -> bool:
    """Whether a folder is named as one beside the steps, holds logs, or is a link to what the run itself holds, or lies in."""
    if folder.parent == top and is_like_step(folder.name):
        return True
    names = folder.relative_to(top).parts
    if any(LOGS.fullmatch(name) and not name.lower().startswith("run") for name in names):
        return True
    real = os.path.realpath(folder)
    return any(Path(os.path.realpath(path)).is_relative_to(real) for path in own)


def _note(folder: Path, steps: Sequence[Step], target: Target, taken: Found, files: Files) -> tuple[Literal["warning", "info"], str]:
    """How much is to be said of a run, and what."""
    newest = steps[-1]
    shown, label = f"{folder.relative_to(target.path).as_posix()}/", target.label(taken.path)
    name = newest.path.relative_to(folder).as_posix()
    held = f"{shown} inside of this run holds a run of its own, which was not read, up to {name}"
    if any(kind_of(part) in ("copy", "average") or part in ROLES for part in folder.relative_to(target.path).parts):
        return "info", f"{held}, by its name those of another model or an older copy"
    if not isinstance(newest, Blocked) and holds_no_weights(newest, files):
        return "info", f"{shown} inside of this run holds steps of its own, up to {name}, that hold no weights"
    if counter_of(newest.path) != counter_of(taken.path):
        return "warning", f"{held}, and numbers do not tell whether {label} is newer"
    age = ages([*target.checkpoints, *steps])
    if age(newest) > age(taken):
        return "warning", f"{held}, newer by its number than {label}"
    if isinstance(newest, Blocked):
        return "info", f"{held}, which cannot be looked at: {newest.error.message}"
    if age(newest) == age(taken):
        said = _difference(newest, taken, files)
        return ("info", f"{held}, with the same weights as here") if said is None else ("warning", f"{held}; {said}")
    times = written_at(newest), written_at(taken)
    if times[0] is not None and times[1] is not None and times[0] - times[1] > SECONDS:
        return "warning", f"{held}, written later than {label}"
    return "info", f"{held}, older by its number than {label}"


def _difference(inner: Found, taken: Found, files: Files) -> str | None:
    """How the weights of a step differ from those of the one of the same number that was taken; None if they are the same."""
    mine, others = expanded(taken, files).places[0], expanded(inner, files).places[0]
    try:
        held = describe(mine.match, files, ReadOptions()).tensors
        tensors = describe(others.match, files, ReadOptions()).tensors
    except CkptError as error:
        return f"that was not compared: {error.message}"
    if any(piece.source.forward_only for side in (held, tensors) for tensor in side.values() for piece in tensor.pieces):
        return "that is in compressed files, so that values were not compared"
    comparison = comparison_of(f"{inner.path.name}/ there", held, tensors, {}, every=True)
    return comparison.text if comparison.differs else None
