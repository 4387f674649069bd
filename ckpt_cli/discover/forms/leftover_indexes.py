"""What stands for weights beside those of a component and has none: indexes none of whose files is there, files without tensors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ckpt_cli.discover.found import Found, Place
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.registry import recognise
from ckpt_cli.formats.safetensors.leftovers import indexes_of_nothing, leftover_text
from ckpt_cli.tensors.component import Note


def leftover_index_notes(found: Found, place: Place) -> list[Note]:
    """A warning about each of them, in the folders of the component and of the checkpoint. Beside a file that was passed all may lie."""
    if found.is_named(place):
        return []
    there = Folders()
    folders = _folders((place.match.root, place.home, found.path), there)
    indexes = [index for folder in folders for index in indexes_of_nothing(folder, there)]
    return [Note("warning", "leftover-index", f"{index}: {leftover_text(index)}") for index in indexes]


def empty_file_notes(found: Found, places: Iterable[Place]) -> list[Note]:
    """A note for each file without tensors that gave way to the weights of a checkpoint: in its folders.

    A healthy training leaves it where it does not gather the weights of all ranks, so that nothing is wrong with these.
    """
    there, taken = Folders(), {file for place in places for file in place.match.files}
    named = any(map(found.is_named, places))
    folders = _folders((found.path, *(folder for place in places for folder in (place.match.root, place.home))), there)
    empty = [match.first for folder in folders if not named for match in recognise(folder, there) if match.lists_nothing]
    texts = {path: f"{path} holds no tensor, and was not read" for path in empty if path.suffix != ".json" and path not in taken}
    return [Note("info", "passed-over", text) for text in texts.values()]


def _folders(paths: Iterable[Path], there: Folders) -> list[Path]:
    return [folder for folder in dict.fromkeys(paths) if there.is_folder(folder)]
