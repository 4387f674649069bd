"""Training state in steps that no weights are read from: in those of a model that is no step itself, and in folders beside a step.

The Trainer saves the final model into the folder of the run (`save_model`, `push_to_hub`), with `training_args.bin` and no other state.
What a training needs to go on lies in `checkpoint-N/`, or in `last-checkpoint/` of a repository that it pushed to.
torchtitan with torchft saves the dataloader of each replica alone, as a step without weights: `ft-replicat-R/step-N/` beside `step-N/`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.discover.components import expanded
from ckpt_cli.discover.found import Found, Target
from ckpt_cli.discover.optimizers.files import find_optimizer_files
from ckpt_cli.discover.places import places_in
from ckpt_cli.discover.state_files import find_state_files
from ckpt_cli.errors import CkptError, IsOptimizer, Unreadable
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import NoWeights, ReadOptions
from ckpt_cli.formats.registry import describe, format_of
from ckpt_cli.formats.step_names import is_like_step, step_of
from ckpt_cli.names import few, plural, printable
from ckpt_cli.tensors.component import Note

MOST_FOLDERS = 64
"""Folders beside a step that are looked into."""


def steps_with_state(found: Found) -> list[Path]:
    """Folders of steps, or of the last save, with training state in that of a checkpoint that is no step: the last one first."""
    there = Folders()
    if found.step is not None or not there.is_folder(found.path):
        return []
    read = [path for place in found.places for path in place.match.files]
    try:
        folders = [folder for folder in there.folders(found.path, is_like_step) if not any(path.is_relative_to(folder) for path in read)]
        held = [folder for folder in folders if not there.is_file(folder / MANIFEST) and _holds_state(folder)]
    except Unreadable:
        return []  # only asked for a warning
    return sorted(held, key=lambda folder: (step_of(folder) is None, step_of(folder) or 0), reverse=True)


def steps_inside_notes(target: Target) -> list[Note]:
    """A warning of step folders in a folder that has weights of its own, which are read."""
    if not target.steps_inside:
        return []
    text = f"the folder has weights of its own and {plural(target.steps_inside, 'step folder')}: --step N picks one"
    return [Note("warning", "steps-inside", text)]


def state_inside_notes(found: Found) -> list[Note]:
    """A warning of state in step folders, where that of the folder around them is read."""
    steps = steps_with_state(found)
    if not steps:
        return []
    names, one = few([f"{step.name}/" for step in steps], 3), len(steps) == 1
    text = f"{names} in {found.path} {'holds' if one else 'hold'} training state of {'its' if one else 'their'} own, which was not read"
    return [Note("warning", "state-inside", f"{text}: pass {shell.path(steps[0])} for {'it' if one else 'the last'}")]


def holds_no_weights(step: Found, files: Files) -> bool:
    """Whether a step was saved whole and without weights: then it is no save of a model."""
    try:
        describe(expanded(step, files).places[0].match, files, ReadOptions())
    except (NoWeights, IsOptimizer):
        return True
    except CkptError:
        pass  # whatever else is wrong with it
    return False


def states_beside_notes(found: Found, files: Files) -> list[Note]:
    """A warning of folders beside a step, in which a step of its name holds state and no weights."""
    there, parent = Folders(), found.path.parent
    if found.step is None or not there.is_folder(found.path):
        return []
    try:
        folders = there.folders(parent, lambda name: not name.startswith(".") and step_of(parent / name) is None)[:MOST_FOLDERS]
        steps = [folder / found.path.name for folder in folders if there.is_folder(folder / found.path.name)]
        listed = [Found(step, found.step, places) for step in steps if (places := places_in(step, there))]
    except Unreadable:
        return []  # only asked for a warning
    alone = [step for step in listed if holds_no_weights(step, files)]
    if not alone:
        return []
    names, one = few([f"{step.path.relative_to(parent).as_posix()}/" for step in alone], 3), len(alone) == 1
    text = f"{names} beside {found.path.name} {'holds' if one else 'hold'} no weights, but state of this step, which was not read"
    kept = dict.fromkeys(name for step in alone for name in _state_in(step, files))
    told = f"{text} ({few(list(kept), 3)})" if kept else text
    way = f"ckpt extract-state {shell.path(alone[0].path)} reads {'it' if one else 'the first'}"
    return [Note("warning", "state-beside", f"{told}: {way}")]


def _state_in(step: Found, files: Files) -> list[str]:
    """What the state of a step is called."""
    match = step.places[0].match
    with contextlib.suppress(CkptError):
        return [printable(name.partition(".")[0]) for name in format_of(match).training_state(match, files)[0]]
    return []


def _holds_state(folder: Path) -> bool:
    try:
        kept = [file for file in find_state_files([folder]) if file.kind != "copied"]
        return bool(kept or find_optimizer_files([folder]))
    except Unreadable:
        raise
    except CkptError:
        return True  # state that is not whole
