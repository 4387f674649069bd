"""What lies where a checkpoint was found, and could have been meant in its place: steps, names that no step has, other forms."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_cli.discover.forms.inner_steps import CODE as INSIDE
from ckpt_cli.discover.forms.leftover_indexes import empty_file_notes
from ckpt_cli.discover.forms.passed_over import unread_forms
from ckpt_cli.discover.forms.states_inside import steps_inside_notes
from ckpt_cli.discover.found import Found, Place, Target
from ckpt_cli.files.source import Files
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note


def not_taken_notes(target: Target, found: Found, places: Sequence[Place], said: Sequence[Note], files: Files) -> list[Note]:
    """Notes for every command that opens a checkpoint; what was ``said`` of steps inside, with their values compared, is not said again."""
    notes = [] if any(note.code == INSIDE for note in said) else steps_inside_notes(target)
    notes += refused_notes(target)
    notes += empty_file_notes(found, places)
    notes += [note for place in places for note in unread_forms(found, place, files)]
    if target.nodes > 1:
        notes.append(Note("info", "nodes", f"{target.nodes} folders were joined as the nodes of one run"))
    return notes


def refused_notes(target: Target) -> list[Note]:
    """A warning of what lies beside weights like a step and can be none, such as one file of a set."""
    if not target.refused:
        return []
    were = "was" if len(target.refused) == 1 else "were"
    text = f"{few(target.refused, 3)} beside the weights {were} not read, since no such step can be, and may be newer"
    return [Note("warning", "unread", text)]
