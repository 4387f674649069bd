"""What ``--also`` names: more places with files of the checkpoints that were passed, which it adds to them, and of nothing else."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.discover.beside.homes import asset_homes, run_folders
from ckpt_cli.discover.found import Found, Place, Target, same_step
from ckpt_cli.discover.nodes.joining import CONTRADICTIONS, Joined, joined_checkpoint, twin_of
from ckpt_cli.errors import CkptError, Inconsistent, UsageError
from ckpt_cli.files.folders import same_file
from ckpt_cli.hub.assets import CONFIG, Assets, find_assets
from ckpt_cli.hub.settings import differences
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note
from ckpt_cli.urls import WEB, address_of


def with_also(first: Target, second: Target) -> Target:
    """The checkpoints of ``first`` with the files that a folder of ``--also`` adds to them: steps that only that folder has are none.

    Raises UsageError for a folder that can add nothing, and what contradicts where all that it holds does. A checkpoint with
    contradictions has them as its trouble, and is not passed over for an older one (`contradicts`).
    """
    held = []
    for checkpoint in first.checkpoints:
        twin = twin_of(first, checkpoint, second)
        components = checkpoint.given in (None, checkpoint.path)
        held.append(Joined(checkpoint) if twin is None else joined_checkpoint(checkpoint, twin, components=components))
    _refuse_known(first, second)
    blocked = tuple(entry for entry in second.blocked if any(same_step(entry, checkpoint) for checkpoint in first.checkpoints))
    if not blocked and not any(one.adds for one in held):
        raise next((one.trouble for one in reversed(held) if one.trouble is not None), None) or _adds_nothing(first, second)
    return replace(first, checkpoints=tuple(one.found for one in held), blocked=(*first.blocked, *blocked), also=(*first.also, second))


def _refuse_known(first: Target, second: Target) -> None:
    """Raise UsageError if what ``--also`` names is the folder itself, lies in it or around it, also through links."""
    pairs = [(one, twin) for one in reversed(first.checkpoints) if (twin := twin_of(first, one, second)) is not None]
    for checkpoint, twin in pairs[:1]:
        known = {root for place in checkpoint.places for root in (place.match.root, *place.match.more_roots)}
        if any(same_file(place.match.root, root) for place in twin.places for root in known):
            raise UsageError(
                f"--also names files that are read already: {second.path}",
                path=first.path,
                expected="a folder of another node",
                hint=f"pass {shell.path(second.path)} alone: its folders are joined" if second.nodes > 1 else "leave it out",
            )


def _adds_nothing(first: Target, second: Target) -> UsageError:
    """The error for a folder of ``--also`` that holds nothing of what was passed."""
    held = [checkpoint.path.name for checkpoint in second.checkpoints if checkpoint.step is not None]
    shared = next((one for one in reversed(first.checkpoints) if twin_of(first, one, second) is not None), None)
    if shared is not None:
        return UsageError(
            f"--also adds nothing to {shared.path.name}: {second.path} holds no file of a rank that {shared.path} lacks",
            path=first.path,
            expected="a folder of another node, with the files that it wrote of the same save",
            hint="leave it out; files that an index lists are copied beside it, and another model is merged by itself",
        )
    if first.run is None:
        missing = first.checkpoints[0].path.name
        return UsageError(
            f"--also holds no part of this checkpoint: {second.path}{f' (it holds {few(held, 3)})' if held else ''}",
            path=first.path,
            expected=f"a folder with more files of {missing}",
            hint=f"pass the folder of {missing} on the other node",
        )
    steps = [checkpoint.path.name for checkpoint in first.checkpoints]
    return UsageError(
        f"--also holds no step of this run: {second.path} (it holds {few(held, 3) or 'files that say no step'})",
        path=first.path,
        expected=f"more files of {few(steps, 3)}, from another node",
        hint="leave it out; another run is merged by itself" if held else "to add files to one step, pass the folder of that step as PATH",
    )


def contradicts(found: Found, error: CkptError) -> bool:
    """Whether files that ``--also`` names do not fit: then no other step is taken in place of this one, which was meant with them."""
    return bool(found.more) and isinstance(error, CONTRADICTIONS)


def check_more(found: Found, place: Place) -> None:
    """Raise Inconsistent if a folder of ``--also`` has the config of another model than the folder that was passed.

    Compared is the nearest of each, which decides; of a second model of the step, which may lack one of its own, the one in its own folder.
    """
    for twin in found.more:
        same = next((other for other in twin.places if other.home in place.more_homes), None)
        if same is None:
            pairs = [[folder.path, *run_folders(folder)] for folder in (found, twin)]
        elif place.name == found.places[0].name:
            own = replace(place, more_homes=())
            pairs = [asset_homes(replace(found, more=()), own), asset_homes(twin, replace(same, more_homes=()))]
        else:
            pairs = [[place.home], [same.home]]
        first, second = (_assets(homes) for homes in pairs)
        if not (first.config and second.config):
            continue
        differing = [entry.pair for entry in differences(first.config, second.config)]
        if differing:
            raise Inconsistent(
                f"{second.files[CONFIG]}, which --also names, is the config of another model: {few(differing, 4)} differ",
                path=second.files[CONFIG],
                expected=f"that of {first.files[CONFIG]}",
                hint="--also adds files of the same save from another node; another model is merged by itself",
            )


def _assets(homes: Sequence[Path]) -> Assets:
    try:
        return find_assets(homes)
    except CkptError:
        return Assets({}, {}, None)  # what cannot be read says nothing of another model


def more_folders(found: Found) -> list[Path]:
    """The folders of other nodes that files of a checkpoint lie in: passed with ``--also``, the same is read again."""
    homes = dict.fromkeys((*(twin.path for twin in found.more), *(home for place in found.places for home in place.more_homes)))
    outer = [home for home in homes if not any(home != other and home.is_relative_to(other) for other in homes)]
    files = [file for place in found.places for file in place.match.files]
    return [home for home in outer if any(file.is_relative_to(home) for file in files)]


def also_notes(target: Target, read: Sequence[tuple[Found, Collection[str]]]) -> list[Note]:
    """What is said of folders of ``--also``, for the components of checkpoints that are read.

    That they add nothing to these, that a component is theirs alone, so that nothing shows that it is of this run, and of newer steps.
    """
    notes: list[Note] = []
    age = target.age
    newest = max((age(found) for found, _ in read), default=(0, 0))
    for other in target.also:
        added = [_added(other, found, names) for found, names in read]
        told = few([found.path.name for found, _ in read], 3)
        if all(places is None for places in added):
            text = f"--also added nothing: {other.path} holds nothing of {told}"
            notes.append(Note("warning", "also-unused", text))
        elif not any(added):
            wanted = few(list(dict.fromkeys(name for _, names in read for name in names)), 3)
            notes.append(Note("info", "also-unused", f"--also added no weights of {wanted}: all that {told} has of it was read from PATH"))
        alone = dict.fromkeys(place.name for places in added for place in places or () if place.home in _homes(other))
        notes += [Note("warning", "also-alone", f"{name} was read from {other.path} alone, which --also names") for name in alone]
        alone_there = (
            one for one in other.checkpoints if age(one) > newest and not any(same_step(one, each) for each in target.checkpoints)
        )
        newer = [one.path.name for one in alone_there]
        if target.run is not None and newer:
            are = "is" if len(newer) == 1 else "are"
            text = f"{few(newer, 3)} {are} skipped, since only {other.path} has it: --also adds files to steps that PATH has"
            notes.append(Note("warning", "step-skipped", text))
    return notes


def _added(other: Target, found: Found, names: Collection[str]) -> list[Place] | None:
    """The components of a checkpoint that are read with files of a folder; None if it holds nothing of the checkpoint."""
    twin = next((one for one in other.checkpoints if one in found.more), None)
    if twin is None:
        return None
    files = {file for place in twin.places for file in place.match.files}
    return [place for place in found.places if place.name in names and not files.isdisjoint(place.match.files)]


def _homes(other: Target) -> set[Path]:
    return {place.home for checkpoint in other.checkpoints for place in checkpoint.places}


def fetch_hint(path: str | os.PathLike[str]) -> str:
    """What to do about files of a save that were not found beside what was passed."""
    address = address_of(path)
    if address is not None and address.scheme in WEB:
        return "put the file beside the others there; of a server that lists no folders, download the whole folder, and pass that"
    return "get the file from the node that wrote it, or pass that node's folder with --also"
