"""What the step before has of a training state and a step lacks, by names: state that a copy left out leaves no gap in the step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ckpt_cli.discover.before.steps import step_before
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.discover.optimizers.files import find_optimizer_files, optimizer_folders
from ckpt_cli.discover.state_files import StateFile, find_state_files
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import entries_in, folders_in, is_folder
from ckpt_cli.formats.trainers import STATES
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

NUMBER = re.compile(r"[0-9]+", re.ASCII)
RANK = re.compile(r"(?<=rank)(_?)[0-9]+", re.ASCII)


def notes_of_before(found: Found, place: Place, homes: Sequence[Path], *, optimizer: bool) -> list[Note]:
    """A warning about what the step before, of a name like this one's, has of a component's state, and this step lacks.

    ``homes`` are the folders of the step that state may lie in. ``optimizer``: whether an optimizer counts.
    """
    try:
        before = step_before(found)
        if before is None:
            return []
        inside = place.home.relative_to(found.path) if place.home.is_relative_to(found.path) else Path()
        kept = _kept([before / inside, before], place.match.number, optimizer)
        there = _kept(homes, place.match.number, optimizer)
    except CkptError:
        return []  # another step is only looked at for a warning, and what is wrong with this one is said where it is read
    lacking = list(dict.fromkeys(label for key, label in kept.items() if key not in there))
    if not lacking:
        return []
    return [Note("warning", "fewer-states", f"{found.path.name} lacks {few(lacking, 5)}, which {before.name} has")]


def _kept(homes: Sequence[Path], number: int, optimizer: bool) -> dict[str, str]:
    """What there is of a state: each kind with how it is called in messages. Ranks and world sizes may differ from step to step."""
    homes = list(filter(is_folder, dict.fromkeys(homes)))
    kept = {_kind(file): _label(file.path, file.family or file.path.name, homes) for file in find_state_files(homes)}
    for folder in (folder for home in homes for name in STATES if is_folder(folder := home / name) and entries_in(folder)):
        kept.setdefault(f"{folder.name}/", f"{folder.name}/")
    if not optimizer:
        return kept
    if folders := [folder for folder in optimizer_folders(homes, number) if entries_in(folder) or folders_in(folder)]:
        kept["optimizer"] = f"{folders[0].name}/"
    elif (found := find_optimizer_files(homes, number)) is not None:
        first = found.ranks[min(found.ranks)]
        kept["optimizer"] = _label(first, RANK.sub(r"\1R", first.name), homes)
    return kept


def _kind(file: StateFile) -> str:
    return file.kind if file.kind == "random" else NUMBER.sub("N", file.family or file.path.name)


def _label(file: Path, name: str, homes: Sequence[Path]) -> str:
    return name if file.parent in homes else f"{file.parent.name}/"
