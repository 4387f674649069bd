"""Other copies of the model in a checkpoint that is read from shards: ``huggingface/`` with weights of its own, a gathered 16-bit file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckpt_cli.discover.around.given_otherwise import is_given_otherwise
from ckpt_cli.discover.between import NoChoice
from ckpt_cli.discover.found import Found, Place
from ckpt_cli.errors import CkptError, Unreadable
from ckpt_cli.files.folders import entries_in, is_file, is_folder
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import WEIGHTS_16, Match, ReadOptions
from ckpt_cli.formats.registry import describe, format_of, recognise
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.hub.assets import CONFIG, HUB_FOLDER
from ckpt_cli.hub.classes.names import hub_tensors, unknown_operations
from ckpt_cli.hub.classes.rules import rules_for
from ckpt_cli.hub.classes.shapes.turned import turned_alike
from ckpt_cli.hub.classes.tying import ties_embeddings
from ckpt_cli.hub.config import Config, architecture
from ckpt_cli.hub.peft_names import PREFIX, has_adapters, parse_peft
from ckpt_cli.hub.tied_names import tied_pair
from ckpt_cli.names import few, stripped_names, unnumbered
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.equality import same_sample
from ckpt_cli.tensors.tensor import Tensor

SAMPLED = 48
"""Tensors of which a sample is compared, at equal distances: another step has other values in nearly all of them."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether another copy of a model differs, or may, and what is said of it."""

    differs: bool
    text: str

    @property
    def level(self) -> Literal["warning", "info"]:
        return "warning" if self.differs else "info"


def model_notes(found: Found, place: Place, component: Component, config: Config, files: Files) -> dict[Path, Note]:
    """What is said of other copies of the model beside a component, by path: which was read, and how the other differs.

    These are model folders inside of the component's, and of DeepSpeed's masters and weights gathered in 16 bits the one not read.
    """
    folders = [folder for folder in _model_folders(found, place) if not is_given_otherwise(folder, place.home, files)]
    compared = [(folder, comparison_with_folder(folder, component.tensors, config, files)) for folder in folders]
    compared += [
        (match.first, comparison_with_form(match, component.tensors, config, files, place.home)) for match in _other_forms(found, place)
    ]
    notes = {}
    read = f"{few([path.name for path in component.files], 1)} {'was' if len(component.files) == 1 else 'were'} read for {place.name}"
    for path, comparison in compared:
        if comparison is not None:
            code = "other-model" if comparison.differs else "other-weights"
            notes[path] = Note(comparison.level, code, f"{read}; {comparison.text}")
    return notes


def _other_forms(found: Found, place: Place) -> list[Match]:
    """The model in the other dtype, where it is in files of its own: what a trainer gathered beside the masters, or the masters."""
    main = found.places[0]
    names = {main.name, WEIGHTS_16}
    if place.name not in names or (place.match.number, place.match.group) != (main.match.number, main.match.group):
        return []
    others = (other.match for other in found.places if other.name in names - {place.name} and other.match.files != place.match.files)
    return [match for match in others if match.group in (None, place.match.group)]


def comparison_with_form(match: Match, held: Mapping[str, Tensor], config: Config, files: Files, home: Path | None = None) -> Comparison:
    """The same model in another dtype, compared with the weights that are ``held``; in a folder of its own, if that is not their ``home``.

    zero_to_fp32.py of DeepSpeed >= 0.16 makes a folder of the name that it is given, such as ``pytorch_model.bin``. That nothing tells
    which of the two is the model does not matter here.
    """
    in_folder = home is not None and match.root not in (home, match.first)
    shown = f"{match.root.name}/" if format_of(match).in_tags or in_folder else match.first.name
    match = replace(match, trouble=None) if isinstance(match.trouble, NoChoice) else match
    try:
        tensors = describe(match, files, ReadOptions()).tensors
    except CkptError as error:
        return Comparison(True, f"{shown} holds the model too, and was not compared, since it cannot be read: {error.message}")
    found = comparison_of(shown, held, tensors, config)
    return replace(found, text=f"{found.text}: one of them may be of another step") if found.differs else found


def comparison_of(
    shown: str, held: Mapping[str, Tensor], others: Mapping[str, Tensor], config: Config, *, every: bool = False
) -> Comparison:
    """Two forms of one model, compared under the names that a merge would give them; ``every`` tensor, or as many as are `SAMPLED`."""
    return _compared(shown, under_hub_names(held, config), under_hub_names(others, config), config, every=every)


def is_rounded_copy(path: Path, tensors: Mapping[str, Tensor], files: Files) -> bool:
    """Whether a file holds the tensors of a model in another dtype, as far as samples tell. False where that cannot be told."""
    matches = [match for match in recognise(path) if match.trouble is None]
    return bool(matches and tensors) and not comparison_with_form(matches[0], tensors, {}, files).differs


def other_values(path: Path, tensors: Mapping[str, Tensor], files: Files) -> list[str] | None:
    """The tensors of a model that have other values in a file, also where it holds them rounded; None where that cannot be compared.

    Other names or shapes are those of another form of the model, and integers and 8-bit codes those of a quantised one.
    """
    matches = [match for match in recognise(path) if match.trouble is None]
    try:
        return unequal_values(tensors, describe(matches[0], files, ReadOptions()).tensors) if matches else None
    except CkptError:
        return None


