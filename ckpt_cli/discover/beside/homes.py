"""Where config and tokenizer of a component may lie: beside its weights, beside the component, in the step, and in the run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_cli.discover.around.near import near_folders, near_homes
from ckpt_cli.discover.around.side_folders import IN_STEPS, OF_SIDE_FILES, inner_folders, is_well_named, kind_of_file, rivals
from ckpt_cli.discover.around.untaken import untaken_notes
from ckpt_cli.discover.beside.files import holds_weights
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.errors import CkptError, Unreadable
from ckpt_cli.files.folders import Folders, files_in, is_file, is_folder
from ckpt_cli.files.source import read_small
from ckpt_cli.formats.step_names import epoch_of, step_of
from ckpt_cli.formats.trainers import CONFIGS, ROLES, RUNS, THE_RUN
from ckpt_cli.formats.training_state_names import is_state_file
from ckpt_cli.hub.assets import HUB_FOLDER, Assets, files_of
from ckpt_cli.hub.beside.listed import home_of
from ckpt_cli.hub.beside.names import has_weight_suffix, is_doubtful, is_unknown
from ckpt_cli.hub.loaded_with.read_by_class import asked_for
from ckpt_cli.hub.peft_names import ADAPTER_CONFIG, adapter_config, has_adapters
from ckpt_cli.names import few
from ckpt_cli.paths import absolute, within
from ckpt_cli.tensors.component import Note

OF_RUN = tuple(name for name in CONFIGS if name.startswith(f"{THE_RUN}/"))
"""Folders of a run that trainers keep side files in."""


def homes_of(found: Found, place: Place) -> tuple[Path, ...]:
    """The folders in which side files of a component may lie: its own, those between it and its data, and the checkpoint's."""
    above = place.match.root.parent
    between = (above,) if above != place.home and above.is_relative_to(place.home) else ()
    return (*between, place.home, found.path, *place.more_homes)


def asset_homes(found: Found, place: Place) -> list[Path]:
    """Folders with the assets of a component, the nearest first: the first one that has a family of files decides on it."""
    return [home for homes in _homes(found, place) for home in homes]


def _homes(found: Found, place: Place) -> list[list[Path]]:
    """The folders in their order, each with those in it that hold nothing but side files."""
    root = place.match.root
    is_inside = root not in (place.home, found.path) and root.is_relative_to(found.path)
    spots = [within(root, name) for name in CONFIGS if not name.startswith(THE_RUN)] if is_inside else []
    spots = [spot for spot in spots if spot.is_relative_to(found.path) and spot != found.path]
    inner = [*([root] if is_inside else []), *homes_of(found, place)]
    beside = [each for folder in inner for each in (folder, *(spot for spot in spots if spot.parent == folder))]
    outer = [*_around(found), *(each for run in _all_runs(found) for each in (*_of_run(run), run))]
    own = list(dict.fromkeys((*beside, *spots, *outer, *near_homes(found))))
    there = Folders()
    return [[home, *(folder for folder in _used_inner(home, found, there) if folder not in own)] for home in own]


def doubtful_homes(found: Found, place: Place) -> list[Path]:
    """Folders in those of a step that hold nothing but side files, and whose names do not say that these are the component's.

    A judge, a reward model or the model that a training started from may have left them: they count after all else, the base included.
    """
    own, there = [home for homes in _homes(found, place) for home in homes], Folders()
    homes = [home for home in own if _is_in_step(home, found)]
    held = {folder: kinds for home in homes for folder, kinds in inner_folders(home, found, there).items() if folder not in own}
    unknown = {folder: kinds for folder, kinds in held.items() if not _counts_by_name(folder, found)}
    return [folder for folder in unknown if not rivals(folder, unknown)]


def homes_in_step(step: Path, own: Sequence[Path], found: Found) -> list[Path]:
    """The folders of side files of another step of a run: those that its ``own`` of a step are there, and others that they hold."""
    other, there = replace(found, path=step, places=(), more=()), Folders()
    same = [step / home.relative_to(found.path) for home in own]
    return list(dict.fromkeys(each for home in same for each in (home, *_used_inner(home, other, there, any_name=True))))


