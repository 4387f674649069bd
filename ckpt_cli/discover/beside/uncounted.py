"""Entries beside the steps of a run that hold weights and are not named like a step: one of them may be the last save of all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ckpt_cli.discover.beside.folders import LOGS, kind_of
from ckpt_cli.discover.beside.outputs import is_output
from ckpt_cli.discover.found import Found, Target
from ckpt_cli.discover.places import places_in
from ckpt_cli.errors import Unreadable
from ckpt_cli.files.folders import Folders, broken_link
from ckpt_cli.formats.step_names import LAST, is_like_step, step_of
from ckpt_cli.formats.trainers import PARTIAL, has_form
from ckpt_cli.formats.weight_names import may_hold_weights
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

MAX_LOOKED = 256
"""How many entries are looked into: a run has a few beside its steps."""

NUMBER = re.compile(r"[0-9]+")
DIGITS = re.compile(r"(?<![A-Za-z0-9])[0-9]+(?![0-9]|-?bit)")
"""Numbers that count something, and are no part of a dtype or the like."""

BRACKETS = re.compile(r"\([0-9]+\)")
"""What browsers and file managers add to a name that is taken."""

AGAIN = re.compile(rf"(?<![a-z])(new|fix|again|re-?(do|run|try|start|sum)|{'|'.join(LAST)}|v[0-9])", re.IGNORECASE)
"""Words for what came later than something of the same number."""

PLAIN = re.compile(r"(?!.*copy)[A-Za-z0-9._=+~-]*", re.ASCII | re.IGNORECASE)
"""What is added by hand or by a tool. File managers add spaces, brackets and words of all languages, to the older one or to the newer."""


def uncounted_notes(target: Target, taken: Found) -> list[Note]:
    """What is said of entries beside the steps that no step was found in, where ``taken`` is the newest of these.

    A warning for names with the words of a step, or of the last save; else only a remark, as for a model that another tool wrote there,
    also under the name of a step that is no newer.
    """
    last: list[str] = []
    others: list[str] = []
    for entry, said in _with_weights(target):
        (last if is_like_step(entry.name) and not _is_told_step(entry, target, taken) else others).append(said)
    notes = [Note("warning", "uncounted", f"{_told(last)}: {_it(last)} may be newer than {target.label(taken.path)}")] if last else []
    if others:
        notes.append(Note("info", "uncounted", _told(others)))
    if target.made:
        names = few([folder.name for folder in target.made], 3)
        text = f"{names} among the steps {'is an output' if len(target.made) == 1 else 'are outputs'} of ckpt, not counted as a step"
        notes.append(Note("info", "uncounted", text))
    return notes


def _is_told_step(entry: Path, target: Target, taken: Found) -> bool:
    """Whether the name of an entry says which step it is of, and that is none after ``taken``: ``checkpoint-200-merged``.

    Of steps that are files, it may stand before the ending: ``epoch=1-step=200-EMA.ckpt``, as NeMo calls the average of one.
    """
    age = target.age
    names = {name for found in target.checkpoints for name in (found.path.name, found.path.name.removesuffix(entry.suffix))}
    for shape in {"[0-9]+".join(map(re.escape, NUMBER.split(name))) for name in names}:
        part = re.search(rf"(?<![A-Za-z0-9]){shape}(?![A-Za-z0-9,])", entry.name)
        if part is None or step_of(Path(part[0])) is None:
            continue
        rest = (entry.name[: part.start()], entry.name[part.end() :])
        if any(AGAIN.search(text) or DIGITS.search(BRACKETS.sub("", text)) for text in rest):
            continue
        of, newest = age(entry.with_name(part[0])), age(taken)
        return of < newest or (of == newest and all(map(PLAIN.fullmatch, rest)))
    return False


def _told(entries: list[str]) -> str:
    if len(entries) == 1:
        return f"{entries[0]} beside the steps was not counted, since its name is not that of a step"
    return f"{few(entries, 5)} beside the steps were not counted, since their names are not those of steps"


def _it(entries: list[str]) -> str:
    return "it" if len(entries) == 1 else "they"


def _with_weights(target: Target) -> Iterator[tuple[Path, str]]:
    """The entries that may hold weights of the training, each with how it is called in messages."""
    there = Folders()
    steps = {os.path.realpath(found.path) for found in target.checkpoints}
    folders = {target.path, *target.folders, *(found.path.parent for found in target.checkpoints)}
    of_files = {found.path.parent for found in target.checkpoints if there.is_file(found.path)}
    tracked = {*(tracker.name for tracker in target.trackers), *(target.stray or ())[:1]}
    entries = [entry for folder in sorted(folders) for entry in there.entries(folder) if _counts(entry.name) and entry not in folders]
    for entry in sorted(entries, key=lambda entry: not is_like_step(entry.name))[:MAX_LOOKED]:
        try:
            if entry.name in tracked and not there.is_folder(entry):
                continue  # what it says, or holds, is compared
            if there.is_broken(entry):
                raise broken_link(entry)
            if _is_of_step(entry, steps):
                continue
            if there.is_folder(entry) and _holds_weights(entry, there):
                yield entry, f"{target.label(entry)}/"
            elif entry.parent in of_files and may_hold_weights(entry.name) and there.is_file(entry):
                yield entry, target.label(entry)
        except Unreadable as error:
            if is_like_step(entry.name):
                yield entry, f"{target.label(entry)} ({error.message})"


def _counts(name: str) -> bool:
    """Whether a name leaves it open that this is a save: not that of a step, of logs, of another model, or of an older copy of one."""
    if step_of(Path(name)) is not None or has_form(name, PARTIAL):
        return False
    return is_like_step(name) or not (LOGS.fullmatch(name) or kind_of(name) == "copy")


def _is_of_step(entry: Path, steps: set[str]) -> bool:
    """Whether an entry is a step of any name, or a link to one, or into one."""
    real = Path(os.path.realpath(entry))
    if not entry.is_symlink():
        return str(real) in steps
    return any(str(folder) in steps for folder in (real, *real.parents))


def _holds_weights(folder: Path, there: Folders) -> bool:
    """Whether a folder holds weights that ckpt did not write: for a name like that of a step, as deep as in a step, or in tags."""
    deep = is_like_step(folder.name)
    places = places_in(folder, there, between=deep)
    if places:
        return not is_output(places[0])
    return deep and any(places_in(child, there) for child in there.folders(folder, lambda name: step_of(Path(name)) is not None))
