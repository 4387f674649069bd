"""Marks with which trainers say that a save is being written, or that it was finished: evidence, beside what the files themselves prove."""

from __future__ import annotations

from ckpt_cli.discover.found import Found, Place
from ckpt_cli.errors import MissingShard
from ckpt_cli.files.folders import is_there
from ckpt_cli.formats.registry import format_of
from ckpt_cli.formats.trainers import TRAINERS, UNFINISHED, has_form, place_below
from ckpt_cli.tensors.component import Note


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
    mark = next((name for name in UNFINISHED if is_there(found.path / name)), None)
    if mark is not None:
        return f"{mark} says that {found.path.name} was not saved to its end"
    below = place_below(place.match.root, place.home)[1]
    last = next((row.finished for row in TRAINERS if row.finished and has_form(below, row.weights)), None)
    if last is not None and not is_there(place.home / last):
        return f"{last}, which is written last, is not in {place.home.name}/: the save may not have finished"
    return None
