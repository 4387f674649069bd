"""Training state in the step folders of a model that is no step itself: what a training saved at its end, and beside it how it went on.

The Trainer saves the final model into the folder of the run (`save_model`, `push_to_hub`), with `training_args.bin` and no other state.
What a training needs to go on lies in `checkpoint-N/`, or in `last-checkpoint/` of a repository that it pushed to.
"""

from __future__ import annotations

from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.discover.found import Found, Target
from ckpt_cli.discover.optimizers.files import find_optimizer_files
from ckpt_cli.discover.state_files import find_state_files
from ckpt_cli.errors import CkptError, Unreadable
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.formats.step_names import is_like_step, step_of
from ckpt_cli.names import few, plural
from ckpt_cli.tensors.component import Note


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


def _holds_state(folder: Path) -> bool:
    try:
        kept = [file for file in find_state_files([folder]) if file.kind != "copied"]
        return bool(kept or find_optimizer_files([folder]))
    except Unreadable:
        raise
    except CkptError:
        return True  # state that is not whole
