"""What a checkpoint folder holds, by names: components directly, in role folders (``actor/``), or in folders of their own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_cli.discover.found import Found, PassedOver, Place, Target
from ckpt_cli.errors import Unreadable, Unsupported
from ckpt_cli.files.folders import Folders, status_of
from ckpt_cli.formats.ages import MAX_HOURS
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.registry import format_of, order_of, recognise
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.formats.unread import Unread, refused_tag
from ckpt_cli.names import few, numbered, unnumbered
from ckpt_cli.tensors.component import Note

ROLES = ("actor", "policy", "critic", "reward", "value")
"""Folders of a checkpoint that hold one trained model each; the first one present is the main component."""

COMPONENT_FOLDERS = {
    re.compile(r"pytorch_model_fsdp_(?P<number>[0-9]{1,9})", re.ASCII): "model",
    re.compile(r"pytorch_ema_model_fsdp_(?P<number>[0-9]{1,9})", re.ASCII): "ema",
    re.compile(r"model_sharded|model_and_optim|trainer", re.ASCII): "model",
    re.compile(r"ema_sharded", re.ASCII): "ema",
    re.compile(r"dist_ckpt", re.ASCII): "model",
}
"""What a folder holds by its name. A ``number`` says which of several models (a generator and a discriminator) that were saved together."""

MAIN = ("model", *ROLES[:2])
DIST_CKPT = ("dist_ckpt", "model/dist_ckpt")
"""Where verl's Megatron workers keep a model, in the folder of its role."""

HUB_FOLDERS = ("huggingface", "model/huggingface")
"""Where verl keeps config and tokenizer, and weights only if they are no shards."""

NEMO = ("weights", "context")
"""Where NeMo 2 keeps the weights of a checkpoint, and what it has beside them."""

RELEASE = "release"
"""Megatron's step of a converted model, whose folder is the run's: the weights of a run without steps."""

MAX_TAGS = 1024


def inside_checkpoint(path: Path, there: Folders) -> Target | None:
    """The path as a checkpoint, a role folder, a component folder or a file of one."""
    places = places_in(path, there)
    if places:
        name = path.name
        of_folder = (name, 0) if name in ROLES else _component_of(name)
        root = path.parent if of_folder is not None else path
        if name in ROLES:
            places = tuple(replace(place, name=name if place.name == "model" else place.name) for place in places)
        elif of_folder is not None:
            places = tuple(_numbered(place, *of_folder, root) for place in places)
        return Target(path, None, (Found(root, step_of(root), places),))
    if not there.is_file(path):
        return None
    matches = recognise(path, there)
    if not matches:
        return None
    outer = inside_checkpoint(path.parent, there) if matches[0].root == path.parent else None
    if outer is not None:
        found = outer.checkpoints[0]
        chosen = [place for place in found.places if place.match.component == matches[0].component or len(found.places) == 1]
        return Target(path, None, (replace(found, places=tuple(chosen or found.places)),))
    places = tuple(Place(match.component, match, path.parent) for match in matches)
    return Target(path, None, (Found(path, None, places),))


def places_in(folder: Path, there: Folders) -> tuple[Place, ...]:
    """The components of a checkpoint folder, the main one first."""
    if not there.is_folder(folder):
        return ()
    places = [Place(match.component, match, folder) for match in recognise(folder, there)]
    children = [child.name for child in there.folders(folder, _may_hold_component)]
    for role in ROLES:
        if role in children:
            places += [Place(role, match, folder / role) for match in _of_role(folder / role, there) if match.component == "model"]
    for child in children:
        of_folder = _component_of(child)
        if of_folder is not None:
            places += [_numbered(Place("", match, folder), *of_folder, folder) for match in recognise(folder / child, there)]
    read = {place.name for place in places if not all_refused([place])}
    places = [place for place in places if not all_refused([place]) or place.name not in read]
    return _chosen(places or [Place("model", match, folder) for match in _of_role(folder, there) or _tags(folder, there)])