def unequal_values(tensors: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> list[str] | None:
    """The tensors of a model that have other values among those that are ``held``, as `other_values`."""
    mine, others = under_hub_names(tensors, {}), under_hub_names(held, {})
    rounded = all(tensor.dtype.kind != "float" or tensor.dtype.itemsize > 1 for tensor in others.values())
    if not others or not rounded or any(_differences(mine, others, {})):
        return None
    return unequal(mine, others)


def other_adapter_values(path: Path, tensors: Mapping[str, Tensor], files: Files) -> list[str] | None:
    """The tensors in which a file with a component's adapters differs from these; None where it holds none, or that cannot be compared.

    Accelerate and the Hugging Face Trainer write the adapter of one step in the form of FSDP and in that of PEFT.
    """
    matches = [match for match in recognise(path) if match.trouble is None] if has_adapters(tensors) else []
    try:
        held = describe(matches[0], files, ReadOptions()).tensors if matches else {}
        if not has_adapters(held):
            return None
        mine, theirs = parse_peft(tensors), parse_peft(held)
    except CkptError:
        return None
    # PEFT's files have no mark of what was trained as a whole.
    exported, others = _plainly(mine.exported), {**theirs.tensors, **_plainly(theirs.exported)}
    own = {**mine.tensors, **exported}
    unlike = [name for name in others if name not in own or own[name].shape != others[name].shape]
    return [*unlike, *(name for name in exported if name not in others)] or unequal(own, others, every=True)


def _plainly(exported: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(PREFIX): tensor for name, tensor in exported.items()}


def _model_folders(found: Found, place: Place) -> Iterator[Path]:
    """Folders with a config and weights, which are no steps and not the component's own.

    Between a model and an average of it, which both are components, other values are as they should be.
    """
    average = is_average_name(unnumbered(place.name)[0])
    twins = [other for other in found.places if is_average_name(unnumbered(other.name)[0]) != average]
    yield from folders_with_model(place, twins)


def folders_with_model(place: Place, others: Sequence[Place] = ()) -> Iterator[Path]:
    """Model folders inside of a component's, by names, which are neither steps nor folders of the component itself or of ``others``."""
    own = {place.home, *(folder for each in (place, *others) for folder in (each.match.root, *(path.parent for path in each.match.files)))}
    for root in dict.fromkeys((place.match.root, place.home)):
        for entry in entries_in(root) if is_folder(root) else ():
            # No weights are read from there, so that one that cannot be accessed does not matter.
            with contextlib.suppress(Unreadable):
                if entry not in own and step_of(entry) is None and is_folder(entry) and is_file(entry / CONFIG) and _is_loaded(entry):
                    yield entry


def _is_loaded(folder: Path) -> bool:
    return any(format_of(match).is_loaded and match.component == "model" and not match.lists_nothing for match in recognise(folder))


def comparison_with_folder(folder: Path, held: Mapping[str, Tensor], config: Config, files: Files) -> Comparison | None:
    """The weights of a folder, compared with those that are ``held``; None for another kind of model."""
    matches = [match for match in recognise(folder) if match.component == "model"]
    if not matches:
        return None
    try:
        tensors = describe(matches[0], files, ReadOptions()).tensors
    except CkptError as error:
        return Comparison(True, f"{folder.name}/ holds weights too, which cannot be read: {error.message}")
    mine = under_hub_names(held, config)
    common = [name for name in mine if name in tensors]
    if 2 * len(common) < len(tensors) and folder.name != HUB_FOLDER:
        return None
    return _compared(f"{folder.name}/", mine, tensors, config)


def _compared(shown: str, mine: Mapping[str, Tensor], others: Mapping[str, Tensor], config: Config, *, every: bool = False) -> Comparison:
    """Whether two models differ in names, shapes or sampled values, either of which may have been rounded."""
    others, _ = turned_alike(others, mine, config, {})
    differing = list(_differences(mine, others, config))
    if differing:
        return Comparison(True, f"{shown} holds other weights, which were not read: {'; '.join(differing)}")
    changed = unequal(mine, others, every=every)
    if changed:
        return Comparison(True, f"{shown} holds the same tensors with other values ({few(changed, 2)}), and was not used")
    return Comparison(False, f"{shown} holds the same weights (samples are equal), and was not used")


def unequal(mine: Mapping[str, Tensor], others: Mapping[str, Tensor], *, every: bool = False) -> list[str]:
    """The tensors whose sampled values differ, either of which may have been rounded."""
    common = [name for name in mine if name in others]
    if not every:
        # What has one dtype in a model and in its masters was not trained, and is the same in every step.
        common = [name for name in common if mine[name].dtype != others[name].dtype] or common
        common = common[:: max(1, len(common) // SAMPLED)]
    sampled = [(name, mine[name], others[name]) for name in common]
    return [name for name, own, other in sampled if not same_sample(own, other) and not same_sample(other, own)]


def _differences(mine: Mapping[str, Tensor], others: Mapping[str, Tensor], config: Config) -> Iterator[str]:
    """How two models differ by their headers. Of tied tensors one may be missing, and floats may be rounded to another dtype."""
    pair = tied_pair([*mine, *(name for name in others if name not in mine)]) if ties_embeddings(config) else None
    tied = pair if pair is not None else ()
    lacking = [name for name in mine if name not in others and name not in tied and mine[name].alias_of not in others]
    extra = [name for name in others if name not in mine and name not in tied and others[name].alias_of not in mine]
    shapes = [name for name in mine if name in others and mine[name].shape != others[name].shape]
    dtypes = [name for name in mine if name in others and mine[name].dtype != others[name].dtype]
    kinds = [name for name in dtypes if not mine[name].dtype.kind == others[name].dtype.kind == "float"]
    for names, text in ((lacking, "without"), (extra, "also with"), (shapes, "other shapes of"), (kinds, "other dtypes of")):
        if names:
            yield f"{text} {few(names, 2)}"


def under_hub_names(tensors: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
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
