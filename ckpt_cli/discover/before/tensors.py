"""What tensors a step has otherwise than the steps around it: some lost, cut or in another dtype, or those of another step or run.

A training saves the same tensors at every step, also of a model whose class nobody knows, and of adapters. Only headers are read, and
samples until the first one that differs, which it does at once unless a file is a copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_cli.discover.before.steps import steps_around
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.discover.places import places_in
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.registry import describe, format_of
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import same_samples
from ckpt_cli.tensors.kinship import signs_agree, unrelated, unrelated_layers
from ckpt_cli.tensors.tensor import Tensor, same_bytes
from ckpt_cli.urls import is_remote

CODE = "step-tensors"
COPY = "other-step"

MOST_FILES = 16
"""Files of a step whose headers and pickles cost next to nothing; those of hundreds of ranks would double the time of a plan."""

Tensors = Mapping[str, Tensor]


def step_tensors_notes(found: Found, place: Place, tensors: Tensors, options: ReadOptions, files: Files) -> list[Note]:
    """Warnings about the tensors of a step, where every neighbour that there is has them otherwise, or one has the same values in all.

    Saves of more than `MOST_FILES` are not opened a second time for it, nor those in a store.
    """
    if is_remote(found.path) or len(place.match.files) > MOST_FILES or not tensors:
        return []
    told: list[tuple[str, str]] = []
    with contextlib.suppress(CkptError):  # another step is only looked at for a warning
        for step in steps_around(found):
            others = _of_step(step, found, place, options, files)
            if others is None:
                continue
            same = _same_files(tensors, others)
            if same and all(same.values()) and others.keys() == tensors.keys():
                text = f"the tensors of {place.name} in {found.path.name} are those of {step.name} (samples of all are equal)"
                return [Note("warning", COPY, text)]
            copied = [name for name, is_same in same.items() if is_same]
            if copied and (changed := _changed(copied, step, tensors, found, place, options, files)):
                text = f"{found.path.name} and {step.name} hold the same tensors in {few(changed, 3)} (samples of all are equal)"
                return [Note("warning", COPY, f"{text}, which other steps have not: a file may be that of the other step")]
            told.append((step.name, _difference(tensors, others) or _unrelated(tensors, others)))
    if not told or not all(said for _, said in told):
        return []
    name, said = told[0]
    text = f"{place.name} in {found.path.name} is not what {name} has: {said}"
    return [Note("warning", CODE, f"{text}; steps of one training hold the same tensors, and are near each other")]


def _of_step(step: Path, found: Found, place: Place, options: ReadOptions, files: Files) -> Tensors | None:
    """The tensors of the same component, in the same place of another step."""
    other = Found(step, step_of(step), places_in(step, Folders())).place(place.name)
    if other is None or other.match.root.relative_to(step) != place.match.root.relative_to(found.path):
        return None
    return describe(other.match, files, options).tensors if format_of(other.match) is format_of(place.match) else None


def _unrelated(mine: Tensors, others: Tensors) -> str:
    """What of two steps has nothing in common, as samples of matrices tell; nothing for steps of one training."""
    if signs_agree(mine, others):
        return ""
    if (measured := unrelated(mine, others)) is not None:
        return f"the weights have nothing in common: {measured}"
    strange = unrelated_layers(mine, others)
    return f"some layers have nothing in common, while others have: {strange}" if strange is not None else ""


def _same_files(tensors: Tensors, others: Tensors) -> dict[str, bool]:
    """The names of a step's files, each with whether another step has the same bytes in all its tensors."""
    held: dict[str, bool] = {}
    for name, tensor in tensors.items():
        file = _file_of(tensor)
        if file is not None and held.get(file, True):
            held[file] = name in others and _is_same(tensor, others[name])
    return held


def _changed(
    copied: Sequence[str], step: Path, tensors: Tensors, found: Found, place: Place, options: ReadOptions, files: Files
) -> list[str]:
    """Those of ``copied`` files that were trained: a third step has other values. What is the same in all steps is not trained."""
    beside = Found(step, step_of(step), ())
    steps = [each for each in (*steps_around(found), *steps_around(beside)) if each not in (step, found.path)]
    for third in steps[:1]:
        others = _of_step(third, found, place, options, files)
        if others is not None:
            same = _same_files({name: each for name, each in tensors.items() if _file_of(each) in copied}, others)
            return [name for name in copied if not same[name]]
    return []


def _file_of(tensor: Tensor) -> str | None:
    """The name of the file that holds a tensor; None for one without elements."""
    return Path(tensor.pieces[0].source.path).name if tensor.pieces else None


def _is_same(mine: Tensor, other: Tensor) -> bool:
    """Whether the bytes are equal and not those of one file, which a link or a second name leads to: that is told elsewhere."""
    return not same_bytes([mine], [other]) and same_samples(mine, other)


def _difference(mine: Tensors, others: Tensors) -> str:
    """What one step has otherwise than another one; nothing where most names differ, as in another kind of save."""
    both = mine.keys() & others.keys()
    if 2 * len(both) < min(len(mine), len(others)):
        return ""
    kinds = {
        "without": [name for name in others if name not in mine],
        "with another shape of": [name for name in others if name in both and mine[name].shape != others[name].shape],
        "with another dtype of": [name for name in others if name in both and mine[name].dtype != others[name].dtype],
    }
    if len(kinds["with another dtype of"]) == len(both):
        del kinds["with another dtype of"]  # a save in another dtype, of which the sizes of files tell
    return ", ".join(f"{what} {few(names, 2)}" for what, names in kinds.items() if names)
