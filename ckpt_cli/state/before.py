"""What a step lacks of a training state, by names: what the step before has, and objects that are counted without a gap.

State that a copy left out seldom leaves a gap in the step, so that only the step before tells of it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Sequence
from pathlib import Path

from ckpt_cli.discover.before.steps import step_before
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.discover.optimizers.files import find_optimizer_files, optimizer_folders, other_optimizers
from ckpt_cli.discover.state_files import StateFile, find_state_files
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import entries_in, folders_in, is_folder
from ckpt_cli.formats.trainers import STATES
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

NUMBER = re.compile(r"[0-9]+", re.ASCII)
REGISTERED = ("custom_checkpoint_K.pkl",)
"""What accelerate's ``register_for_checkpointing`` was given, numbered in every save: `Accelerator.save_state`."""

COUNTED = (*REGISTERED, "scheduler_K.bin", "scheduler_K.pt")
"""Kinds of which every object is saved; of dataloaders only those are that shuffle with a seed, or have a state."""

MOST_OBJECTS = 64
"""Numbers above are no objects of one kind but steps."""

RANK = re.compile(r"(?<=rank)(_?)[0-9]+", re.ASCII)


def notes_of_before(found: Found, place: Place, homes: Sequence[Path], *, optimizer: bool) -> list[Note]:
    """Warnings about what the step before, of a name like this one's, has of a component's state, and about gaps in this step's.

    ``homes`` are the folders of the step that state may lie in. ``optimizer``: whether an optimizer counts.
    """
    try:
        there = _kept(homes, place.match.number, optimizer)
        gaps = _gaps(homes, place.match.number, optimizer)
    except CkptError:
        return []  # what is wrong with this one is said where it is read
    lacking: list[str] = []
    notes: list[Note] = []
    with contextlib.suppress(CkptError):  # another step is only looked at for a warning
        before = step_before(found)
        if before is not None:
            inside = place.home.relative_to(found.path) if place.home.is_relative_to(found.path) else Path()
            kept = _kept([before / inside, before], place.match.number, optimizer)
            lacking = list(dict.fromkeys(label for key, label in kept.items() if key not in there))
            if lacking:
                notes.append(Note("warning", "fewer-states", f"{found.path.name} lacks {few(lacking, 5)}, which {before.name} has"))
    if absent := [name for name in gaps if not any(each.startswith(name) for each in lacking)]:
        told = f"{found.path.name} lacks {few(absent, 5)}: objects are counted from 0, and later ones are there"
        notes.append(Note("warning", "fewer-states", told))
    return notes


def _kept(homes: Sequence[Path], number: int, optimizer: bool) -> dict[str, str]:
    """What there is of a state: each kind with how it is called in messages. Ranks and world sizes may differ from step to step."""
    homes = list(filter(is_folder, dict.fromkeys(homes)))
    files = find_state_files(homes)
    objects = {file.path for family in _objects(files).values() for file in family.values()}
    kept = {_kind(file, objects): _label(file.path, file.family or file.path.name, homes) for file in files}
    for folder in (folder for home in homes for name in STATES if is_folder(folder := home / name) and entries_in(folder)):
        kept.setdefault(f"{folder.name}/", f"{folder.name}/")
    if not optimizer:
        return kept
    if folders := [folder for folder in optimizer_folders(homes, number) if entries_in(folder) or folders_in(folder)]:
        kept["optimizer"] = f"{folders[0].name}/"
    elif (found := find_optimizer_files(homes, number)) is not None:
        first = found.ranks[min(found.ranks)]
        kept["optimizer"] = _label(first, RANK.sub(r"\1R", first.name), homes)
    for other, names in other_optimizers(homes, number).items():
        if other <= MOST_OBJECTS:
            kept[f"optimizer {other}"] = RANK.sub(r"\1R", names[0])
    return kept


def _kind(file: StateFile, objects: Container[Path]) -> str:
    """What stands for a file in another step, which other ranks and another number of them may have saved."""
    if file.kind == "random":
        return file.kind
    if file.path in objects:
        return f"{file.of_objects} {file.number}"
    return NUMBER.sub("N", file.family or file.path.name)


def _objects(files: Sequence[StateFile]) -> dict[str, dict[int, StateFile]]:
    """Files of objects by their family and number, without those whose number is that of the step."""
    families: dict[str, dict[int, StateFile]] = {}
    for file in files:
        if file.of_objects is not None:
            families.setdefault(file.of_objects, {})[file.number] = file
    return {name: family for name, family in families.items() if name in REGISTERED or not _is_of_step(list(family.values()))}


def _is_of_step(files: Sequence[StateFile]) -> bool:
    """Whether a file has the number of its step, as ``step_500/scheduler_500.pt``: a single one, or one of more than objects are."""
    above = [number for folder in files[0].path.parts[-3:-1] for number in NUMBER.findall(folder)]
    alone = len(files) == 1 and files[0].number > 0 and str(files[0].number) in [number.lstrip("0") for number in above]
    return alone or max(file.number for file in files) > MOST_OBJECTS


def _gaps(homes: Sequence[Path], number: int, optimizer: bool) -> list[str]:
    """Names of files of objects that lie before others of their kind, in a kind of which every object is saved."""
    homes = list(filter(is_folder, dict.fromkeys(homes)))
    gaps: list[str] = []
    for name, family in _objects(find_state_files(homes)).items():
        if name in COUNTED and max(family) <= MOST_OBJECTS:
            first = name.replace("_K", "") if name not in REGISTERED else name
            gaps += [(name if at else first).replace("K", str(at)) for at in range(max(family)) if at not in family]
    others = [other for other in other_optimizers(homes, number) if other <= MOST_OBJECTS] if optimizer else []
    return gaps + [f"optimizer_{at}" for at in range(1, max(others, default=0)) if at not in (number, *others)]


def _label(file: Path, name: str, homes: Sequence[Path]) -> str:
    return name if file.parent in homes else f"{file.parent.name}/"
