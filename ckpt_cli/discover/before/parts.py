"""Folders with weights that the step before, or the one after, has and a step lost: an encoder, a tower, the other half of a pair."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from ckpt_cli.discover.before.steps import steps_around
from ckpt_cli.discover.beside.folders import files_with_weights, held_below, is_of_trainer, is_searched, kind_of
from ckpt_cli.discover.components import NUMBER
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders
from ckpt_cli.hub.assets import HUB_FOLDER
from ckpt_cli.hub.loaded_with.read_by_processor import folders_read
from ckpt_cli.hub.peft_names import ADAPTER_CONFIG
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

PARTS = frozenset({"model", "companion", "adapter"})
"""What a folder that belongs to a model may be by its name, as `kind_of` says; copies, averages and roles have rules of their own."""


def lost_part_notes(found: Found) -> list[Note]:
    """A warning about parts that another step of the run has, unless a part was passed itself. Folders of the main weights are no parts."""
    if found.given not in (None, found.path):
        return []
    there = Folders()
    with contextlib.suppress(CkptError):  # another step is only looked at for a warning
        own = {path.name for home in (found, *found.more) for path in _parts_in(home.path, there)}
        for step in steps_around(found):
            if lost := _without_counterpart([path.name for path in _parts_in(step, there)], own):
                text = f"{found.path.name} has no weights in {few([f'{name}/' for name in lost])}, which {step.name} has there"
                return [Note("warning", "fewer-components", f"{text}: what was saved with the model may be lost")]
    return []


def part_of_step(found: Found, place: Place) -> str | None:
    """The folder of a checkpoint that a component is read from, if that is a part of something by its name, and none of a trainer's."""
    root = place.match.root
    name = root.relative_to(found.path).parts[0] if root != found.path and root.is_relative_to(found.path) else None
    return f"{name}/" if name is not None and _may_be_part(name) else None


def _without_counterpart(names: Sequence[str], own: Collection[str]) -> list[str]:
    """The names that are not among a step's ``own``; one with another number, as of another step, stands for one that is not there."""
    others = Counter(unnumbered_name(name) for name in own if name not in names)
    lost = []
    for name in (name for name in names if name not in own):
        others[unnumbered_name(name)] -= 1
        lost += [name] if others[unnumbered_name(name)] < 0 else []
    return lost


def _may_be_part(name: str) -> bool:
    return kind_of(name) in PARTS and name != HUB_FOLDER and not is_of_trainer(name)


def unnumbered_name(name: str) -> str:
    """A name without the numbers in it, in which those of two steps differ."""
    return NUMBER.sub("N", name)


def _parts_in(step: Path, there: Folders) -> list[Path]:
    """The folders of a step that hold weights, in themselves or below."""
    held = [path for path in there.folders(step, is_searched) if _may_be_part(path.name) and _holds_weights(path, there)]
    of_processors = folders_read(step) if held else ()  # an n-gram model is called like weights
    return [path for path in held if path.name not in of_processors]


def _holds_weights(folder: Path, there: Folders) -> bool:
    return bool(files_with_weights(folder, there) or there.is_file(folder / ADAPTER_CONFIG) or held_below(folder, there))
