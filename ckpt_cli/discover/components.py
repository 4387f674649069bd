"""The components of a checkpoint by their names, including those that only the content of its files shows."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.discover.forms.registered import hint_of_registered
from ckpt_cli.discover.forms.samples import sample_steps
from ckpt_cli.discover.found import Found, Place, Target
from ckpt_cli.discover.places import MAIN
from ckpt_cli.discover.steps import steps_of_run
from ckpt_cli.errors import CkptError, IncompleteError, NoComponent, PartOfSet, Undecidable, Unreadable
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.registry import format_of, groups, recognise
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.formats.torch_files.groups import MEANT
from ckpt_cli.formats.torch_files.groups import NAME as SELECTED
from ckpt_cli.formats.torch_files.way_down import SeveralGroups
from ckpt_cli.formats.trainers import ROLES
from ckpt_cli.formats.weight_names import AVERAGED, may_hold_weights
from ckpt_cli.names import few, numbered
from ckpt_cli.tensors.component import Note

OPTIMIZERS = ("optim", "optimizer", "optimizers", "optimizer_state")
"""What people call what is no component: `extract-state` writes it."""

SYNONYMS = {"regular": "model", "main": "model"}
NUMBER = re.compile(r"[0-9]+", re.ASCII)

MAIN_MEANT = ("model", *SYNONYMS)
"""What ``--type`` calls the main component, also where that has another name."""


def expanded(found: Found, files: Files) -> Found:
    """The checkpoint with the state dicts inside of each component as components: a DCP folder may hold several."""
    places = list(found.places)
    taken = {place.name for place in places}
    for place in found.places:
        try:
            names = groups(place.match, files)
        except CkptError as error:
            # What it holds is not known; whoever asks for a component of it is told why.
            if place.match.trouble is None:
                asked = (
                    [key for key in (*error.keys, *error.averages) if SELECTED.fullmatch(key)] if isinstance(error, SeveralGroups) else []
                )
                asked = [key for key in asked if numbered(key, place.match.number) not in (*taken, *MEANT)]
                if asked:
                    error.hint = f"pass one of these to --type: {', '.join(numbered(key, place.match.number) for key in asked)}"
                places[places.index(place)] = replace(place, match=replace(place.match, trouble=error))
                places += [_group_in(place, key) for key in asked]
                taken.update(numbered(key, place.match.number) for key in asked)
            continue
        if names and names[0] not in taken and place.name == "model" and (len(names) > 1 or names[0] == "ema"):
            # No state dict is called model, so that the first one goes by its own name.
            taken.add(names[0])
            places[places.index(place)] = replace(place, name=names[0])
        for group in names[1:]:
            name = numbered(group, place.match.number)
            if name not in taken:
                taken.add(name)
                places.append(_group_in(place, group))
    return replace(found, places=tuple(places))


def _group_in(place: Place, group: str) -> Place:
    """A state dict inside of a component's files, as a component of its own."""
    return replace(place, name=numbered(group, place.match.number), match=replace(place.match, component=group, group=group))


def with_ema_of_model(found: Found) -> Found:
    """The checkpoint with its main component under the name "ema" as well, if it has no EMA of its own."""
    model = found.places[0]
    if any(is_average_name(place.name) for place in found.places) or found.lost:
        return found
    return replace(found, places=(*found.places, replace(model, name="ema")))


def called_ema(found: Found) -> str | None:
    """The component that ``--type ema`` means: the one of that name, or the only one whose name is an average's."""
    there = [place.name for place in found.places]
    averages = ["ema"] if "ema" in there else [name for name in there if is_average_name(name)]
    return averages[0] if len(averages) == 1 else None


def with_lost(target: Target, there: Folders) -> Target:
    """The target, with the checkpoints marked as such that lost their main component: where they hold a critic or an average alone.

    Its folder tells, if that is still there without weights, or the other steps of the run, which have one. Nothing is lost of a component
    that was passed itself, and of runs that save nothing else. Steps of a run that hold samples only are marked too (`sample_steps`).
    """
    samples = sample_steps(target)
    target = replace(target, checkpoints=tuple(replace(found, lost=samples.get(found.path, "")) for found in target.checkpoints))
    alone = [found for found in target.checkpoints if found.given in (None, found.path) and _main_of(found) is None]
    if not alone:
        return target
    marked = {found.path: replace(found, lost=_empty_main(found, there) or _main_of_others(found, target, there)) for found in alone}
    return replace(target, checkpoints=tuple(marked.get(found.path, found) for found in target.checkpoints))


def _main_of(found: Found) -> str | None:
    """The main component, by names; None if there are only such as are saved beside one, or others of several models."""
    names = (place.name for each in (found, *found.more) for place in each.places)
    return next((name for name in names if name in MAIN), None)