def _of_run(run: Path) -> list[Path]:
    return [run / name.removeprefix(f"{THE_RUN}/") for name in OF_RUN]


# -- folders of side files -------------------------------------------------------------------------------------------


def _used_inner(home: Path, found: Found, there: Folders, *, any_name: bool = False) -> list[Path]:
    """The folders in a home that its side files may be in, by their names or of ``any_name``."""
    held = inner_folders(home, found, there)
    named = {folder: kinds for folder, kinds in held.items() if any_name or _counts_by_name(folder, found)}
    return [folder for folder in named if not rivals(folder, named)]


def _counts_by_name(folder: Path, found: Found) -> bool:
    """Whether a folder beside weights belongs to them, by its name."""
    return is_well_named(folder.name, IN_STEPS if _is_in_step(folder, found) else OF_SIDE_FILES)


def _is_in_step(folder: Path, found: Found) -> bool:
    return found.step is not None and folder.is_relative_to(found.path)


def _beside_notes(found: Found, place: Place, assets: Assets, homes: Sequence[Sequence[Path]], doubtful: Collection[Path]) -> list[Note]:
    """Warnings about folders in the homes of a component with side files that it lacks, and that were not taken from there."""
    there = Folders()
    used = {home for inner in homes for home in inner}
    own = {home_of(name, path) for name, path in assets.files.items()} & {*used, *(home / HUB_FOLDER for home in used), *doubtful}
    whole = {path.parent for name, path in assets.files.items() if "/" in name}  # what is read there, under the name of the folder
    notes = []
    for home, *_ in homes:
        for folder, kinds in inner_folders(home, found, there).items():
            lacking = [kind for kind in kinds if not _has(kind, assets, own)] if folder not in used | whole else []
            if lacking and not _holds_the_same(folder, assets):
                text = f"{folder} holds {' and '.join(lacking)}, and was not read: nothing tells that {_goes(lacking)} with these weights"
                notes.append(Note("warning", "assets-beside", f"{text}; if so, copy the files into {place.home}"))
    return notes


def _near_notes(found: Found, place: Place, assets: Assets, homes: Sequence[Sequence[Path]]) -> list[Note]:
    used = [each for inner in homes for home in inner for each in (home, home / HUB_FOLDER)]
    return untaken_notes([folder for folder in near_folders(found) if folder not in used], used, assets, place.home)


def _holds_the_same(folder: Path, assets: Assets) -> bool:
    """Whether all side files of a folder are those that were taken, from wherever it was."""
    with contextlib.suppress(CkptError):
        return all(name in assets.files and read_small(path) == read_small(assets.files[name]) for name, path in files_of(folder).items())
    return False


def _has(kind: str, assets: Assets, own: Collection[Path]) -> bool:
    """Whether side files of a kind are from one of these folders."""
    return any(kind == kind_of_file(name) and home_of(name, path) in own for name, path in assets.files.items())


def _goes(kinds: Sequence[str]) -> str:
    return "it goes" if len(kinds) == 1 else "they go"


# -- runs ------------------------------------------------------------------------------------------------------------


def run_folders(found: Found) -> list[Path]:
    """The folder of the run that a step is one of, and the one around it where steps have a folder of their own in the run.

    Of a link to a step both, that of the step itself first: somebody linked it into another folder, or moved it out of the run to a
    larger disk, where nothing lies around it.
    """
    if found.step is None or (step_of(found.path) is None and not found.path.name.isdigit()):
        return []
    real = Path(os.path.realpath(found.path)) if found.path.is_symlink() else found.path
    steps = [real, found.path] if step_of(real) == step_of(found.path) else [found.path]
    return list(dict.fromkeys(folder for step in steps for folder in _runs_of(step)))


def _runs_of(step: Path) -> list[Path]:
    run = step.parent
    if epoch_of(step) != epoch_of(Path(step.name)):
        return [run, run.parent]  # steps in a folder of their epoch
    return [run, run.parent] if run.name in RUNS else [run]


