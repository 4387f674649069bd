"""The components of a checkpoint by their names, including those that only the content of its files shows."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_cli.discover.found import Found, Place, Target
from ckpt_cli.errors import CkptError, NoComponent
from ckpt_cli.files.source import Files
from ckpt_cli.formats.registry import format_of, groups
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.names import few, numbered
from ckpt_cli.tensors.component import Note

OPTIMIZERS = ("optim", "optimizer", "optimizers", "optimizer_state")
"""What people call what is no component: `extract-state` writes it."""

SYNONYMS = {"regular": "model", "main": "model"}
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
                places[places.index(place)] = replace(place, match=replace(place.match, trouble=error))
            continue
        if names and names[0] not in taken and place.name == "model" and (len(names) > 1 or names[0] == "ema"):
            # No state dict is called model, so that the first one goes by its own name.
            taken.add(names[0])
            places[places.index(place)] = replace(place, name=names[0])
        for group in names[1:]:
            name = numbered(group, place.match.number)
            if name not in taken:
                taken.add(name)
                places.append(replace(place, name=name, match=replace(place.match, component=group, group=group)))
    return replace(found, places=tuple(places))


def with_ema_of_model(found: Found) -> Found:
    """The checkpoint with its main component under the name "ema" as well, if it has no EMA of its own."""
    model = found.places[0]
    if called_ema(found) is not None:
        return found
    return replace(found, places=(*found.places, replace(model, name="ema")))


def called_ema(found: Found) -> str | None:
    """The component that ``--type ema`` means: the one of that name, or the only one whose name is an average's."""
    there = [place.name for place in found.places]
    averages = ["ema"] if "ema" in there else [name for name in there if is_average_name(name)]
    return averages[0] if len(averages) == 1 else None


def component_names(found: Found, wanted: str | None) -> list[str]:
    """The components that ``--type`` selects. Raises NoComponent with the list of existing ones."""
    there = [place.name for place in found.places]
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
            unknown = next(
                (place.match.trouble for place in found.places if format_of(place.match).by_content and place.match.trouble), None
            )
            if unknown is not None:
                raise unknown
            raise _no_component("this checkpoint has no", name, found.path, {other: other for other in there})
    return names


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
    return _no_component("no step of this run has a", lacking[0].message.partition("component ")[2], target.path, shown)


def _no_component(who: str, name: str, path: Path, there: Mapping[str, str]) -> NoComponent:
    """The error for a component that is not ``there``, where names go with what is shown of them."""
    close = [other for other in there if other.lower() == name.lower()] or difflib.get_close_matches(name, there, n=1)
    if name in OPTIMIZERS:
        hint = f"ckpt extract-state {shlex.quote(str(path))} --optimizer writes the state of the optimizer"
    else:
        listed = set(filter(None, re.split(r"[\s,+]+", name)))
        several = "both" if listed <= {"model", "ema"} & set(there) else "all"
        if len(listed) > 1 and listed <= set(there):
            hint = f"--type {several} takes {'both' if several == 'both' else 'all components'}"
        else:
            hint = f"did you mean --type {close[0]}?" if close else "pass one of these to --type"
    return NoComponent(
        f"{who} component {name}",
        path=path,
        expected=f"one of: {', '.join(there.values())}",
        hint=hint,
    )


def numbered_notes(target: Target, found: Found, wanted: str | None) -> list[Note]:
    """What is said where accelerate saved several models: of those that nobody asked for, and of a number 0 that is not there."""
    main, notes = found.places[0], []
    others = [place.name for place in found.places if _is_other_model(place, main)]
    if others and wanted is None:
        which = "is another model" if len(others) == 1 else "are other models"
        text = f"{_told(main)} was taken; {few(others)} {which} of this checkpoint (--type {others[0]})"
        notes.append(Note("warning", "other-models", text))
    if main.match.number and wanted in (None, "both", *MAIN_MEANT) and not _was_given(target, found):
        text = f"{_told(main)} is number {main.match.number} of several models, and number 0 is not here"
        notes.append(Note("warning", "no-first-model", f"{text}: taken as {main.name}"))
    return notes


def _is_other_model(place: Place, main: Place) -> bool:
    return place.match.number != main.match.number and place.match.group is None and not is_average_name(place.name)


def _was_given(target: Target, found: Found) -> bool:
    """Whether the path was that of the component's own folder or file, beside which anything may lie."""
    return target.run is None and (target.path != found.path or target.path in found.places[0].match.files)


def _told(place: Place) -> str:
    """A component by its folder, or by its first file where these lie in the checkpoint's own folder."""
    return place.match.first.name if place.match.root in (place.home, place.match.first) else f"{place.match.root.name}/"
