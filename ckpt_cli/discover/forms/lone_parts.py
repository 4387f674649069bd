"""A file that is called like the part of one rank, with nothing beside it that its content could be compared with."""

from __future__ import annotations

from ckpt_cli.discover.found import Place
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.registry import format_of
from ckpt_cli.formats.sets.neighbours import lone_part
from ckpt_cli.hub.config import Config, architecture
from ckpt_cli.tensors.component import Note


def lone_part_notes(place: Place, config: Config) -> list[Note]:
    """A warning about such a file, unless the class in its ``config`` tells which tensors there should be."""
    file = format_of(place.match).single_file(place.match)
    said = lone_part(file, Folders()) if file is not None and architecture(config) is None else None
    if said is None:
        return []
    text = f"{said}, and there is no other one, nor a class in a config.json to compare it with: nothing shows that it is the whole model"
    return [Note("warning", "lone-part", text)]