def _all_runs(found: Found) -> list[Path]:
    """The folders of the run, and those of the same run on other nodes."""
    steps = (found, *(replace(found, path=step, step=step_of(step)) for step in _around(found)[-1:]), *found.more)
    return [folder for one in steps for folder in run_folders(one)]


def _around(found: Found) -> list[Path]:
    """The step that an adapter lies in under a name of its own, as PEFT saves each of several: what goes with all of them lies there.

    verl has the folder of a role between the two. The last save of a run is in the folder of the run itself, whose steps have an adapter
    of the same name.
    """
    own, outer = found.path, found.path.parent
    if found.step is not None or not is_file(own / ADAPTER_CONFIG):
        return []
    folders = [outer, outer.parent] if outer.name in ROLES else [outer]
    if step_of(folders[-1]) is not None:
        return folders
    with contextlib.suppress(Unreadable):  # what cannot be looked at is nothing that was looked for
        steps = Folders().folders(outer, lambda name: step_of(Path(name)) is not None)
        return [outer] if any(is_file(step / own.name / ADAPTER_CONFIG) for step in steps) else []
    return []


def asset_notes(found: Found, place: Place, assets: Assets, names: Mapping[str, object]) -> list[Note]:
    """What was taken from the folder of the run, since the step has none of its own, and what beside the assets is left out.

    ``names`` are those of the tensors.
    """
    runs, around = _all_runs(found), _around(found)
    # What has tensors of the model is compared with these, and said to be left out where it is.
    files = {name: path for name, path in assets.files.items() if not (has_weight_suffix(name) and asked_for(name, assets.config))}
    if has_adapters(names):
        path = adapter_config(asset_homes(found, place))
        files |= {path.name: path} if path is not None else {}
    of_run = [folder for run in runs for folder in _of_run(run)]
    homes = _homes(found, place)
    inner = {*(folder for _, *folders in homes for folder in folders), *near_homes(found)}
    doubtful = doubtful_homes(found, place)
    places: dict[Path, list[str]] = {}
    for name, path in files.items():
        places.setdefault(home_of(name, path), []).append(name)
    notes = []
    for where, names_there in places.items():
        taken = few(sorted(names_there), 4)
        if where in runs:
            text = f"{taken}: taken from the folder of the run, {where}, since the step has none of {place.name}"
            notes.append(Note("info", "assets-of-run", text))
        elif where in (*around, *of_run, *inner):
            notes.append(Note("info", "assets-of-folder", f"{taken}: taken from {where}, since nothing nearer to {place.name} has them"))
        elif where in doubtful:
            text = f"{taken}: taken from {where}, since nothing else has them; its name does not say that they go with these weights"
            notes.append(Note("warning", "assets-of-folder", f"{text}: if they do not, put the right ones into {place.home}"))
    return [
        *notes,
        *_beside_notes(found, place, assets, homes, doubtful),
        *_near_notes(found, place, assets, homes),
        *_unknown_notes(found, place, [home for each in homes for home in each], files),
    ]


def _unknown_notes(found: Found, place: Place, homes: Collection[Path], files: Mapping[str, Path]) -> list[Note]:
    """What is beside config and tokenizer and neither an asset nor anything that a training is known to leave there.

    Of what is beside weights alone, files of arrays are named.
    """
    folders = dict.fromkeys(path.parent for path in files.values() if path.parent in homes)
    folders |= {place.match.root: None} if is_folder(place.match.root) else {}
    weights = {absolute(path) for other in found.places for path in other.match.files}
    notes = []
    for folder in folders:
        wanted = _may_be_needed if any(path.parent == folder for path in files.values()) else _is_array_file
        names = [path.name for path in files_in(folder, wanted) if path.name not in files and absolute(path) not in weights]
        if names:
            text = f"{few(sorted(names), 3)} in {folder}: not written; nothing tells whether tokenizer or code of the model need such files"
            notes.append(Note("info", "unknown-files", text))
    return notes


def _is_array_file(name: str) -> bool:
    return name.endswith((".npy", ".npz")) and _may_be_needed(name)


def _may_be_needed(name: str) -> bool:
    return (is_unknown(name) or is_doubtful(name)) and not (is_state_file(name) or holds_weights(name))
