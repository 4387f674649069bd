"""The components of a checkpoint by their names, including those that only the content of its files shows."""

from __future__ import annotations

import difflib
from dataclasses import replace

from ckpt_cli.discover.found import Found
from ckpt_cli.errors import CkptError, NotFound
from ckpt_cli.files.source import Files
from ckpt_cli.formats.registry import format_of, groups
from ckpt_cli.formats.torch_files.averages import is_average_name

SYNONYMS = {"regular": "model", "main": "model"}


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
        for name in names[1:]:
            if name not in taken:
                taken.add(name)
                places.append(replace(place, name=name, match=replace(place.match, component=name, group=name)))
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
    """The components that ``--type`` selects. Raises NotFound with the list of existing ones."""
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
            close = difflib.get_close_matches(name, there, n=1)
            raise NotFound(
                f"this checkpoint has no component {name}",
                path=found.path,
                expected=f"one of: {', '.join(there)}",
                hint=f"did you mean --type {close[0]}?" if close else "pass one of these to --type",
            )
    return names
