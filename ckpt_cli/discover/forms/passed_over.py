"""Other readings of a component, of which one was taken: in folders of their own, or as another format in the same folder.

A training that is restarted with another format leaves the files of the older save in the folder of a step, and the order in which readers
are asked says nothing of time. So two forms in one folder are compared, and what was saved last is never left behind in silence.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.discover.around.given_otherwise import is_given_otherwise
from ckpt_cli.discover.beside.models import Comparison, comparison_of
from ckpt_cli.discover.found import Found, PassedOver, Place
from ckpt_cli.discover.places import spoken
from ckpt_cli.errors import CkptError, Undecidable
from ckpt_cli.files.source import Files
from ckpt_cli.formats.ages import MAX_SECONDS
from ckpt_cli.formats.base import Match, ReadOptions
from ckpt_cli.formats.registry import describe, format_of, groups
from ckpt_cli.hub.config import Config, expert_count
from ckpt_cli.names import few, span_text
from ckpt_cli.tensors.component import Component, Note


def passed_over_notes(found: Found, place: Place, component: Component, config: Config, files: Files) -> list[Note]:
    """What is said of other readings of a component: warnings about folders that may hold it too, and how other forms beside it differ.

    Raises Undecidable if another form was clearly saved later, and holds other weights.
    """
    notes = _folder_notes(place, files)
    if not found.is_named(place):
        others = [
            other for other in place.passed_over if _is_form(other) and not is_given_otherwise(other.match.first, place.match.first, files)
        ]
        forms = filter(None, (_form_of(other, place.match.group, files) for other in others))
        notes += [_form_note(place, other, component, config, files) for other in forms]
    return notes


def passed_over_state(found: Found, place: Place, files: Files) -> list[Note]:
    """The same of training state, which is told by the weights that were saved with it. Raises Undecidable as for these."""
    if found.is_named(place) or not any(map(_is_form, place.passed_over)):
        return []
    try:
        component = describe(place.match, files, ReadOptions())
    except CkptError:
        return []  # state may be all that is left of a step
    return [note for note in passed_over_notes(found, place, component, {}, files) if note.level == "warning"]


def unread_forms(found: Found, place: Place, files: Files) -> list[Note]:
    """What was not read beside a component, in its own folder, and was not compared as another form of it."""
    others = [other for other in place.passed_over if other.folder is None and (found.is_named(place) or not _is_form(other))]
    others = [other for other in others if not is_given_otherwise(other.match.first, place.match.first, files)]
    read = f"{place.name} was read from {spoken(place.match)}"
    return [Note("info", "passed-over", f"{read}; {other.text} is there too, and was not read") for other in others]


def _is_form(other: PassedOver) -> bool:
    """Whether another reading is a save in the same folder. Single files are compared with all weights beside a component."""
    return other.folder is None and format_of(other.match).is_sharded


def _form_of(other: PassedOver, group: str | None, files: Files) -> Match | None:
    """Another form of the component that is a ``group`` in its file, or the main one; None if the other holds no such group."""
    if group is None:
        return other.match
    try:
        return replace(other.match, component=group, group=group) if group in groups(other.match, files) else None
    except CkptError:
        return other.match


def _folder_notes(place: Place, files: Files) -> list[Note]:
    """A warning about folders that hold the same component once more: other weights, of which nothing tells that they are a copy."""
    folders = [other.folder for other in place.passed_over if other.folder is not None]
    folders = [folder for folder in folders if not is_given_otherwise(folder, place.match.root, files)]
    if not folders:
        return []
    text = f"{place.name} was read from {_folder_name(place.match.root, place.home)}; {few([_folder_name(f, place.home) for f in folders])}"
    return [Note("warning", "passed-over", f"{text} could be {place.name} too, and {'was' if len(folders) == 1 else 'were'} not read")]


def _folder_name(folder: Path, home: Path) -> str:
    """A folder as it is seen from the component's own."""
    return str(folder.relative_to(home)) + "/" if folder != home and folder.is_relative_to(home) else f"{folder.name}/"


def _form_note(place: Place, other: Match, component: Component, config: Config, files: Files) -> Note:
    """What is said of another form of a component. Raises Undecidable if it was clearly saved later, and holds other weights."""
    shown = spoken(other)
    read = f"{spoken(place.match)} {'was' if len(place.match.files) == 1 else 'were'} read for {place.name}"
    try:
        twin = describe(other, files, ReadOptions(expert_count(config), bool(config)))
    except CkptError as error:
        comparison = Comparison(True, f"{shown} may be {place.name} too, and was not compared, since it cannot be read: {error.message}")
        age, is_whole = _age(component.files, other.files, files), False
    else:
        comparison = comparison_of(shown, component.tensors, twin.tensors, config)
        age, is_whole = _age_by_steps(component, twin) or _age(component.files, twin.files, files), True
    if not comparison.differs:
        return Note("info", "other-weights", f"{read}; {comparison.text}")
    is_newer, when = age or (None, "nothing tells which of the two was saved last")
    if is_newer and is_whole:
        raise Undecidable(
            f"two saves are in one folder, and {spoken(place.match)} would be read for {place.name}; {comparison.text}; {when}",
            path=place.match.root,
            expected="the files of one save",
            hint=f"pass {shell.path(other.first)} for the later one, or move the files of the other to another folder",
        )
    if is_newer is False:
        return Note("info", "passed-over", f"{read}; {comparison.text}; {when}")
    return Note("warning", "other-model", f"{read}; {comparison.text}; {when}")


def _age_by_steps(own: Component, other: Component) -> tuple[bool, str] | None:
    """Whether the other form is newer than the component, by the steps that both record; None if these do not tell."""
    if own.step is None or other.step is None or own.step == other.step:
        return None
    return other.step > own.step, f"the first is of step {own.step}, the other of step {other.step}, as they record"


def _age(own: tuple[Path, ...], other: tuple[Path, ...], files: Files) -> tuple[bool, str] | None:
    """The same by the times of all files, which tell only if they do not overlap, and lie further apart than a save takes."""
    try:
        mine, its = ([files.source(path).identity.mtime_ns for path in paths] for paths in (own, other))
    except CkptError:
        return None
    if not mine or not its or not min(*mine, *its):
        return None
    later, earlier = (min(its) - max(mine)) / 1e9, (min(mine) - max(its)) / 1e9
    if max(later, earlier) < MAX_SECONDS:
        return None
    newer = later > earlier
    return newer, f"it was written {span_text(later)} later" if newer else f"it was written {span_text(earlier)} earlier"
