"""Model folders inside of a checkpoint that is read from shards: ``huggingface/`` with weights of its own, beside files of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt_cli.discover.found import Place
from ckpt_cli.errors import CkptError, Unreadable
from ckpt_cli.files.folders import entries_in, is_file, is_folder
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.registry import describe, format_of, recognise
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.hub.assets import CONFIG, HUB_FOLDER
from ckpt_cli.hub.classes.names import hub_tensors, unknown_operations
from ckpt_cli.hub.classes.rules import rules_for
from ckpt_cli.hub.classes.tying import ties_embeddings
from ckpt_cli.hub.config import Config, architecture
from ckpt_cli.hub.tied_names import tied_pair
from ckpt_cli.names import few, stripped_names
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.equality import same_sample
from ckpt_cli.tensors.tensor import Tensor

SAMPLED = 48
"""Tensors of which a sample is compared, at equal distances: another step has other values in nearly all of them."""


def model_notes(place: Place, component: Component, config: Config, files: Files) -> dict[Path, Note]:
    """What is said of model folders inside of the folder of a component, by folder: which was read, and how the other differs."""
    notes = {}
    for folder in _model_folders(place):
        told = told_of(folder, component.tensors, config, files)
        if told is not None:
            level, text = told
            read = f"{few([path.name for path in component.files], 1)} was read for {place.name}"
            notes[folder] = Note("warning" if level else "info", "other-model" if level else "other-weights", f"{read}; {text}")
    return notes


def _model_folders(place: Place) -> Iterator[Path]:
    """Folders with a config and weights, which are no steps and not the component's own."""
    own = {place.match.root, place.home, *(path.parent for path in place.match.files)}
    for root in dict.fromkeys((place.match.root, place.home)):
        for entry in entries_in(root) if is_folder(root) else ():
            # No weights are read from there, so that one that cannot be accessed does not matter.
            with contextlib.suppress(Unreadable):
                if entry not in own and step_of(entry) is None and is_folder(entry) and is_file(entry / CONFIG) and _is_loaded(entry):
                    yield entry


def _is_loaded(folder: Path) -> bool:
    return any(format_of(match).is_loaded and match.component == "model" for match in recognise(folder))


def told_of(folder: Path, held: Mapping[str, Tensor], config: Config, files: Files) -> tuple[bool, str] | None:
    """Whether the weights of a folder are others than those that are ``held``, and what is said of them; None for another kind of model."""
    matches = [match for match in recognise(folder) if match.component == "model"]
    if not matches:
        return None
    try:
        tensors = describe(matches[0], files, ReadOptions()).tensors
    except CkptError as error:
        return True, f"{folder.name}/ holds weights too, which cannot be read: {error.message}"
    mine = _under_hub_names(held, config)
    common = [name for name in mine if name in tensors]
    if 2 * len(common) < len(tensors) and folder.name != HUB_FOLDER:
        return None
    differing = list(_differences(mine, tensors, config))
    if differing:
        return True, f"{folder.name}/ holds other weights, which were not read: {'; '.join(differing)}"
    step = max(1, len(common) // SAMPLED)
    # Either of them may have been rounded.
    sampled = [(name, mine[name], tensors[name]) for name in common[::step]]
    others = [name for name, own, other in sampled if not same_sample(own, other) and not same_sample(other, own)]
    if others:
        return True, f"{folder.name}/ holds the same tensors with other values ({few(others, 2)}), which were not read"
    return False, f"{folder.name}/ holds the same weights (samples are equal), which were not read"


def _differences(mine: Mapping[str, Tensor], others: Mapping[str, Tensor], config: Config) -> Iterator[str]:
    """How two models differ by their headers. Of tied tensors one may be missing, and floats may be rounded to another dtype."""
    pair = tied_pair([*mine, *(name for name in others if name not in mine)]) if ties_embeddings(config) else None
    tied = pair if pair is not None else ()
    lacking = [name for name in mine if name not in others and name not in tied]
    extra = [name for name in others if name not in mine and name not in tied]
    shapes = [name for name in mine if name in others and mine[name].shape != others[name].shape]
    dtypes = [name for name in mine if name in others and mine[name].dtype != others[name].dtype]
    kinds = [name for name in dtypes if not mine[name].dtype.kind == others[name].dtype.kind == "float"]
    for names, text in ((lacking, "without"), (extra, "also with"), (shapes, "other shapes of"), (kinds, "other dtypes of")):
        if names:
            yield f"{text} {few(names, 2)}"


def _under_hub_names(tensors: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The tensors as a merge would name and cut them; as they are where that is not known."""
    native = {new: tensors[old] for old, new in stripped_names(tensors).items()}
    try:
        rules = rules_for(config) if architecture(config) else None
        if rules is None or unknown_operations(rules):
            return native
        ignored = set(rules.ignored)
        return dict(hub_tensors({name: tensor for name, tensor in native.items() if name not in ignored}, rules, config))
    except CkptError:
        return native
