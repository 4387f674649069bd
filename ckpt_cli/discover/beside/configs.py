"""Several config.json for one component: which one was taken, and in what the others differ."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ckpt_cli.discover.found import Found, Place
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import is_file, same_file
from ckpt_cli.hub.assets import CONFIG, HUB_FOLDER, Assets
from ckpt_cli.hub.beside.model_config import no_model_config
from ckpt_cli.hub.config_text import read_config
from ckpt_cli.hub.settings import differences
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note


def config_notes(found: Found, place: Place, assets: Assets) -> list[Note]:
    """Warnings about other configs of a component than the one that was taken: beside it and in `HUB_FOLDER`, in the step, on other nodes.

    A second model of a step has a config of its own, so that the step's is the main one's.
    """
    taken = assets.files.get(CONFIG)
    main = place is found.places[0] or place.home == found.path
    nodes = (home for home in place.more_homes if main or home.name == place.home.name)
    homes = (place.home, *((found.path,) if main else ()), *nodes)
    if taken is None or taken.parent not in {folder for home in homes for folder in (home / HUB_FOLDER, home)}:
        return []
    notes = []
    for other in _others(homes, taken):
        try:
            differing = [entry.pair for entry in differences(assets.config, read_config(other))]
        except CkptError as error:
            differing = [error.message]
        if differing:
            text = f"config.json was taken from {_shown(taken, found)}; that of {_shown(other, found)} differs: {few(differing, 4)}"
            notes.append(Note("warning", "other-config", text))
    return notes


def _others(homes: tuple[Path, ...], taken: Path) -> Iterator[Path]:
    for path in dict.fromkeys(folder / CONFIG for home in homes for folder in (home / HUB_FOLDER, home)):
        if path != taken and is_file(path) and not same_file(path, taken) and no_model_config(path) is None:
            yield path


def _shown(path: Path, found: Found) -> str:
    return f"{os.path.relpath(path.parent, found.path.parent)}/"
