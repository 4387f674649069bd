"""Weights in a folder below a step or role folder: in one that a trainer's row names, or in the only one that holds any.

Names of folders are many, and a list of them is never complete: whatever a folder is called, it is meant if nothing beside it could be
meant too. Folders of optimizers, of training state, of other models and of single ranks are none of these.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path

from ckpt_cli.discover.found import Found, Place
from ckpt_cli.errors import Unreadable, Unsupported
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.registry import format_of, recognise
from ckpt_cli.formats.sets.names import MARKS, RANK_FOLDER, WEAK
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.formats.trainers import OPTIMIZERS, ROLES, RUNS, STATES, WEIGHTS, form, has_form, place_below
from ckpt_cli.formats.training_state_names import is_state_key
from ckpt_cli.tensors.component import Note

DEPTH = 3
"""Levels of folders that are looked at: below a role folder, lerobot and NeMo RL have two."""

MAX_FOLDERS = 256
OTHERS = re.compile(
    r"\..*|(ref(erence)?|base|init(ial)?|original|teacher|vae|.*lora.*|.*adapter.*|.*encoder.*|.*tokenizer.*)([_-]?(model|policy))?|"
    r"(eval|logs?|samples?|wandb|tensorboard|runs?|best|latest|last)([_-].*)?",
    re.IGNORECASE,
)
"""Folders in which weights are those of another model, of an adapter, or of another step."""


def weights_beneath(folder: Path, there: Folders) -> list[Match]:
    """What is held by the folder below this one that is meant. Nothing if there are several, and no row of a trainer names one.

    Below a folder that is neither a step nor a role's, the names of rows mean nothing: there must be only one. Of several that rows name,
    all are given: which goes first, and that others are there, is said where places are chosen. A folder called like an average holds
    one, and is never taken for the model.
    """
    held = _held(folder, there)
    averages = [(name, matches) for name, matches in held if is_average_name(name.rpartition("/")[2])]
    models = [entry for entry in held if entry not in averages]
    is_known = step_of(folder) is not None or folder.name in ROLES
    named = [entry for entry in models if is_known and has_form(entry[0], WEIGHTS)]
    if len(models) > 1 and not named:
        return _refused(folder, there)  # an average beside models that are not told apart is none of what is meant
    chosen = [match for _, matches in (models if len(models) == 1 else named) for match in matches]
    chosen += [replace(match, component="ema") for _, matches in averages for match in matches if len(averages) == 1]
    return chosen or _refused(folder, there)


def _held(top: Path, there: Folders) -> list[tuple[str, list[Match]]]:
    """Folders with weights that can be read, by their path below the top; none where there are more folders than a checkpoint has.

    One that cannot be looked at may hold anything, so that nothing beside it is the only one: raises Unreadable.
    """
    held: list[tuple[str, list[Match]]] = []
    level, seen = [top], 0
    for _ in range(DEPTH):
        empty: list[Path] = []
        for child in (child for folder in level for child in there.folders(folder, _may_hold_weights)):
            seen += 1
            if seen > MAX_FOLDERS:
                return []
            matches = [match for match in recognise(child, there) if _is_read(match)]
            if matches:
                held.append((child.relative_to(top).as_posix(), matches))
            else:
                empty.append(child)
        level = empty
    return held


def _refused(folder: Path, there: Folders) -> list[Match]:
    """Weights in a folder that a row names, of a format that is not read."""
    for name in WEIGHTS:
        place = folder / name
        if form(name).groups == 0 and there.is_folder(place):
            found = [match for match in recognise(place, there) if isinstance(match.trouble, Unsupported)]
            if found:
                return found
    return []


def _is_read(match: Match) -> bool:
    adapter = match.files[0].name.startswith("adapter_model.")
    return not (adapter or format_of(match).is_refused or isinstance(match.trouble, Unsupported))


def _may_hold_weights(name: str) -> bool:
    if any(has_form(name, (first,)) for path in WEIGHTS for first in path.split("/")[:1]):
        return True
    state = is_state_key(name) or any(has_form(name, (path.split("/")[0],)) for path in (*OPTIMIZERS, *STATES))
    part = RANK_FOLDER.fullmatch(name) or any(mark.regex.search(name) for mark in (*MARKS, WEAK))
    other = OTHERS.fullmatch(name) is not None or name in (*ROLES, *RUNS) or step_of(Path(name)) is not None
    return not (state or part or other)


def between_notes(found: Found, place: Place) -> list[Note]:
    """Where weights were read from, if no row of a trainer says that they lie there."""
    root = place.match.root
    if root == place.home or not root.is_relative_to(place.home):
        return []
    below = place_below(root, place.home)[1]
    if has_form(below, WEIGHTS) or has_form(root.name, WEIGHTS):
        return []
    return [Note("info", "between", f"{place.name} was read from {below}/, the only folder with weights in {place.home.name}/")]


def step_above(path: Path, there: Folders) -> Path | None:
    """The step folder in which a path lies, a few levels up; None for what lies in none, and for step folders."""
    if step_of(path) is not None:
        return None
    with contextlib.suppress(Unreadable):
        if there.is_folder(path):
            return next((folder for folder in list(path.parents)[: DEPTH + 1] if step_of(folder) is not None), None)
    return None
