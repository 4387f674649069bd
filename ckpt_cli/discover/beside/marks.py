"""Marks with which trainers say that a save is being written, or that it was finished: evidence, beside what the files themselves prove."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_cli.discover.found import Found, Place
from ckpt_cli.errors import MissingShard
from ckpt_cli.files.folders import is_there
from ckpt_cli.formats.registry import format_of
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.formats.trainers import PARTIAL, TRAINERS, UNFINISHED, UNFINISHED_BESIDE, has_form, place_below
from ckpt_cli.paths import absolute
from ckpt_cli.tensors.component import Note
from ckpt_cli.urls import address_of

ABOVE = 4
"""Levels above the folder of the weights at which a step may lie: trainers have up to three."""


def check_marks(found: Found, place: Place) -> None:
    """Raise MissingShard if a mark says that the save did not finish, and the files alone do not prove that they are all there."""
    said = _said(found, place)
    if said is not None and not format_of(place.match).proves_whole:
        raise MissingShard(
            f"{said}, and these files do not show whether all of them are there",
            path=found.path,
            hint="save it again",
        )


def mark_notes(found: Found, place: Place) -> list[Note]:
    """A warning if a mark says that the save did not finish, although the weights may be whole."""
    said = _said(found, place)
    return [] if said is None else [Note("warning", "unfinished", f"{said}: parts of the checkpoint may be missing")]


def _said(found: Found, place: Place) -> str | None:
    """What a mark says of the folders that the path shows, or of those in which the files really lie: links may show others."""
    told = _in(found.path, place.home, place.match.root)
    for root in dict.fromkeys((Path(os.path.realpath(place.match.root)), Path(os.path.realpath(place.match.first)).parent)):
        near = (root, *root.parents[:ABOVE])
        step = next((folder for folder in near if step_of(folder) is not None or has_form(folder.name, PARTIAL)), None)
        if told is None and step is not None:
            told = _in(step, step / place_below(root, step)[0], root)
    return told


def _in(step: Path, home: Path, root: Path) -> str | None:
    """What a mark says of a step, where ``root`` has the weights of the component in ``home``."""
    if has_form(step.name, PARTIAL):
        return f"the name of {step.name} says that the save did not finish"
    whole = Path(absolute(step))  # the path may be "."
    address = address_of(step)
    is_top = address is not None and not address.key  # of a store, beside which nothing is
    beside = [] if is_top else [whole.with_name(f"{whole.name}{UNFINISHED_BESIDE}")]
    mark = next((mark.name for mark in (*(step / name for name in UNFINISHED), *beside) if is_there(mark)), None)
    if mark is not None:
        return f"{mark} says that {step.name} was not saved to its end"
    below = place_below(root, home)[1]
    last = next((row.finished for row in TRAINERS if row.finished and has_form(below, row.weights)), None)
    if last is not None and not is_there(home / last):
        return f"{last}, which is written last, is not in {home.name}/: the save may not have finished"
    return None
