"""Indexes of other folders beside the weights of a component, none of whose files is there."""

from __future__ import annotations

from ckpt_cli.discover.found import Found, Place
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.safetensors.leftovers import indexes_of_nothing, leftover_text
from ckpt_cli.tensors.component import Note


def leftover_index_notes(found: Found, place: Place) -> list[Note]:
    """A warning about each of them, in the folders of the component and of the checkpoint. Beside a file that was passed all may lie."""
    if found.is_named(place):
        return []
    there = Folders()
    folders = [folder for folder in dict.fromkeys((place.match.root, place.home, found.path)) if there.is_folder(folder)]
    indexes = [index for folder in folders for index in indexes_of_nothing(folder, there)]
    return [Note("warning", "leftover-index", f"{index}: {leftover_text(index)}") for index in indexes]
