"""What a checkpoint folder holds, by names: components directly, in role folders (``actor/``), or in folders of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_cli.discover.beside.outputs import as_merged
from ckpt_cli.discover.between import doubted, is_chosen, step_above, weights_beneath
from ckpt_cli.discover.found import Found, PassedOver, Place, Target
from ckpt_cli.discover.tags import has_tag_file, names_own_tag, passed_over_by_latest, step_at, tag_notes, tags_below, tags_of
from ckpt_cli.errors import Unreadable
from ckpt_cli.files.folders import Folders, broken_link, status_of
from ckpt_cli.files.manifest import NAME as MANIFEST
from ckpt_cli.formats.ages import MAX_SECONDS
from ckpt_cli.formats.base import WEIGHTS_16, Match
from ckpt_cli.formats.registry import format_of, order_of, recognise, tags_in
from ckpt_cli.formats.step_names import counter_of, numbered_path, step_of
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.formats.trainers import CERTAIN, ROLES, number_in
from ckpt_cli.hub.peft_names import ADAPTER_CONFIG
from ckpt_cli.names import few, numbered, unnumbered
from ckpt_cli.tensors.component import Note

MAIN, SECOND = ("model", *ROLES[:2]), ROLES[2:]


def inside_checkpoint(path: Path, there: Folders, *, between: bool = False) -> Target | None:
    """The path as a checkpoint, a role folder, a component folder or a file of one.

    ``between``: weights may lie in a folder of any name below it, if that is the only one.
    """
    if steps_of_epoch(path, there):
        return None
    above = _of_step_above(path, there) or _behind_link(path, there, between=between)
    if above is not None:
        return above
    places = places_in(path, there, between=between)
    if places:
        name = path.name
        of_folder = (name, 0) if name in ROLES else _component_of(name)
        in_tag = step_of(path.parent) is not None and not steps_of_epoch(path.parent, there)
        in_tag = in_tag and any(format_of(place.match).in_tags for place in places)
        root = path.parent if of_folder is not None or in_tag else path
        if name in ROLES:
            places = tuple(replace(place, name=name if place.name == "model" else place.name) for place in places)
        elif of_folder is not None:
            places = tuple(_numbered(place, *of_folder, root) for place in places)
        return Target(path, None, (Found(root, step_at(root, there), places, path),))
    if not there.is_file(path):
        return None
    matches = recognise(path, there)
    if not matches:
        return None
    outer = inside_checkpoint(path.parent, there) if matches[0].root == path.parent else None
    if outer is not None:
        found = outer.checkpoints[0]
        chosen = [
            place for place in found.places if (place.match.component, place.match.format) == (matches[0].component, matches[0].format)
        ]
        # What the folder is taken for may be another component than that of the file.
        own = [Place(match.component, match, path.parent) for match in matches]
        return Target(path, None, (replace(found, places=tuple(chosen or own), given=path),))
    return Target(path, None, (Found(path, step_at(Path(numbered_path(path)), there), places_of_file(path, there), path),))


def _of_step_above(path: Path, there: Folders) -> Target | None:
    """A folder inside of a step, as those components of the step that lie in it; by itself, if nothing tells what the step's model is."""
    step = step_above(path, there)
    if step is None:
        return None
    with contextlib.suppress(Unreadable):
        of_step = places_in(step, there)
        inside = tuple(place for place in of_step if path in (place.match.root, place.home, *place.match.root.parents))
        if not all(map(is_chosen, of_step)):
            inside = tuple(filter(is_chosen, inside)) or tuple(replace(place, home=path) for place in places_in(path, there)) or inside
        if inside:
            return Target(path, None, (Found(step, step_of(step), inside, path),))
    return None


def _behind_link(path: Path, there: Folders, *, between: bool) -> Target | None:
    """A step, or a folder in one, that the path only shows behind a link, or above the current folder: as what the links lead to."""
    if step_of(path) is not None or not there.is_folder(path):
        return None
    real = Path(os.path.realpath(path))
    if real == path or (step_of(real) is None and step_above(real, there) is None):
        return None
    inside = inside_checkpoint(real, there, between=between)
    return None if inside is None else replace(inside, path=path)


def places_of_file(path: Path, there: Folders) -> tuple[Place, ...]:
    """What is recognised in a file by itself; nothing in a folder."""
    return tuple(Place(match.component, match, path.parent) for match in recognise(path, there)) if there.is_file(path) else ()