def _empty_main(found: Found, there: Folders) -> str:
    """What shows that a folder of the main component holds no weights any more."""
    if step_of(found.path) is None or not there.is_folder(found.path):
        return ""
    empty = there.folders(found.path, lambda name: name in ROLES and name in MAIN)
    return _lost(empty[0].name, "whose folder holds no weights") if empty else ""


def _main_of_others(found: Found, target: Target, there: Folders) -> str:
    """What shows that the steps beside this one, of names like its own, have a main component."""
    if found.step is None:
        return ""
    others = target.checkpoints if target.run is not None else ()
    if len(others) < 2:
        with contextlib.suppress(CkptError):
            others = steps_of_run(found.path.parent, there).found
    having = [(other.path.name, main) for other in others if named_alike(other.path, found.path) and (main := _main_of(other))]
    if not having:
        return ""
    return _lost(having[-1][1], f"which {few([name for name, _ in reversed(having)], 1)} {'has' if len(having) == 1 else 'have'}")


def _lost(name: str, shown: str) -> str:
    return f"the main component is missing: {name}, {shown}"


def component_names(found: Found, wanted: str | None) -> list[str]:
    """The components that ``--type`` selects.

    Raises NoComponent with the list of existing ones, IncompleteError where the main one is meant and lost.
    """
    there = [place.name for place in found.places]
    if found.lost and wanted in (None, "all", "both", *MAIN_MEANT):
        raise IncompleteError(
            found.lost,
            path=found.path,
            hint=_hint_of_lost(found, there),
        )
    main, ema = there[0], called_ema(found) or "ema"
    if wanted is None:
        return [main]
    if wanted == "all":
        return there
    if wanted == "both":
        names = list(dict.fromkeys((main, ema)))
    else:
        name = ema if wanted == "ema" else SYNONYMS.get(wanted, wanted)
        names = [main if name == "model" and "model" not in there and main != "ema" else name]
    for name in names:
        if name not in there:
            unknown = next((place.match.trouble for place in found.places if place.match.trouble and _is_unknown(place.match)), None)
            if unknown is not None:
                raise unknown
            error = _no_component("this checkpoint has no", name, found.path, {other: other for other in there})
            if is_average_name(name) and (hint := hint_of_registered(found)) is not None:
                error.hint = hint
            raise error
    return names


def _is_unknown(match: Match) -> bool:
    """Whether only reading the files of a match, which failed, would say which components are in them."""
    if isinstance(match.trouble, Undecidable) and not isinstance(match.trouble, SeveralGroups):
        return True  # each of them may have what is asked for
    known = format_of(match)
    return known.by_content or (known.single_file(match) is not None and not isinstance(match.trouble, SeveralGroups | PartOfSet))


def _hint_of_lost(found: Found, there: Sequence[str]) -> str:
    if there[0] in MAIN:
        return f"pass {shell.path(found.path)} itself if that is the model"
    return f"--type {there[0]} takes what is here" if len(there) == 1 else f"pass one of these to --type: {', '.join(there)}"


def why_none(target: Target, errors: Sequence[tuple[Found, CkptError]], wanted: str | None, files: Files) -> CkptError | None:
    """Why no checkpoint of a run can be used, of the errors with which they were passed over, newest first.

    That of the newest that has the component which ``wanted`` means; if none has it, what all of them have instead.
    """
    lacking = [error for _, error in errors if isinstance(error, NoComponent)]
    if len(errors) < 2 or not lacking:
        return errors[0][1] if errors else None
    there: dict[str, list[str]] = {}
    for listed, error in errors:
        found = expanded(listed, files)
        try:
            component_names(found, wanted)
        except CkptError:
            for place in found.places:
                there.setdefault(place.name, []).append(target.label(found.path))
        else:
            return error
    shown = {name: name if len(steps) == len(errors) else f"{name} (only in {few(steps, 3)})" for name, steps in there.items()}
    homes = (target.path, *(found.path.parent for found in target.checkpoints))
    return _no_component("no step of this run has a", lacking[0].message.partition("component ")[2], target.path, shown, homes)


