"""Weights in a folder below a step or role folder: in one that a trainer's row names, or in the only one that holds any.

Names of folders are many, and a list of them is never complete: whatever a folder is called, it is meant if nothing beside it could be
meant too. What cannot be read could be. Folders whose names say that they hold another model, or an older copy, are never meant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.discover.beside.folders import DEPTH, Held, files_with_weights, held_below, kind_of
from ckpt_cli.discover.forms.composite import Composite, composite_in
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.errors import Undecidable, Unreadable, Unsupported
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.registry import format_of, recognise
from ckpt_cli.formats.safetensors.names import safetensors_part
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.formats.trainers import ROLES, WEIGHTS, form, has_form, number_in, place_below
from ckpt_cli.formats.weight_names import may_hold_weights
from ckpt_cli.names import few, numbered
from ckpt_cli.tensors.component import Note


class NoChoice(Undecidable):
    """Nothing tells which of several folders holds the model."""


def weights_beneath(folder: Path, there: Folders, known: Sequence[Match] = (), passed: Collection[Path] = ()) -> list[Match]:
    """What is held by the folder below this one that is meant; if nothing tells which one is, this is the trouble of what is returned.

    Below a folder that is neither a step nor a role's, the names of rows mean nothing: there must be only one. Of several that rows name,
    all are given: which goes first, and that others are there, is said where places are chosen. A folder called like an average holds
    one, and is never taken for the model. ``known`` is what was recognised as second models, such as a critic: none of these is the model
    if anything else could be. ``passed`` are folders that are known not to be meant, unless a row names them.
    """
    found = held_below(folder, there)
    if found is None:
        return []
    held = [entry for entry in found if not any(entry.path.is_relative_to(match.root) for match in known if match.root != folder)]
    held = [entry for entry in held if entry.path not in passed or has_form(entry.name, WEIGHTS)]
    averages = [entry for entry in held if entry.kind == "average" and entry.matches]
    outputs = [entry for entry in held if entry.kind == "output" and entry.matches]
    models = [entry for entry in held if entry.kind == "model" and entry.matches] or outputs
    is_known = step_of(folder) is not None or folder.name in ROLES
    meant = [entry for entry in models if is_known and has_form(entry.name, WEIGHTS)]
    if not meant:
        if not is_known and not known and len(models) > 1:
            return []  # a folder of models is no checkpoint
        rivals = [entry for entry in held if entry not in (*averages, *outputs) and entry.kind != "adapter"]
        taken = {path for match in known for path in match.files}
        others = [name for name in files_with_weights(folder, there) if folder / name not in taken]
        readable = models or [entry for entry in rivals if entry.kind in ("companion", "copy") and entry.matches]
        seconds = [*known, *(match for entry in averages for match in _as_average(entry))]
        if seconds and not readable and (rivals or others):
            # What is not read may be the model, so that a second one is not taken in its place.
            spots = [match.first if match.root == folder else match.root for match in seconds]
            shown = [Held(path, path.relative_to(folder).as_posix(), "apart", (match,)) for path, match in zip(spots, seconds, strict=True)]
            return [replace(seconds[0], component="model", trouble=_no_choice(folder, shown, rivals, others)), *seconds[len(known) :]]
        if readable and (len(models) != 1 or others or any(entry is not models[0] for entry in rivals)):
            whole = composite_in(folder, there)
            is_one = whole is not None and all(entry.path in whole.parts for entry in readable)
            unread = [entry for entry in rivals if entry not in readable]
            trouble = in_parts(whole) if whole is not None and is_one else _no_choice(folder, readable, unread, others)
            # An average beside models that are not told apart is none of what is meant either.
            return [replace(match, trouble=trouble) for entry in (readable[0], *averages) for match in _as_average(entry)]
        meant = models
    chosen = [match for entry in meant for match in _as_numbered(entry)]
    chosen += [match for entry in averages for match in _as_average(entry) if len(averages) == 1]
    return chosen or _refused(folder, there)


def in_parts(whole: Composite) -> NoChoice:
    """The error for a model of several parts, where the weights of one are asked for."""
    return NoChoice(whole.told, path=whole.folder, expected="the folder of one part: a merge or an average is of one", hint=whole.hint)


def _as_numbered(entry: Held) -> list[Match]:
    """What a folder holds; with its number, if it is that of one of several models of one save."""
    number = number_in(entry.name, WEIGHTS) or 0
    return [replace(match, component=numbered(match.component, number), number=number or match.number) for match in entry.matches]


def _as_average(entry: Held) -> list[Match]:
    return [replace(match, component="ema") if entry.kind == "average" else match for match in entry.matches]


def _no_choice(folder: Path, readable: Sequence[Held], others: Sequence[Held], files: Sequence[str]) -> NoChoice:
    named = [f"{entry.name}{'' if entry.path.suffix and may_hold_weights(entry.path.name) else '/'}" for entry in (*readable, *others)]
    several = f"nothing tells which of these in {folder.name}/ is the model: {few([*named, *files], 6)}"
    alone = f"the only weights in {folder.name}/ are in {few(named)}, which by its name is not the model itself"
    whole = [entry for entry in (*readable, *others) if entry.matches and all(match.trouble is None for match in entry.matches)]
    return NoChoice(
        several if len(named) + len(files) > 1 else alone,
        path=folder,
        expected="one folder with weights, or a folder that a trainer names so",
        hint=f"give the folder you mean: {few([shell.path(entry.path) for entry in whole or readable], 3)}",
    )


def _refused(folder: Path, there: Folders) -> list[Match]:
    """Weights in a folder that a row names, of a format that is not read."""
    for name in WEIGHTS:
        place = folder / name
        if form(name).groups == 0 and there.is_folder(place):
            found = [match for match in recognise(place, there) if isinstance(match.trouble, Unsupported)]
            if found:
                return found
    return []


def doubted(match: Match, there: Folders) -> Match:
    """A match; with a trouble, if it is a file of any name that is called like another model or an older copy, beside other weights."""
    file = match.first
    if match.trouble is not None or not format_of(match).is_loaded or kind_of(file.name.partition(".")[0]) != "copy":
        return match
    folder = file.parent
    others = [name for name in files_with_weights(folder, there) if name != file.name and safetensors_part(name) is None]
    folders = [entry.name + "/" for entry in held_below(folder, there) or () if entry.kind != "apart"]
    if not others and not folders:
        return match
    text = f"nothing tells which of these in {folder.name}/ is the model: {few([file.name, *folders, *others], 6)}"
    return replace(
        match, trouble=NoChoice(text, path=folder, expected="one model", hint=f"pass the file, if you mean that: {shell.path(file)}")
    )


def is_chosen(place: Place) -> bool:
    """Whether something tells that a place is the one that is meant."""
    return not isinstance(place.match.trouble, NoChoice)


def between_notes(found: Found, place: Place) -> list[Note]:
    """Where weights were read from, if no row of a trainer says that they lie there."""
    root = place.match.root
    if root in (place.home, *place.match.files) or not root.is_relative_to(place.home):
        return []
    below = place_below(root, place.home)[1]
    if has_form(below, WEIGHTS) or has_form(root.name, WEIGHTS):
        return []
    others: list[Held] = []
    with contextlib.suppress(Unreadable):
        others = [
            entry
            for entry in held_below(place.home, Folders()) or ()
            if not root.is_relative_to(entry.path) and not entry.path.is_relative_to(root)
        ]
    alone = "" if others or place.passed_over else f", the only folder with weights in {place.home.name}/"
    return [Note("info", "between", f"{place.name} was read from {below}/{alone}")]


def step_above(path: Path, there: Folders) -> Path | None:
    """The step folder in which a path lies, a few levels up; None for what lies in none, and for step folders."""
    if step_of(path) is not None:
        return None
    with contextlib.suppress(Unreadable):
        if there.is_folder(path):
            return next((folder for folder in list(path.parents)[: DEPTH + 1] if step_of(folder) is not None), None)
    return None
