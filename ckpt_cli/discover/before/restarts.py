"""Whole models that training with adapters restarted from: ReLoRA fuses the adapters into such a model, and goes on with new ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt_cli.discover.beside.folders import held_below
from ckpt_cli.discover.found import ages
from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders, is_file
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.registry import describe, recognise
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.hub.assets import CONFIG
from ckpt_cli.hub.peft_names import has_adapters, parse_peft
from ckpt_cli.names import stripped_names
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

RELORA = "relora"
"""Where Axolotl saves the model that it fused the adapters into, in the step where training restarted."""


def restart_notes(root: Path, name: str, tensors: Mapping[str, Tensor], base: Path | None, files: Files) -> dict[Path, Note]:
    """What is said of whole models below a folder of adapters alone, or in the ``relora/`` of another step, by path.

    Nothing where one of them is the ``base`` that was passed.
    """
    wanted = _lacking(tensors)
    if not wanted:
        return {}
    there = Folders()
    try:
        below = [entry.path for entry in held_below(root, there) or () if entry.kind in ("model", "companion") and entry.matches]
        models = [folder for folder in below if _holds(folder, wanted, files)]
        if not any(folder.name == RELORA for folder in models):
            models += [folder for folder in _of_other_steps(root, there) if _holds(folder, wanted, files)][:1]
    except CkptError:
        return {}  # no weights are read from there
    if base is not None and any(os.path.realpath(base) == os.path.realpath(folder) for folder in models):
        return {}
    return {folder: Note("warning", "likely-base", _text(folder, root, name)) for folder in models}


def _lacking(tensors: Mapping[str, Tensor]) -> set[str]:
    """The ends of the names of the weights that adapters are for, if these are adapters without them."""
    if not has_adapters(tensors):
        return set()
    try:
        state = parse_peft(tensors)
    except CkptError:
        return set()
    weights = [f"{adapter.module}.weight" for adapter in state.adapters]
    lacking = {_end(weight) for weight in weights if weight not in state.tensors}
    return lacking if 2 * len(lacking) > len(weights) else set()


def _end(name: str) -> str:
    """The end of a tensor's name, which is the same in the files and in memory: the module in its layer."""
    return ".".join(name.split(".")[-4:])


def _holds(folder: Path, wanted: set[str], files: Files) -> bool:
    """Whether a folder holds the weights that the adapters are for."""
    matches = [match for match in recognise(folder) if match.component == "model" and match.trouble is None]
    if not matches:
        return False
    try:
        names = stripped_names(describe(matches[0], files, ReadOptions()).tensors).values()
    except CkptError:
        return False
    return wanted <= {_end(name) for name in names}


def _of_other_steps(root: Path, there: Folders) -> Iterator[Path]:
    """The models of restarts in other steps: of the last one before, and so on, then of those after."""
    if step_of(root) is None:
        return
    steps = [folder for folder in there.folders(root.parent) if step_of(folder) is not None]
    age = ages([*steps, root])
    own = age(root)
    steps.sort(key=age)
    for folder in (*(each for each in reversed(steps) if age(each) < own), *(each for each in steps if age(each) > own)):
        if there.is_folder(folder / RELORA):
            yield folder / RELORA


def _text(folder: Path, root: Path, name: str) -> str:
    command = f"ckpt merge {root} --base {folder}"
    if not is_file(folder / CONFIG):
        command += f", once the {CONFIG} of the model is in {folder.name}/"
    if folder.name == RELORA:
        shown = folder.name if folder.parent == root else f"{folder.parent.name}/{folder.name}"
        what = f"{shown}/ holds a model that training restarted from (ReLoRA)"
        if folder.parent != root and ages((root, folder.parent))(folder.parent) > ages((root, folder.parent))(root):
            return f"{what}: if that was before {root.name}, it is the base of the adapters in {name}: {command}"
        return f"{what}: it is likely the base of the adapters in {name}, rather than what training began with: {command}"
    shown = folder.relative_to(root).as_posix()
    what = f"{shown}/ holds a whole model too, which was not read: either the adapters in {name} are fused into it, or it is their base"
    return f"{what}, and then the command is {command}"
