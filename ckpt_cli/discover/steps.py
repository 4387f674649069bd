"""The steps of a run, by the names of their folders. Tracker files are hints; the files decide."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from ckpt_cli.discover.found import Blocked, Found, Target
from ckpt_cli.discover.places import places_in
from ckpt_cli.errors import CorruptFile, NotFound, Unreadable, UsageError
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import read_small
from ckpt_cli.formats.step_names import step_of

RUN_FOLDERS = ("checkpoint", "checkpoints", "ckpt")
"""Where some trainers keep the steps inside of their output folder."""


def step_folders(run: Path, there: Folders) -> list[Path]:
    """Entries named like a step of a run: folders, and entries that cannot be accessed."""
    folders = []
    for path in there.entries(run):
        if step_of(path) is not None:
            with contextlib.suppress(Unreadable):
                if not there.is_folder(path):
                    continue
            folders.append(path)
    return folders


def steps_in(folder: Path, there: Folders, only: int | None = None) -> tuple[tuple[Found, ...], tuple[Blocked, ...]]:
    """The checkpoints in the step folders of a run, by step number; and the step folders that cannot be looked at.

    ``only``: nothing is looked at but this step.
    """
    found: list[Found] = []
    blocked: list[Blocked] = []
    for path in step_folders(folder, there):
        step = step_of(path) or 0
        if only is not None and step != only:
            continue
        try:
            places = places_in(path, there)
        except Unreadable as error:
            blocked.append(Blocked(path, step, error))
            continue
        if places:
            found.append(Found(path, step, places))
    return tuple(sorted(found, key=lambda checkpoint: (checkpoint.step or 0, checkpoint.path.name))), tuple(blocked)


def steps_beneath(given: Path, there: Folders) -> tuple[tuple[Found, ...], tuple[Blocked, ...]]:
    """The steps in a folder, or in the one inside of it where some trainers keep them."""
    if not there.is_folder(given):
        return (), ()
    return next((found for name in ("", *RUN_FOLDERS) if any(found := steps_in(given / name, there))), ((), ()))


def with_step(target: Target, step: int | None) -> Target:
    if step is None:
        return target
    blocked = next((blocked for blocked in target.blocked if blocked.step == step), None)
    if blocked is not None:
        raise blocked.error
    chosen = tuple(found for found in target.checkpoints if found.step == step)
    bare = next((folder for folder in target.bare if step_of(folder) == step), None)
    if bare is not None and not chosen:
        raise NotFound("no weights were recognised in this step folder", path=bare)
    if len(chosen) > 1:
        names = ", ".join(found.path.name for found in chosen)
        raise UsageError(f"step {step} is there more than once: {names}", path=target.path, hint="pass the folder itself")
    if not chosen:
        there = ", ".join(str(found.step) for found in target.checkpoints if found.step is not None)
        raise NotFound(f"there is no step {step}", path=target.path, expected=f"one of the steps {there}" if there else None)
    return replace(target, checkpoints=chosen)


def tracker_hints(run: Path, there: Folders) -> tuple[str, ...]:
    """What tracker files say the last step is; never trusted, only shown when the files disagree."""
    hints = []
    for name in ("latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt", "latest_global_step.txt"):
        if not there.is_file(run / name):
            continue
        try:
            text = read_small(run / name, 1 << 10).decode("ascii", "replace").strip()
        except (NotFound, CorruptFile):
            continue  # one that is too long says nothing
        if text.isascii() and text.isdigit():
            hints.append(f"{name} says {int(text)}")
    return tuple(hints)
