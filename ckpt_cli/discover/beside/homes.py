"""Where config and tokenizer of a component may lie: beside its weights, beside the component, in the step, and in the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckpt_cli.discover.found import Found, Place
from ckpt_cli.files.folders import files_in
from ckpt_cli.formats.step_names import epoch_of, step_of
from ckpt_cli.formats.trainers import CONFIGS, RUNS, THE_RUN
from ckpt_cli.formats.training_state_names import is_state_file
from ckpt_cli.hub.assets import Assets
from ckpt_cli.hub.beside.names import is_unknown
from ckpt_cli.hub.peft_names import adapter_config, has_adapters
from ckpt_cli.names import few
from ckpt_cli.paths import absolute, within
from ckpt_cli.tensors.component import Note


def homes_of(found: Found, place: Place) -> tuple[Path, ...]:
    """The folders in which side files of a component may lie: its own, those between it and its data, and the checkpoint's."""
    above = place.match.root.parent
    between = (above,) if above != place.home and above.is_relative_to(place.home) else ()
    return (*between, place.home, found.path, *place.more_homes)


def asset_homes(found: Found, place: Place) -> list[Path]:
    """Folders with the assets of a component, the nearest first: the first one with a config.json decides."""
    root = place.match.root
    beside: list[Path] = []
    if root not in (place.home, found.path) and root.is_relative_to(found.path):
        spots = [within(root, name) for name in CONFIGS if name != THE_RUN]
        beside = [root, *(spot for spot in spots if spot.is_relative_to(found.path) and spot != found.path)]
    return list(dict.fromkeys((*beside, *homes_of(found, place), *_all_runs(found))))


def run_folders(found: Found) -> list[Path]:
    """The folder of the run that a step is one of, and the one around it where steps have a folder of their own in the run."""
    if found.step is None or (step_of(found.path) is None and not found.path.name.isdigit()):
        return []
    run = found.path.parent
    if epoch_of(found.path) != epoch_of(Path(found.path.name)):
        return [run, run.parent]  # steps in a folder of their epoch
    return [run, run.parent] if run.name in RUNS else [run]


def _all_runs(found: Found) -> list[Path]:
    """The folders of the run, and those of the same run on other nodes."""
    return [folder for one in (found, *found.more) for folder in run_folders(one)]


def asset_notes(found: Found, place: Place, assets: Assets, names: Mapping[str, object]) -> list[Note]:
    """What was taken from the folder of the run, since the step has none of its own, and what beside the assets is left out.

    ``names`` are those of the tensors.
    """
    runs = _all_runs(found)
    files = dict(assets.files)
    if has_adapters(names):
        path = adapter_config(asset_homes(found, place))
        files |= {path.name: path} if path is not None else {}
    taken = {name: path for name, path in files.items() if path.parent in runs}
    notes = _unknown_notes(found, place, files)
    if taken:
        where = next(iter(taken.values())).parent
        text = f"{few(sorted(taken), 4)}: taken from the folder of the run, {where}, since the step has none of {place.name}"
        notes.insert(0, Note("info", "assets-of-run", text))
    return notes


def _unknown_notes(found: Found, place: Place, files: Mapping[str, Path]) -> list[Note]:
    """What is beside config and tokenizer and neither an asset nor anything that a training is known to leave there."""
    homes = asset_homes(found, place)
    folders = dict.fromkeys(path.parent for path in files.values() if path.parent in homes)
    weights = {absolute(path) for other in found.places for path in other.match.files}
    notes = []
    for folder in folders:
        names = [
            path.name
            for path in files_in(folder, lambda name: is_unknown(name) and not is_state_file(name))
            if path.name not in files and absolute(path) not in weights
        ]
        if names:
            text = f"{few(sorted(names), 3)} in {folder}: not written; nothing tells whether tokenizer or code of the model need such files"
            notes.append(Note("info", "unknown-files", text))
    return notes
