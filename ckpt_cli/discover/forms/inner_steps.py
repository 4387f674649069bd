"""Steps inside of the step that is read: a copy that landed in its target, as a second one does, or a training that went on there.

Nothing but values tells whether the step that was meant is the outer one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.discover.around.given_otherwise import is_given_otherwise
from ckpt_cli.discover.beside.models import Comparison, comparison_of
from ckpt_cli.discover.components import expanded
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.discover.places import places_in
from ckpt_cli.discover.steps import steps_of_run, without_tags
from ckpt_cli.errors import CkptError, Unreadable
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.registry import describe
from ckpt_cli.formats.step_names import counter_of, step_of
from ckpt_cli.hub.config import Config
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.tensor import Tensor

CODE = "steps-inside"

MOST_COMPARED = 4
"""Inner steps that are compared, the newest ones: a copy is one, and those of a training are surely others."""


@dataclass(frozen=True, slots=True)
class Read:
    """What was read of a step: a component, and how; ``is_main``: it is what the step is about. ``called``: what it is in messages."""

    name: str
    files: Sequence[Path]
    tensors: Mapping[str, Tensor]
    config: Config
    options: ReadOptions
    is_main: bool = True
    called: str = ""


def inner_step_notes(found: Found, place: Place, component: Component, config: Config, options: ReadOptions, files: Files) -> list[Note]:
    """What is said of steps in the folder of the step that a component was read from."""
    if found.is_named(place):
        return []
    is_main = place.match is found.places[0].match
    held = (*place.match.files, *component.files)
    return notes_inside(found.path, Read(place.name, held, component.tensors, config, options, is_main), files)


def notes_of_state(found: Found, place: Place, files: Files) -> list[Note]:
    """The same where only the state beside a component was read: its weights tell which save it is of."""
    options = ReadOptions()
    tensors: Mapping[str, Tensor] = {}
    if found.is_named(place) or not _holds_steps(found.path):
        return []
    with contextlib.suppress(CkptError):  # a state is useful without its weights
        tensors = describe(place.match, files, options).tensors
    is_main = place.match is found.places[0].match
    return notes_inside(found.path, Read(place.name, place.match.files, tensors, {}, options, is_main, "the state"), files)


def _holds_steps(folder: Path) -> bool:
    with contextlib.suppress(Unreadable):
        steps = steps_of_run(folder, Folders())
        return bool(steps or steps.made)
    return False


def notes_inside(step: Path, read: Read, files: Files) -> list[Note]:
    """What is said of steps in the folder of a ``step``: a warning, unless they hold what was read of it once more."""
    there = Folders()
    if step_of(step) is None or not there.is_folder(step):
        return []
    try:
        inner = [each for each in _inside(step, read.files, there) if not is_given_otherwise(each.path, step, files)]
        blocked = [each for each in steps_of_run(step, there).blocked if not is_given_otherwise(each.path, step, files)]
    except Unreadable:
        return []  # no weights are read from there
    compared = [(each, _comparison(each, step, read, files)) for each in inner[:MOST_COMPARED]]
    same = [comparison.text for _, comparison in compared if not comparison.differs]
    others = [comparison.text for _, comparison in compared if comparison.differs]
    others += [f"{_shown(each.path, step)} cannot be looked at: {each.error.message}" for each in blocked]
    if more := [_shown(each.path, step) for each in inner[MOST_COMPARED:]]:
        others.append(f"{few(more, 2)} {'was' if len(more) == 1 else 'were'} not read, nor compared")
    notes = [Note("info", CODE, "; ".join(same))] if same else []
    if others:
        differing = [each.path for each, comparison in compared if comparison.differs]
        newest = next(iter((*differing, *(each.path for each in blocked), *(each.path for each in inner[MOST_COMPARED:]))))
        one = len(inner) + len(blocked) - len(same) == 1
        why = f"if a copy landed in its target, or training went on in {step.name}/, {'that' if one else 'one of these'} may be newer"
        text = f"{read.called or read.name} was read from {step.name}/ itself; {'; '.join(others)}: {why}"
        text += f", and is read by passing {shell.path(newest)}"
        notes.append(Note("warning", CODE, text))
    return notes


def _inside(step: Path, read: Iterable[Path], there: Folders) -> Iterator[Found]:
    """The steps in the folder of another one, the newest first. What was ``read`` from one of them needs no word."""
    listed = without_tags(steps_of_run(step, there))
    made = [Found(path, step_of(path), places_in(path, there)) for path in listed.made]
    run = os.path.realpath(step.parent)
    for each in sorted((*listed.found, *made), key=lambda each: -(each.step or 0)):
        # The steps of an epoch are older than what was saved at its end; a link may lead to another step of the run.
        of_epoch = counter_of(step) == "epochs" and counter_of(each.path) == "steps"
        is_of_run = os.path.dirname(os.path.realpath(each.path)) == run
        if not (of_epoch or is_of_run or any(path.is_relative_to(each.path) for path in read)):
            yield each


def _comparison(inner: Found, step: Path, read: Read, files: Files) -> Comparison:
    """What an inner step holds, compared with what was read."""
    shown = _shown(inner.path, step)
    inner = expanded(inner, files)
    place = inner.place(read.name) or (inner.places[0] if read.is_main else None)
    if place is None:
        return Comparison(True, f"{shown} holds no {read.name}, and was not used")
    try:
        tensors = describe(place.match, files, read.options).tensors
    except CkptError as error:
        return Comparison(True, f"{shown} holds weights too, which cannot be read: {error.message}")
    if any(piece.source.forward_only for side in (read.tensors, tensors) for tensor in side.values() for piece in tensor.pieces):
        return Comparison(True, f"{shown} holds weights too, in compressed files, so that values were not compared")
    return comparison_of(shown, read.tensors, tensors, read.config, every=True)


def _shown(path: Path, step: Path) -> str:
    return f"{path.relative_to(step.parent).as_posix()}/"
