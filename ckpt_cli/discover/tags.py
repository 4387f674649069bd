"""Saves that lie one level below a checkpoint's folder, in a *tag* of any name, and the file beside them that names the newest one."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from ckpt_cli import shell
from ckpt_cli.discover.beside.folders import is_searched, kind_of
from ckpt_cli.discover.found import Found, Place, Tracker
from ckpt_cli.errors import CkptError, Undecidable, Unreadable
from ckpt_cli.files.folders import Folders, broken_link, stays_inside
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.registry import format_of, recognise, tags_in
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.formats.trainers import ROLES, TRACKERS
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

MAX_TAGS = 1024
SUFFIX = re.compile(r"\.[A-Za-z]\w*\Z")
"""How names of files end."""

TAG_FILES = ("latest", "latest_universal")
"""What DeepSpeed writes beside its saves: the name of the newest one, and of the newest universal one."""

TAG = re.compile(r"global_step(?P<step>[0-9]+)", re.ASCII)
"""What DeepSpeed writes into ``latest``."""

RELEASE = "release"
"""What Megatron's tracker says in place of a step, and the folder of that: a converted model, of iteration 0."""


def has_tag_file(folder: Path, there: Folders) -> bool:
    return bool(_named(folder, there))


def names_own_tag(folder: Path, there: Folders) -> bool:
    """Whether a file in the folder itself names the newest tag in it."""
    return any(_said(folder / file, there) is not None for file in TAG_FILES)


def step_at(path: Path, there: Folders) -> int | None:
    """The step in the name of a folder; a plain number is one of a save beside a file that names the newest tag."""
    step = step_of(path)
    if step is None and path.name.isascii() and path.name.isdigit() and len(path.name) < 19 and has_tag_file(path.parent, there):
        with contextlib.suppress(Unreadable):
            return int(path.name) if there.is_folder(path) and tags_in(path, there) else None
    return step


def tags_of(folder: Path, there: Folders) -> list[Match]:
    """What DeepSpeed keeps one level below a checkpoint's folder, in a folder of any name, such as ``global_step500``.

    Of a folder that is no step, step folders are its steps and not this. Of several the one that ``latest`` names is taken.
    Raises Unreadable if that one cannot be looked at, or where none is named, another one that may be meant.
    """
    is_step = step_of(folder) is not None or (folder.name in ROLES and step_of(folder.parent) is not None)
    if not is_step and any(step_at(child, there) is not None for child in there.entries(folder)):
        return []
    found = {child.name: matches for child, matches in tags_below(folder, there).items()}
    said = _named(folder, there)
    for name in said.values():
        _check_tag(folder / name, there)
        if "/" in name and (inner := tags_in(folder / name, there)):
            found[name] = inner
    meant = next((name for name in said.values() if name in found), None)
    if found and meant is None:
        error = next(iter(blocked_in(folder, there).values()), None)
        if error is not None:
            other = f"pass {shell.path(folder / next(reversed(found)))} if that is the save you mean"
            error.hint = ", or ".join(filter(None, (error.hint, other)))
            raise error
    if len(found) < 2:
        return next(iter(found.values()), [])
    if meant is not None:
        return [*found.pop(meant), *(match for matches in found.values() for match in matches)]
    first = next(iter(found.values()))
    text, unread = f"there are {len(found)} saves in this folder: {few(list(found))}", _unread_in(folder, there)
    hint = f"pass {shell.path(folder / next(reversed(found)))}, or another of them"
    trouble: CkptError = Undecidable(text, path=folder, expected=_wanted(said), hint=hint)
    if unread is not None:
        text = f"{text}; which of them is meant is in a file that was not read: {unread.message}"
        trouble = Unreadable(text, path=unread.path, hint=f"make it readable, or {hint}")
    return [replace(match, trouble=trouble) for match in first]


def _wanted(said: Mapping[str, str]) -> str:
    """What would tell which save is meant, where tag files say what they ``said``."""
    file, name = next(iter(said.items()), (TAG_FILES[0], None))
    return f"a file {file} that names one of them" + (f", not {name}" if name else "")


def _unread_in(folder: Path, there: Folders) -> Unreadable | None:
    """Why a tag file that is there cannot be read."""
    for file in TAG_FILES:
        try:
            if there.is_file(folder / file):
                read_small(folder / file, 1 << 10)
        except Unreadable as error:
            return error
        except CkptError:
            continue
    return None


def passed_over_by_latest(folder: Path, there: Folders) -> Collection[Path]:
    """The tags in a folder that are not meant, since ``latest`` names another one of them."""
    if not has_tag_file(folder, there):
        return ()
    found = tags_below(folder, there)
    meant = next((folder / name for name in _named(folder, there).values() if folder / name in found), None)
    return () if meant is None else [child for child in found if child != meant]


def tags_below(folder: Path, there: Folders) -> dict[Path, list[Match]]:
    """The folders below a checkpoint's that hold a save of DeepSpeed, whatever their names."""
    found: dict[Path, list[Match]] = {}
    seen = 0
    for child in there.entries(folder):
        # What cannot be looked at beside it may be anything, and no weights are taken from it in any case.
        with contextlib.suppress(Unreadable):
            if there.is_folder(child) and seen < MAX_TAGS:
                seen += 1
                if matches := tags_in(child, there):
                    found[child] = matches
    return found