def _no_component(who: str, name: str, path: Path, there: Mapping[str, str], homes: Sequence[Path] = ()) -> NoComponent:
    """The error for a component that is not ``there``, where names go with what is shown of them.

    Averages are looked for in the ``homes`` of a run, or else in the folder of a checkpoint, and in that of the steps around it.
    """
    close = [other for other in there if other.lower() == name.lower()] or difflib.get_close_matches(name, there, n=1)
    if name in OPTIMIZERS:
        hint = f"ckpt extract-state {shell.path(path)} --optimizer writes the state of the optimizer"
    else:
        listed = set(filter(None, re.split(r"[\s,+]+", name)))
        several = "both" if listed <= {"model", "ema"} & set(there) else "all"
        if len(listed) > 1 and listed <= set(there):
            hint = f"--type {several} takes {'both' if several == 'both' else 'all components'}"
        else:
            alone = f"leave out --type: {next(iter(there))} is all that is here" if len(there) == 1 else "pass one of these to --type"
            hint = f"did you mean --type {close[0]}?" if close else alone
            around = homes or ((path, path.parent) if step_of(path) is not None else (path,))
            if not close and is_average_name(name) and (averages := _averages_in(around)):
                which = "is called like an average: pass it" if len(averages) == 1 else "are called like averages: pass one of them"
                hint = f"{few(averages, 3)} {which}"
    return NoComponent(
        f"{who} component {name}",
        path=path,
        expected=f"one of: {', '.join(there.values())}" if len(there) > 1 else next(iter(there.values()), None),
        hint=hint,
    )


def _averages_in(folders: Sequence[Path]) -> list[str]:
    """What in some folders is called like an average and may hold weights, but was not read as one."""
    there = Folders()
    found: list[Path] = []
    with contextlib.suppress(Unreadable):
        for folder in filter(there.is_folder, dict.fromkeys(folders)):
            found += there.files(folder, lambda name: AVERAGED.fullmatch(name) is not None and may_hold_weights(name))
            below = there.folders(folder, lambda name: AVERAGED.fullmatch(name) is not None)
            found += [entry for entry in below if recognise(entry, there)]
    return [shell.path(entry) for entry in found]


def several_notes(target: Target, found: Found, wanted: str | None) -> list[Note]:
    """What is said of components: of models that nobody asked for, of a number 0 that is not there, and of what all steps but this have."""
    main, notes = found.places[0], _fewer_notes(target, found) if wanted == "all" else []
    others = [place.name for place in found.places if _is_other_model(place, main)]
    if others and wanted is None:
        which = "is another model" if len(others) == 1 else "are other models"
        text = f"{_told(main)} was taken; {few(others)} {which} of this checkpoint (--type {others[0]})"
        notes.append(Note("warning", "other-models", text))
    if main.match.number and wanted in (None, "both", *MAIN_MEANT) and not _was_given(target, found):
        text = f"{_told(main)} is number {main.match.number} of several models, and number 0 is not here"
        notes.append(Note("warning", "no-first-model", f"{text}: taken as {main.name}"))
    return notes


def unread_averages(target: Target, found: Found, wanted: str | None) -> list[Note]:
    """What is said of averages in the folder of a checkpoint that are none of its components, such as an adapter's in its own folder."""
    if wanted not in (None, "all") or _was_given(target, found):
        return []
    read = {shell.path(path) for place in found.places for path in (place.match.root, *place.match.files, *place.match.root.parents)}
    unread = [path for path in _averages_in((found.path,)) if path not in read]
    if not unread:
        return []
    which = "is called like an average, and was" if len(unread) == 1 else "are called like averages, and were"
    text = f"{few(unread, 3)} {which} not read as a component: ckpt merge {unread[0]} merges it"
    return [Note("info" if wanted is None else "warning", "unread", text)]


def _fewer_notes(target: Target, found: Found) -> list[Note]:
    """A warning if the step before has components that this one lacks, where all of them are meant."""
    age = target.age
    older = [other for other in target.checkpoints if age(other) < age(found) and named_alike(other.path, found.path)]
    there = {place.name for place in found.places}
    lacking = [place.name for place in older[-1].places if place.name not in there and place.match.group is None] if older else []
    if not lacking:
        return []
    text = f"{target.label(found.path)} has no {few(lacking)}, which {target.label(older[-1].path)} has"
    return [Note("warning", "fewer-components", text)]


def named_alike(one: Path, other: Path) -> bool:
    """Whether the folders of two steps are named in one way, as those of one training are."""
    return NUMBER.sub("N", one.name) == NUMBER.sub("N", other.name)


def _is_other_model(place: Place, main: Place) -> bool:
    return place.match.number != main.match.number and place.match.group is None and not is_average_name(place.name)


def _was_given(target: Target, found: Found) -> bool:
    """Whether the path was that of the component's own folder or file, beside which anything may lie."""
    return target.run is None and (target.path != found.path or target.path in found.places[0].match.files)


def _told(place: Place) -> str:
    """A component by its folder, or by its first file where these lie in the checkpoint's own folder."""
    return place.match.first.name if place.match.root in (place.home, place.match.first) else f"{place.match.root.name}/"