def places_in(folder: Path, there: Folders, *, between: bool = False) -> tuple[Place, ...]:
    """The components of a checkpoint folder, the main one first. Raises Unreadable for a folder of a component that may hold anything."""
    if not there.is_folder(folder):
        return ()
    for entry in there.entries(folder):
        if _may_hold_component(entry.name) and there.is_broken(entry):
            raise broken_link(entry)
    places = [Place(match.component, doubted(match, there), folder) for match in recognise(folder, there)]
    if there.is_file(folder / MANIFEST):
        places = [as_merged(place) if place.name == "model" else place for place in places]
    children = [child.name for child in there.folders(folder, _may_hold_component)]
    for role in ROLES:
        if role in children:
            tagged = tags_of(folder / role, there) if has_tag_file(folder / role, there) else []
            held = recognise(folder / role, there) or tagged or weights_beneath(folder / role, there) or tags_of(folder / role, there)
            places += [Place(role, match, folder / role) for match in held if match.component == "model"]
    for child in children:
        of_folder = _component_of(child)
        if of_folder is not None:
            places += [_numbered(Place("", match, folder), *of_folder, folder) for match in recognise(folder / child, there)]
    read = {place.name for place in places if not all_refused([place])}
    places = [place for place in places if not all_refused([place]) or place.name not in read]
    if any(_is_main(place) for place in places):
        places = [place for place in places if not place.match.lists_nothing]
    is_known = between or step_of(folder) is not None or any(place.name in SECOND for place in places)
    if is_known and all(is_average_name(place.name) or place.name in SECOND for place in places):
        # An average or a critic is not what the step is about: Open-Sora keeps ema.pt beside the folder of the model.
        passed = passed_over_by_latest(folder, there) if not places else ()
        beneath = weights_beneath(folder, there, [place.match for place in places], passed)
        places += [Place(match.component, match, folder) for match in beneath]
        if beneath and passed and all(match.trouble is None for match in beneath):
            places += [
                Place("model", match, folder)
                for tag in passed
                for match in tags_in(tag, there)
                if tag not in {place.match.root for place in places}
            ]
    if lists_nothing(places) or has_tag_file(folder, there):
        tags = [Place("model", match, folder) for match in tags_of(folder, there)]
        places = _with_tag([place for place in places if not (tags and place.match.lists_nothing)], tags, there)
    return _chosen(places)


def steps_of_epoch(folder: Path, there: Folders) -> list[Path]:
    """The steps in a folder that is numbered by epochs, if these hold the weights and it holds none, and no tag that it names."""
    steps: list[Path] = []
    with contextlib.suppress(Unreadable):
        if counter_of(folder) == "epochs" and there.is_folder(folder) and not names_own_tag(folder, there):
            entries = [entry for entry in there.entries(folder) if counter_of(Path(entry.name)) == "steps"]
            steps = [entry for entry in entries if _may_be_folder(entry, there)]
    return steps if any(_may_be_read(step, there) for step in steps) and not recognise(folder, there) else []


def _may_be_folder(path: Path, there: Folders) -> bool:
    """Whether it is a folder, or whatever it is cannot be seen: a link that leads nowhere may be the newest step too."""
    try:
        return there.is_folder(path) or there.is_broken(path)
    except Unreadable:
        return True


def _may_be_read(folder: Path, there: Folders) -> bool:
    try:
        return bool(places_in(folder, there)) or there.is_broken(folder)
    except Unreadable:
        return True


def _with_tag(places: list[Place], tags: list[Place], there: Folders) -> list[Place]:
    """The save in a tag is the model; a whole model that the trainer gathered beside it has the weights in the dtype of the training.

    Adapters, and whatever else is no whole model, stay what they are: only a folder that is loaded as it is counts as gathered.
    """
    if not places or not tags or all_refused(tags):
        return places or tags
    gathered = [place for place in places if format_of(place.match).is_loaded or not format_of(place.match).is_sharded]
    if len(gathered) < len(places) or any(there.is_file(place.match.root / ADAPTER_CONFIG) for place in places):
        return places
    if any(there.is_file(place.match.root / MANIFEST) for place in places):
        return [*tags, *places]  # what was merged into the folder later is none of the trainer's
    return [*tags, *(replace(place, name=WEIGHTS_16) if place.name == "model" else place for place in places)]


