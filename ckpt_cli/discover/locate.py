"""From what the user typed to files: run -> checkpoint (step) -> component.

A *run* holds checkpoints in step folders, a *checkpoint* holds components. Only names are used here, and every folder is listed
once; with ``--step`` only that step's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.discover.beside.final_model import stray_files
from ckpt_cli.discover.beside.optimizer import optimizer_error
from ckpt_cli.discover.between import in_parts, is_chosen
from ckpt_cli.discover.components import with_lost
from ckpt_cli.discover.downloads.hub_cache import repository_in, snapshot_of
from ckpt_cli.discover.forms.composite import composite_in
from ckpt_cli.discover.found import Place, Target
from ckpt_cli.discover.nodes.also import with_also
from ckpt_cli.discover.nodes.parents import mark_partial_steps, node_folders
from ckpt_cli.discover.places import all_doubtful, all_refused, inside_checkpoint, lists_nothing, places_in
from ckpt_cli.discover.steps import (
    Steps,
    bare_in,
    partial_in,
    release_of,
    steps_in,
    steps_of_run,
    with_step,
    without_tags,
)
from ckpt_cli.discover.tags import trackers_in
from ckpt_cli.errors import CkptError, NotFound, NotRecognised, Undecidable, Unreadable, UsageError
from ckpt_cli.files.folders import Folders, same_file, similar_hint, status_of
from ckpt_cli.files.manifest import refuse_unfinished
from ckpt_cli.files.streams.pipes import refuse_pipe
from ckpt_cli.formats.foreign import foreign_error
from ckpt_cli.formats.registry import recognise
from ckpt_cli.formats.sets.stages import part_of_stages, stage_error
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.formats.trainers import RUNS
from ckpt_cli.formats.weight_names import may_hold_weights
from ckpt_cli.hub_ids import of_path
from ckpt_cli.names import few, printable
from ckpt_cli.paths import absolute
from ckpt_cli.urls import is_remote

MAX_LOOKED_INTO = 200
"""Folders that are looked into for a hint."""

LEVELS = 3
"""How far down: Lightning keeps ``lightning_logs/version_0/checkpoints/``."""


def locate(path: str | os.PathLike[str], step: int | None = None, also: Sequence[Path] = (), *, steps: bool = False) -> Target:
    """Determine what a path is; ``also`` are folders of other nodes with more files of the same checkpoints (`with_also`).

    ``steps``: steps are requested, so a model beside them is not meant.
    Raises NotFound or NotRecognised, with what is there and a suggestion.
    """
    for each in (path, *also):
        refuse_pipe(each)
    there = Folders()
    parts = [_locate_first(Path(path), step, also, steps, there)]
    target = parts[0]
    for number, other in enumerate(also):
        _check_exists(other)
        if any(same_file(before, other) for before in (path, *also[:number])):
            what = "the folder itself" if same_file(path, other) else "a folder twice"
            raise UsageError(f"--also names {what}: {other}", hint="leave it out")
        parts.append(_locate_other(other, step, steps, there))
        target = with_also(target, parts[-1])
    return with_lost(mark_partial_steps(target, parts) if target.run is not None else target, there)


def _locate_first(path: Path, step: int | None, also: Sequence[Path], steps: bool, there: Folders) -> Target:
    try:
        return _locate(path, step, steps, there)
    except NotFound as error:
        if step is not None and status_of(path) is not None:
            for other in also:
                with contextlib.suppress(CkptError):
                    _locate(other, step, steps, there)
                    error.hint = f"only {other} has it, and --also adds files to steps that PATH has"
        raise


def _locate_other(path: Path, step: int | None, steps: bool, there: Folders) -> Target:
    try:
        return _locate(path, step, steps, there)
    except NotFound as error:
        if step is not None:
            error.hint = f"--also adds files to step {step}: pass the folder of a node that has it, or leave it out"
        raise


def _locate(given: Path, step: int | None, steps_meant: bool, there: Folders) -> Target:
    _check_exists(given)
    if given.name == "" or ".." in given.parts or (len(given.parts) == 1 and step_of(Path(absolute("."))) is not None):
        # "link/.." is not the folder that the link lies in, and a tag in the current folder does not show whose it is.
        given = Path(os.path.realpath(given))
    snapshot = snapshot_of(given, there)
    if snapshot is not None:
        return replace(_locate(snapshot, step, steps_meant, there), path=snapshot)
    release = release_of(given, there) if step == 0 else None
    if release is not None:
        inside = inside_checkpoint(release, there)
        if inside is not None:
            return replace(inside, checkpoints=tuple(replace(found, step=0) for found in inside.checkpoints))
    stray: tuple[str, str] | None = None
    unchosen: Target | None = None
    if step is None and not steps_meant:
        inside = inside_checkpoint(given, there)
        steps = steps_of_run(given, there) if inside is not None and there.is_folder(given) else Steps()
        if inside is not None and inside.checkpoints[0].step is not None:
            steps = without_tags(steps)
        if inside is not None and steps:
            stray = stray_files(given, [place.match for place in inside.checkpoints[0].places])
        if inside is not None and not is_chosen(inside.checkpoints[0].places[0]):
            unchosen, inside = inside, None
        # What is refused by name beside steps, such as one file of a set, does not hide them, and neither does a stray file.
        if inside is not None and stray is None and not (_is_no_model(inside.checkpoints[0].places) and steps.found):
            refused = tuple(inside.label(found.path) for found in steps.found if all_refused(found.places))
            return replace(inside, steps_inside=len(steps.found) - len(refused), refused=refused)
    # A file for each step only counts where no folder or file is the model by its name.
    steps = steps_of_run(given, there, step, files=True) or steps_of_run(given, there, files=True)  # all of them, to say which there are
    if steps:
        trackers, unread = trackers_in(steps.folders, there)
        target = Target(
            given,
            steps.folders[0] if len(steps.folders) == 1 else given,
            steps.found,
            trackers=trackers,
            unread_trackers=unread,
            bare=bare_in(given, steps, there, step),
            blocked=steps.blocked,
            stray=stray,
            partial=partial_in(list(dict.fromkeys((*steps.folders, *(found.path.parent for found in steps.found)))), there),
            made=steps.made,
            folders=steps.folders if len(steps.folders) > 1 else (),
        )
        if not steps.found:
            target.check_readable(lambda _: True)
        return with_step(target, step)
    if step is not None or steps_meant:
        inside = inside_checkpoint(given, there)
        if inside is not None:
            return with_step(inside, step)
    # What cannot be looked at beside them may hold weights too.
    with contextlib.suppress(Unreadable):
        unchosen = unchosen or inside_checkpoint(given, there, between=True)
        if unchosen is not None and is_chosen(unchosen.checkpoints[0].places[0]):
            return with_step(unchosen, step)
    for name in RUNS:
        inside = inside_checkpoint(given / name, there)
        if inside is not None and all_refused(inside.checkpoints[0].places):
            return replace(inside, path=given)
    nodes = node_folders(given, step, there)
    if nodes is not None:
        return nodes
    stages = [path for path in there.entries(given) if there.is_folder(path) and stage_error(path, there) and recognise(path, there)]
    if stages:
        raise part_of_stages(stages[0], stages[1:])
    if unchosen is not None:
        return unchosen
    cached = repository_in(given, there)
    if cached is not None:
        return _locate(cached, step, steps_meant, there)
    refuse_unfinished(given, there)
    if (whole := composite_in(given, there)) is not None:
        raise in_parts(whole)
    near, more = _nearest(given, there)
    foreign = optimizer_error(given, there) or foreign_error(given, there, 0) or (None if near else foreign_error(given, there))
    raise foreign or NotRecognised(
        "no checkpoint was recognised here",
        path=given,
        expected="a run, a step folder, a folder of rank files, or safetensors",
        hint=_suggestion(given, near, more, there),
    )


def _is_no_model(places: Sequence[Place]) -> bool:
    """Whether what lies beside steps hides them no more than nothing does."""
    return all_doubtful(places) or lists_nothing(places)


def _check_exists(path: Path) -> None:
    """Raise NotFound, with a suggestion, if nothing is there; Unreadable if that cannot be determined."""
    if status_of(path) is not None:
        return
    parent = path.parent
    if path.is_symlink():
        raise NotFound(f"this is a link to {printable(os.readlink(path))}, which does not exist", path=path)
    hint = None
    try:
        hint, lost = similar_hint(path), status_of(parent) is None
        nothing = f"nothing in {absolute(parent)} has a similar name"
        if not lost and is_remote(parent) and not _is_listed(parent):
            nothing = (
                f"what lies in {parent} is not known: pass the address of a file, of a folder that can be listed, or of a model folder"
            )
        hint = hint or (f"{parent} does not exist either" if lost else nothing)
        if (named := of_path(str(path))) is not None:
            hint = f"{hint}; if the model of the Hub is meant, {named.advice()}"
    except Unreadable:
        pass  # what else is there is only asked for the hint
    raise NotFound("no such file or folder", path=path, hint=hint)


def _is_listed(folder: Path) -> bool:
    """Whether it is known what lies in a folder of a store: not where a web server shows no list, nor above what was given."""
    from ckpt_cli.files.remote.tree import remote_entries

    return remote_entries(folder) is not None


def _nearest(path: Path, there: Folders) -> tuple[list[Path], bool]:
    """The nearest folders in which something is recognised: that of a file, else those a few levels down, else the one above.

    Where there is none, files below that are recognised by themselves: of any name, as Lightning's are. They are named too where the
    folders are called like them. The second value: whether there may be more further down.
    """
    folder = path if there.is_folder(path) else path.parent
    found: list[Path] = []
    files: list[Path] = []
    level, left, more = [folder], MAX_LOOKED_INTO, False
    for depth in range(LEVELS + 1):
        more = more or len(level) > left
        inner: list[Path] = []
        for candidate in level[:left]:
            # What cannot be looked at is not suggested.
            with contextlib.suppress(CkptError, OSError):
                is_given = same_file(candidate, path)
                if not there.is_folder(candidate) or (is_given and depth):
                    continue
                left -= 1
                if not is_given and _holds_checkpoint(candidate, there):
                    found.append(candidate)
                elif depth < (LEVELS - 1 if found else LEVELS):
                    inner += there.entries(candidate)
                    files += [file for file in there.files(candidate, may_hold_weights) if _is_checkpoint(file, there)]
                else:
                    more = True
        if found and not depth:
            return found, False
        level = inner
    with contextlib.suppress(CkptError, OSError):
        if not found and _holds_checkpoint(folder.parent, there, surely=True):
            return [folder.parent], False
    if folder != path:
        return found, more
    # Whoever saves steps as files may put a folder with the state of each beside it.
    own = [file for file in files if file.parent == folder]
    are_states = all(
        any(candidate.name.startswith((f"{file.stem}-", f"{file.stem}_", f"{file.stem}.")) for file in own) for candidate in found
    )
    return [*(own if are_states else ()), *found] if found else files, more


def _holds_checkpoint(folder: Path, there: Folders, *, surely: bool = False) -> bool:
    """Whether something in a folder is a checkpoint, or, if not ``surely``, one of several files that nothing tells apart."""
    beneath = (place for found in steps_in(folder, there, files=True)[0] for place in found.places)
    troubles = (place.match.trouble for place in (*places_in(folder, there), *beneath))
    return any(trouble is None or (not surely and isinstance(trouble, Undecidable)) for trouble in troubles)


def _is_checkpoint(file: Path, there: Folders) -> bool:
    return any(match.trouble is None for match in recognise(file, there))


def _suggestion(path: Path, near: Sequence[Path], more: bool, there: Folders) -> str | None:
    """What is near, or what was given."""
    if len(near) == 1:
        # "." says nothing to somebody who just typed a path in it.
        return f"did you mean {shell.path(near[0] if near[0].name else absolute(near[0]))}?"
    is_file = not there.is_folder(path)
    if near:
        folder = path.parent if is_file else path
        names = few([candidate.relative_to(folder).as_posix() for candidate in near], 4)
        return f"{'at least ' if more else ''}{len(near)} checkpoints {'beside it' if is_file else 'below'}: {names}"
    if is_file:
        return f"ckpt knows no file of weights with a name like {printable(path.name)}"
    try:
        entries = there.entries(path)
    except Unreadable:
        return None
    return f"the folder holds {few([entry.name for entry in entries], 5)}" if entries else "the folder is empty"
