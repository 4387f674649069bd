"""Outputs of ckpt as checkpoints: what their manifest says that they lack."""

from __future__ import annotations

from collections.abc import Container

from ckpt_cli.discover.found import Place
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import is_folder
from ckpt_cli.files.manifest import LEFT_OUT, Manifest, read_manifest
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Component, Note

STATE = "extract-state"


def made_by_ckpt(component: Component) -> Manifest | None:
    """The manifest of the output that the files of a component are; None for other files, and for a manifest that cannot be read."""
    try:
        manifest = read_manifest(component.root) if is_folder(component.root) else None
    except CkptError:
        return None  # it is only asked; `verify` reports it
    written = (*manifest.outputs, *manifest.side_files) if manifest is not None and manifest.command != STATE else ()
    return manifest if all(path.parent == component.root and path.name in written for path in component.files) else None


def is_output(place: Place) -> bool:
    """Whether the weights of a checkpoint are an output of ckpt in a folder of its own; what `--in-place` added to a save is none."""
    try:
        manifest = read_manifest(place.match.root) if is_folder(place.match.root) else None
    except CkptError:
        return False  # it is only asked; `verify` reports it
    if manifest is None or manifest.options.get("in_place"):
        return False
    # An index that was made with them is a file beside the weights.
    written = (*manifest.outputs, *(name for name in manifest.side_files if name.endswith(".index.json")))
    return all(path.parent == place.match.root and path.name in written for path in place.match.files)


def partial_notes(component: Component, made: Manifest | None, there: Container[str] = ()) -> list[Note]:
    """A warning about a component that was written without some tensors of its source, unless these are ``there`` by now."""
    text = partial_text(made, there)
    return [Note("warning", "partial-output", f"{component.root.name} was written without all of its tensors; {text}")] if text else []


def partial_text(made: Manifest | None, there: Container[str] = ()) -> str | None:
    """What a manifest says was left out, and how; None if nothing was."""
    if made is None:
        return None
    absent = [name for name in made.left_out if name not in there]
    how = f" ({few(made.filters, 3)})" if made.filters else ""
    if LEFT_OUT not in made.facts:
        return f"some were left out{how}" if how else None
    return f"left out{how}: {few(grouped(absent), 3)}" if absent else None
