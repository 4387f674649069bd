"""Outputs of ckpt as checkpoints: what their manifest says that they lack, of tensors and of files beside these."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Container, Iterable
from dataclasses import replace
from pathlib import Path

from ckpt_cli.discover.found import Place
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import is_file, is_folder, stays_inside
from ckpt_cli.files.leftovers.written_over import written_over
from ckpt_cli.files.manifest import LEFT_OUT, Manifest, read_manifest
from ckpt_cli.files.source import read_small
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.hub.beside.names import folder_read, is_asset_name, is_unknown
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Component, Note

STATE = "extract-state"
COMPONENT = "component"
"""The entry of a manifest that says what was merged."""


def made_by_ckpt(component: Component) -> Manifest | None:
    """The manifest of the output that the files of a component are; None for other files, and for a manifest that cannot be read."""
    try:
        manifest = _manifest_of(component.root)
    except CkptError:
        return None  # it is only asked; `verify` reports it
    written = (*manifest.outputs, *manifest.side_files) if manifest is not None and manifest.command != STATE else ()
    return manifest if all(path.parent == component.root and path.name in written for path in component.files) else None


def is_output(place: Place) -> bool:
    """Whether the weights of a checkpoint are an output of ckpt in a folder of its own; what `--in-place` added to a save is none."""
    try:
        manifest = _manifest_of(place.match.root)
    except CkptError:
        return False  # it is only asked; `verify` reports it
    if manifest is None or manifest.options.get("in_place"):
        return False
    # An index that was made with them is a file beside the weights.
    written = (*manifest.outputs, *(name for name in manifest.side_files if name.endswith(".index.json")))
    return all(path.parent == place.match.root and path.name in written for path in place.match.files)


def _manifest_of(folder: Path) -> Manifest | None:
    """The manifest of the weights in a folder; None for one of weights that were there before, or are in another folder."""
    manifest = read_manifest(folder) if is_folder(folder) else None
    return manifest if manifest is not None and not written_over(folder, manifest, values=False) else None


def as_merged(place: Place) -> Place:
    """A place under the name of what ``--in-place`` merged there: an average in ``model.safetensors`` is no model of the training."""
    folder = place.match.root
    made = None
    with contextlib.suppress(CkptError):  # it is only asked; `verify` reports it
        made = read_manifest(folder)
    said = made.facts.get(COMPONENT) if made is not None and made.options.get("in_place") else None
    if made is None or not isinstance(said, str) or not is_average_name(said):
        return place
    written = {*made.outputs, *made.side_files}
    is_it = all(path.parent == folder and path.name in written for path in place.match.files)
    return replace(place, name=said) if is_it else place


def partial_notes(component: Component, made: Manifest | None, there: Container[str] = ()) -> list[Note]:
    """A warning about a component that was written without some tensors of its source, unless these are ``there`` by now."""
    text = partial_text(made, there)
    return [Note("warning", "partial-output", f"{component.root.name} was written without all of its tensors; {text}")] if text else []


def lost_side_notes(folder: Path, made: Manifest | None, there: Container[str]) -> list[Note]:
    """A warning about files that were written beside the weights of an output, and are neither beside them now nor ``there``.

    ``there`` are names that a further output gets from elsewhere. Files of a training's state are no part of a model.
    """
    if made is None or made.command == STATE:
        return []
    beside = (name for name in made.side_files if stays_inside(name) and _is_of_model(name))
    lost = [name for name in beside if name not in there and not is_file(folder / name)]
    if not lost:
        return []
    verb, them = ("is", "it") if len(lost) == 1 else ("are", "them")
    text = f"{folder} lacks {few(lost, 5)}, which {verb} in its manifest: copy {them} from where it was written, or merge again"
    return [Note("warning", "fewer-files", text)]


def changed_side_notes(folder: Path, made: Manifest | None, taken: Iterable[Path]) -> list[Note]:
    """A warning about files beside the weights of an output that say something else than was written there, if they are ``taken``."""
    if made is None or made.command == STATE:
        return []
    taken = set(taken)
    wanted = {name: crc for name, crc in made.side_checksums.items() if stays_inside(name) and _is_of_model(name)}
    changed = [name for name, crc in wanted.items() if folder / name in taken and _crc(folder / name) not in (None, crc)]
    if not changed:
        return []
    them, now = ("it", "is taken as it is now") if len(changed) == 1 else ("them", "are taken as they are now")
    text = f"{few(sorted(changed), 5)} of {folder} changed since ckpt wrote {them}, and {now}"
    return [Note("warning", "changed-side-file", text)]


def _crc(path: Path) -> int | None:
    with contextlib.suppress(CkptError):  # what cannot be read is told elsewhere
        return zlib.crc32(read_small(path))
    return None


def _is_of_model(name: str) -> bool:
    """Whether a loader may need a file beside the weights. What is lacking of weights and their index, reading them tells."""
    return is_asset_name(name) or name.endswith(".py") or folder_read(name) is not None or is_unknown(name)


def partial_text(made: Manifest | None, there: Container[str] = ()) -> str | None:
    """What a manifest says was left out, and how; None if nothing was."""
    if made is None:
        return None
    absent = [name for name in made.left_out if name not in there]
    how = f" ({few(made.filters, 3)})" if made.filters else ""
    if LEFT_OUT not in made.facts:
        return f"some were left out{how}" if how else None
    return f"left out{how}: {few(grouped(absent), 3)}" if absent else None
