"""One checkpoint that lies in two folders, as one: its files may be on several nodes, each of which wrote some of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_cli.discover.found import Found, Place, Target, same_step
from ckpt_cli.discover.places import MAIN
from ckpt_cli.discover.state_files import find_state_files
from ckpt_cli.errors import CkptError, DifferentTensors, Inconsistent, MixedWorldSizes, Overlap, PartOfSet
from ckpt_cli.files.folders import is_folder
from ckpt_cli.formats.registry import format_of, joined

CONTRADICTIONS = (Inconsistent, MixedWorldSizes, Overlap, DifferentTensors, PartOfSet)
"""Errors of files that do not fit together."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A checkpoint with what another folder holds of it: whether that ``adds`` anything, and the ``trouble`` if the two contradict."""

    found: Found
    adds: bool = False
    trouble: CkptError | None = None


def joined_checkpoint(checkpoint: Found, twin: Found, *, components: bool = True) -> Joined:
    """``components``: those that the checkpoint lacks are taken from the other folder."""
    places: list[Place] = []
    known: list[tuple[Place, Place]] = []
    adds, trouble = False, None
    for place in checkpoint.places:
        same = _twin_place(checkpoint, place, twin)
        if same is None:
            places.append(place)
            continue
        known.append((place, same))
        match = place.match
        if format_of(match).is_sharded or format_of(same.match).is_sharded:
            match = joined(match, same.match)
            if isinstance(match.trouble, CONTRADICTIONS) and match.trouble not in (place.match.trouble, same.match.trouble):
                trouble = trouble or match.trouble
            adds = adds or format_of(match).adds(place.match, same.match)
        places.append(replace(place, match=match, more_homes=(*place.more_homes, same.home, twin.path)))
    alone = [place for place in twin.places if components and all(place is not same for _, same in known)]
    places += alone
    adds = adds or bool(alone) or any(not _states_in(same.home) <= _states_in(place.home) for place, same in known)
    if trouble is not None:
        places = [with_trouble(place, trouble) for place in places]
    found = replace(
        checkpoint,
        places=tuple(places),
        step=twin.step if checkpoint.step is None else checkpoint.step,
        more=(*checkpoint.more, twin) if known or alone else checkpoint.more,
    )
    return Joined(found, adds and trouble is None, trouble)


def _states_in(home: Path) -> set[str]:
    """The names of the files with training state of ranks in the folder of a component."""
    try:
        return {file.path.name for file in find_state_files([home]) if file.rank is not None} if is_folder(home) else set()
    except CkptError:
        return set()  # whoever reads them is told


def twin_of(first: Target, checkpoint: Found, second: Target) -> Found | None:
    """The same checkpoint in another folder."""
    unsaid = first.run is None and second.run is None
    return next(
        (other for other in second.checkpoints if same_step(checkpoint, other) or (unsaid and None in (checkpoint.step, other.step))), None
    )


def _twin_place(checkpoint: Found, place: Place, twin: Found) -> Place | None:
    """The same component in another folder, which may hold the main one's files without saying its role."""
    same = twin.place(place.name)
    main = twin.places[0]
    unsaid = "model" in (place.name, main.name) and {place.name, main.name} <= set(MAIN)
    if same is None and place is checkpoint.places[0] and unsaid:
        same = main if main.match.component == place.match.component and checkpoint.place(main.name) is None else None
    return same


def with_trouble(place: Place, trouble: CkptError) -> Place:
    return replace(place, match=replace(place.match, trouble=trouble))
