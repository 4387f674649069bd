"""An optimizer that was given in place of a model, and where the weights are that belong to it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.discover.places import places_in
from ckpt_cli.errors import CkptError, IsOptimizer
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.training_state_names import is_optimizer_name
from ckpt_cli.names import printable
from ckpt_cli.urls import shown


def optimizer_error(path: Path, there: Folders) -> IsOptimizer | None:
    """The error for a path that is an optimizer by its name, or by those of all files in it, None for any other."""
    names = [path.name, *(entry.name for entry in (there.entries(path) if there.is_folder(path) else ()))]
    if not (is_optimizer_name(names[0]) or (names[1:] and all(map(is_optimizer_name, names[1:])))):
        return None
    return IsOptimizer("by its name, this is an optimizer and not a model", path=path, hint=weights_hint(path, there))


def weights_hint(optimizer: Path, there: Folders) -> str | None:
    """What to do with an optimizer: the command for the weights beside or above it, and that for its state; None without weights."""
    for folder in list(optimizer.parents)[:2]:
        with contextlib.suppress(CkptError, OSError):
            places = [place for place in places_in(folder, there) if place.match.trouble is None and place.match.root != optimizer]
            if places:
                match = places[0].match
                named = match.root if match.root != folder else match.files[0]
                beside = "beside it" if folder == optimizer.parent else f"in {printable(folder.name)}"
                place = shell.path(shown(str(folder)))
                return (
                    f"the weights are {printable(named.name)} {beside}: ckpt merge {place}; "
                    f"the state of the optimizer is for ckpt extract-state {place} --optimizer"
                )
    return None