def blocked_in(folder: Path, there: Folders) -> dict[Path, Unreadable]:
    """What may be a save in a tag and cannot be looked at, or is a link that leads nowhere; by its name it is no other thing."""
    blocked = {}
    for child in there.entries(folder):
        # A tag may be called anything, also with such an ending, but what cannot be looked at and is called like a file is most likely one:
        # the logs and scripts beside the saves are no reason to refuse these.
        if (
            child.name in TAG_FILES
            or SUFFIX.search(child.name)
            or not is_searched(child.name)
            or kind_of(child.name) in ("copy", "companion")
        ):
            continue
        try:
            _check_tag(child, there)
        except Unreadable as error:
            blocked[child] = error
    return blocked


def tag_notes(found: Found, place: Place) -> list[Note]:
    """Warnings where a tag file beside what was read names a tag that is not there or holds no save, and about tags that cannot be read."""
    there = Folders()
    folder = place.home
    if found.given in (place.match.root, *place.match.files) and place.match.root != found.path:
        return []
    if not there.is_folder(folder):
        return []
    roots = {other.match.root for other in found.places}
    taken = f"{place.match.root.name}/" if place.match.root != folder else place.match.first.name
    notes = []
    if format_of(place.match).in_tags and place.match.root.parent == folder:
        for child, error in blocked_in(folder, there).items():
            notes.append(Note("warning", "unread", f"{child.name} beside {taken} was not read, and may be newer: {error.message}"))
        unread = _unread_in(folder, there) if step_at(place.match.root, there) is None else None
        if unread is not None:
            file = Path(str(unread.path)).name
            notes.append(Note("warning", "unread", f"{file} beside {taken} was not read, and may name another save: {unread.message}"))
    for file, name in _named(folder, there).items():
        tag = folder / name
        if tag in roots or (step_of(folder) is None and step_at(tag, there) is not None):
            continue
        with contextlib.suppress(Unreadable):
            if not tags_in(tag, there):
                why = "in which there is no save" if there.is_folder(tag) else "which is not there"
                notes.append(Note("warning", "tracker", f"{file} names {name}, {why}: {place.name} was read from {taken}"))
    return notes


def trackers_in(folders: Sequence[Path], there: Folders) -> tuple[tuple[Tracker, ...], tuple[str, ...]]:
    """What tracker files in the folders of steps say the last step is, and of those that could not be read, why."""
    said: dict[Tracker, None] = {}
    unread = []
    for folder in folders:
        for name in TRACKERS:
            try:
                if (step := _tracked_at(folder, name, there)) is not None:
                    said[Tracker(name, *step)] = None
            except Unreadable as error:
                unread.append(f"{name} was not read, and may name another step ({error.message})")
            except (CkptError, OSError):
                continue  # what is damaged, or too long to be a tracker, says nothing
    return tuple(said), tuple(unread)


def _tracked_at(folder: Path, name: str, there: Folders) -> tuple[int, str] | None:
    path = folder / name
    if there.is_file(path):
        content = read_small(path, 1 << 16)
        text, step = content.decode("utf-8", "replace").strip(), _tracked(content, as_json=path.suffix == ".json")
    elif path.is_symlink():
        text = os.readlink(path)
        step = _named_step(PurePath(text).name)
    else:
        return None
    return _other_named(folder, text, there) or step if step is None or "/" in text else step


def _other_named(folder: Path, name: str, there: Folders) -> tuple[int, str] | None:
    """A save beside the steps that has no number: DeepSpeed's tags may have any name, also one with a slash."""
    with contextlib.suppress(CkptError, OSError):
        held = stays_inside(name) and (tags_in(folder / name, there) if "/" in name else recognise(folder / name, there))
        return (0, name) if held else None
    return None


def _tracked(content: bytes, *, as_json: bool) -> tuple[int, str] | None:
    if as_json:
        values: Any = parse_json(content)
        step = values.get("last_global_step") if isinstance(values, dict) else None
        return (step, "") if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None
    return _named_step(content.decode("ascii", "replace").strip()) if len(content) <= 1 << 10 else None


def _named_step(text: str) -> tuple[int, str] | None:
    """The step that a number, the name of a step folder or a tag of DeepSpeed says; `RELEASE` in place of one is step 0."""
    if text == RELEASE:
        return 0, text
    if text.isascii() and text.isdigit() and len(text) < 20:
        return int(text), ""
    tag = TAG.fullmatch(text)
    step = int(tag["step"]) if tag is not None else step_of(PurePath(PurePath(text).name))
    return None if step is None else (step, "")


def _check_tag(tag: Path, there: Folders) -> None:
    """Raise Unreadable for a tag that cannot be looked at, or is a link that leads nowhere: it is the save that is meant."""
    if there.is_broken(tag):
        raise broken_link(tag)
    if there.is_folder(tag):
        there.entries(tag)


def _named(folder: Path, there: Folders) -> dict[str, str]:
    """The tags that DeepSpeed's own tools take, by the file that names each; one that cannot be read names none."""
    with contextlib.suppress(Unreadable):
        there.entries(folder)  # it is listed once, here or later; then nothing is asked for each file
    own = {file: said for file in TAG_FILES if (said := _said(folder / file, there)) is not None}
    # A tag may have a slash: then this folder is its first part.
    above = ((file, _said(folder.parent / file, there) or "") for file in TAG_FILES if file not in own)
    return own | {file: said.removeprefix(f"{folder.name}/") for file, said in above if said.startswith(f"{folder.name}/")}


def _said(file: Path, there: Folders) -> str | None:
    with contextlib.suppress(CkptError):
        said = read_small(file, 1 << 10).decode("utf-8", "replace").strip() if there.is_file(file) else ""
        return said if stays_inside(said) else None
    return None