def _of_role(folder: Path, there: Folders) -> list[Match]:
    """What a role folder holds: directly, or one level down where Megatron and its users put it."""
    inner = [*DIST_CKPT, *NEMO[:1]] if all(there.is_folder(folder / name) for name in NEMO) else list(DIST_CKPT)
    if there.is_folder(folder / RELEASE) and not any(step_of(entry) is not None for entry in there.entries(folder)):
        inner.append(RELEASE)
    inner += HUB_FOLDERS
    return recognise(folder, there) or next((found for name in inner if (found := recognise(folder / name, there))), [])


def _tags(folder: Path, there: Folders) -> list[Match]:
    """What DeepSpeed or Megatron keep one level below a checkpoint's folder, in a folder of any name, such as ``global_step500``.

    Of a folder that is no step, step folders are its steps and not this.
    """
    is_step = step_of(folder) is not None
    for child in there.entries(folder)[:MAX_TAGS]:
        if is_step or step_of(child) is None:
            # What cannot be looked at beside it may be anything, and no weights are taken from here in any case.
            with contextlib.suppress(Unreadable):
                found = refused_tag(child, there)
                if found:
                    return found
    return []


def unread_notes(found: Found, place: Place) -> list[Note]:
    """A warning about steps of DeepSpeed and Megatron in the folder of weights that are read.

    A copy of weights from elsewhere looks like one that belongs there, and names do not tell which of the two is newer. Looked for in the
    checkpoint that is read only: it takes a listing of every folder in it.
    """
    there = Folders()
    if all_refused([place]) or not there.is_folder(found.path):
        return []  # beside a single file anything may lie
    told: dict[str, None] = {}
    for folder in dict.fromkeys((found.path, place.home, place.match.root)):
        if not there.is_folder(folder):
            continue
        beside = [match for match in Unread().recognise(folder, there) if isinstance(match.trouble, Unsupported)]
        told |= dict.fromkeys(f"{few([path.name for path in match.files], 2)} ({match.evidence})" for match in beside)
        is_step = step_of(folder) is not None
        for child in there.entries(folder)[:MAX_TAGS]:
            if is_step or step_of(child) is None:
                with contextlib.suppress(Unreadable):
                    told |= dict.fromkeys(f"{child.name} ({match.evidence})" for match in refused_tag(child, there))
    if not told:
        return []
    were = "was" if len(told) == 1 else "were"
    text = f"{few(list(told), 3)} beside the weights of {place.name} {were} not read"
    if _saved_together(found, place):
        return [Note("info", "unread", text)]
    return [Note("warning", "unread", f"{text}: the two may be of different steps")]


def _saved_together(found: Found, place: Place) -> bool:
    """Whether the weights are as old as the Trainer's own state: with ZeRO it writes gathered weights beside DeepSpeed's folder."""
    state, weights = (status_of(path) for path in (found.path / "trainer_state.json", place.match.files[0]))
    return state is not None and weights is not None and abs(state.st_mtime - weights.st_mtime) < MAX_HOURS * 3600


def all_refused(places: Sequence[Place]) -> bool:
    """Whether all of these are formats that are only recognised, to be refused."""
    return all(format_of(place.match).is_refused for place in places)


def _may_hold_component(name: str) -> bool:
    return name in ROLES or _component_of(name) is not None


def _component_of(folder: str) -> tuple[str, int] | None:
    """The component that a folder of this name holds, and its number among several; None if the name is none of these."""
    for regex, component in COMPONENT_FOLDERS.items():
        fields = regex.fullmatch(folder)
        if fields is not None:
            return component, int(fields.groupdict().get("number") or 0)
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
            passed = PassedOver(f"{place.match.evidence} ({place.match.format})", _own_folder(place, first))
            unique[place.name] = replace(first, passed_over=(*first.passed_over, passed))
    return tuple(sorted(unique.values(), key=_rank))


def _rank(place: Place) -> tuple[int, int]:
    """The main component first, then the other models of the same save, then the rest."""
    name, number = unnumbered(place.name)
    return (MAIN.index(name) if name in MAIN else len(MAIN), number)


def _own_folder(place: Place, first: Place) -> Path | None:
    """The folder of a reading that is not the chosen one's: other weights. Single files beside it are `beside`'s to judge."""
    loose = place.match.root == place.home and not format_of(place.match).is_sharded
    return None if loose or place.match.root == first.match.root else place.match.root