def unread_notes(found: Found, place: Place) -> list[Note]:
    """A warning about saves of DeepSpeed in the folder of weights that are read.

    A copy of weights from elsewhere looks like one that belongs there, and names do not tell which of the two is newer. Looked for in the
    checkpoint that is read only: it takes a listing of every folder in it.
    """
    there, notes = Folders(), tag_notes(found, place)
    if all_refused([place]) or found.is_named(place) or not there.is_folder(found.path):
        return notes  # beside a single file anything may lie
    told: dict[str, None] = {}
    taken = {other.match.root for other in found.places}
    taken |= {other.folder for other in place.passed_over if other.folder is not None}  # of which is told already
    for folder in dict.fromkeys((found.path, place.home, place.match.root)):
        if not there.is_folder(folder):
            continue
        is_step = step_of(folder) is not None
        saves = {child: matches for child, matches in tags_below(folder, there).items() if is_step or step_of(child) is None}
        told |= dict.fromkeys(f"{child.name} ({match.evidence})" for child in saves if child not in taken for match in saves[child])
    if not told:
        return notes
    were = "was" if len(told) == 1 else "were"
    text = f"{few(list(told), 3)} beside the weights of {place.name} {were} not read"
    if _saved_together(found, place):
        return [*notes, Note("info", "unread", text)]
    return [*notes, Note("warning", "unread", f"{text}: the two may be of different steps")]


def _saved_together(found: Found, place: Place) -> bool:
    """Whether the weights are as old as the Trainer's own state: with ZeRO it writes gathered weights beside DeepSpeed's folder."""
    state, weights = (status_of(path) for path in (found.path / "trainer_state.json", place.match.first))
    return state is not None and weights is not None and abs(state.st_mtime - weights.st_mtime) < MAX_SECONDS


def lists_nothing(places: Sequence[Place]) -> bool:
    """Whether these are no weights: nothing, an index none of whose files is there, or a file that holds none."""
    return all(place.match.lists_nothing for place in places)


def _is_main(place: Place) -> bool:
    """Whether a place holds weights of a model that is no average and no second one."""
    return not (place.match.lists_nothing or is_average_name(place.name) or place.name in SECOND or all_refused([place]))


def all_refused(places: Sequence[Place]) -> bool:
    """Whether all of these are formats that are only recognised, to be refused."""
    return all(format_of(place.match).is_refused for place in places)


def all_doubtful(places: Sequence[Place]) -> bool:
    """Whether none of these is certainly weights that can be read, by its name."""
    return all(format_of(place.match).is_refused or format_of(place.match).is_unsure for place in places)


def _may_hold_component(name: str) -> bool:
    return name in ROLES or _component_of(name) is not None


def _component_of(folder: str) -> tuple[str, int] | None:
    """The component that a folder of this name holds, and its number among several; None if the name is none of these."""
    for name, component in CERTAIN.items():
        number = number_in(folder, (name,))
        if number is not None:
            return component, number
    return None


def _numbered(place: Place, component: str, number: int, home: Path) -> Place:
    """What lies in a component's folder. The folder's number counts: names of files in it need not have one."""
    return replace(place, name=numbered(component, number), match=replace(place.match, number=number), home=home)


def _chosen(places: Sequence[Place]) -> tuple[Place, ...]:
    """One place per component, the main one first. Where two formats claim a name, shards go before merged weights."""
    unique: dict[str, Place] = {}
    for place in sorted(places, key=lambda place: order_of(place.match)):
        first = unique.setdefault(place.name, place)
        if first is not place:
            passed = PassedOver(place.match, spoken(place.match), _own_folder(place, first))
            unique[place.name] = replace(first, passed_over=(*first.passed_over, passed))
    return tuple(sorted(unique.values(), key=_rank))


def spoken(match: Match) -> str:
    """The files of a component, as messages call them: "model_world_size_4_rank_0.pt and 3 more (rank-shards)"."""
    return f"{few([path.name for path in match.files], 1)} ({match.format})"


def _rank(place: Place) -> tuple[int, int]:
    """The main component first, then the other models of the same save, then the rest."""
    name, number = unnumbered(place.name)
    return (MAIN.index(name) if name in MAIN else len(MAIN), number)


def _own_folder(place: Place, first: Place) -> Path | None:
    """The folder of a reading that is not the chosen one's: other weights. Single files beside it are `beside`'s to judge."""
    loose = place.match.root == place.home and not format_of(place.match).is_sharded
    return None if loose or place.match.root == first.match.root else place.match.root
