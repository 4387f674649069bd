"""Opening a checkpoint: the newest complete step of a run, its components described and proved complete."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from ckpt_cli import shell
from ckpt_cli.discover.around.given_otherwise import give
from ckpt_cli.discover.before.neighbours import neighbour_notes
from ckpt_cli.discover.before.parts import lost_part_notes
from ckpt_cli.discover.before.restarts import restart_notes
from ckpt_cli.discover.before.side_files import assets_of_step
from ckpt_cli.discover.beside.configs import config_notes, with_config
from ckpt_cli.discover.beside.files import left_out_notes
from ckpt_cli.discover.beside.final_model import compared_stray_notes, stray_notes
from ckpt_cli.discover.beside.homes import asset_homes, asset_notes, doubtful_homes
from ckpt_cli.discover.beside.marks import check_marks, mark_notes
from ckpt_cli.discover.beside.models import model_notes
from ckpt_cli.discover.beside.optimizer import weights_hint
from ckpt_cli.discover.beside.other_steps import other_step_notes
from ckpt_cli.discover.beside.outputs import made_by_ckpt
from ckpt_cli.discover.beside.siblings import sibling_notes
from ckpt_cli.discover.beside.stages import refuse_stage
from ckpt_cli.discover.between import between_notes
from ckpt_cli.discover.components import called_ema, component_names, expanded, several_notes, unread_averages, why_none, with_ema_of_model
from ckpt_cli.discover.counters import notes_of_ranks, renamed_notes
from ckpt_cli.discover.downloads.commits import commit_notes
from ckpt_cli.discover.downloads.copies import copy_notes
from ckpt_cli.discover.downloads.hub_cache import snapshot_notes
from ckpt_cli.discover.downloads.unfinished import unfinished_notes
from ckpt_cli.discover.forms.archives import why_bare
from ckpt_cli.discover.forms.holders import tell_whole_form
from ckpt_cli.discover.forms.inner_runs import inner_run_notes
from ckpt_cli.discover.forms.inner_steps import inner_step_notes
from ckpt_cli.discover.forms.leftover_indexes import leftover_index_notes
from ckpt_cli.discover.forms.lone_parts import lone_part_notes
from ckpt_cli.discover.forms.not_taken import not_taken_notes
from ckpt_cli.discover.forms.passed_over import passed_over_notes
from ckpt_cli.discover.forms.registered import registered_notes
from ckpt_cli.discover.forms.tensors_beside import TensorsBeside, tensors_beside
from ckpt_cli.discover.forms.twins import twin_notes, without_twin
from ckpt_cli.discover.found import Found, Place, Target
from ckpt_cli.discover.locate import locate
from ckpt_cli.discover.newest import PASSED, Passed, ambiguous, newest_first, short_reason, skipped_notes
from ckpt_cli.discover.nodes.also import also_notes, check_more, contradicts, fetch_hint, more_folders
from ckpt_cli.discover.optimizers.mixed_saves import mixed_notes
from ckpt_cli.discover.optimizers.train_mode import train_mode_notes
from ckpt_cli.discover.places import unread_notes
from ckpt_cli.discover.recorded.modelopt import modelopt_notes
from ckpt_cli.discover.recorded.notes import recorded_notes
from ckpt_cli.discover.step_infos import listed_component, step_info, steps_of
from ckpt_cli.discover.steps import newest_notes, told_by_trackers
from ckpt_cli.errors import CkptError, CorruptFile, IncompleteError, IsOptimizer, MissingShard, NotFound, Undecidable
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.manifest import Manifest, watched_manifest
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions, ShardOrder
from ckpt_cli.formats.registry import describe
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.hub.adapters.mlx import trained_layers_notes
from ckpt_cli.hub.assets import CONFIG, Assets
from ckpt_cli.hub.config import Config, architecture, expert_count
from ckpt_cli.hub.layers.counts import layer_count
from ckpt_cli.hub.layers.later import later_notes
from ckpt_cli.hub.second_component import lacking_notes, lacking_of_model, model_of_average, statistics_notes
from ckpt_cli.hub.ties import Live
from ckpt_cli.names import unnumbered
from ckpt_cli.results.checkpoint import Checkpoint, ComponentInfo, NoteInfo
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.tensor import Tensor

MAX_OTHERS = 3
"""How many other steps are looked into, for a hint: each takes as long as describing a checkpoint."""


@dataclass(frozen=True, slots=True)
class OpenedComponent:
    """A component that was read and tiles exactly, with the assets that belong to it; ``homes`` are the folders of its side files.

    ``live``: of a second component, the tensors of the model beside it. ``lacking`` are names that it should have, as that model has them.
    ``made``: the manifest of the output of ckpt that its files are. ``beside`` are side files with tensors of the model.
    """

    name: str
    place: Place
    component: Component
    assets: Assets
    homes: tuple[Path, ...] = ()
    live: Live | None = None
    lacking: tuple[str, ...] = ()
    made: Manifest | None = None
    beside: tuple[TensorsBeside, ...] = ()


@dataclass(frozen=True, slots=True)
class Opened:
    """The checkpoint selected by a path and options.

    ``problems`` says why newer steps were skipped; ``chosen``: the step of a run was not requested by number.
    """

    target: Target
    found: Found
    components: tuple[OpenedComponent, ...]
    problems: dict[Path, str]
    notes: tuple[Note, ...]
    chosen: bool = False


def open_checkpoint(
    path: str | os.PathLike[str],
    files: Files,
    *,
    type: str | None = None,
    step: int | None = None,
    base: Path | None = None,
    also: tuple[Path, ...] = (),
    shard_order: ShardOrder = "auto",
    ema_from_model: bool = False,
    located: Target | None = None,
) -> Opened:
    """Locate ``path``, choose the newest complete step (or ``step``), describe the components that ``type`` means.

    ``also`` are folders that hold more files of the same checkpoint; ``ema_from_model``: a checkpoint without EMA gets a
    component "ema" that is its model; ``located`` is what `locate` found at the path, if that was asked before.
    Raises NotFound, NotRecognised, InputError for unreadable files and newer steps that cannot be looked at, IncompleteError for a
    checkpoint that is not whole, AmbiguousStep if the newest step is whole in several folders.
    """
    give(files, (path, base, *also))
    target = located or locate(path, step, also)
    choosing = step is None and target.run is not None and len(target.checkpoints) > 1
    passed = Passed()

    def is_whole(other: Found) -> bool:
        return _why_not_whole(other, type, files, base, shard_order) is None

    def attempt(listed: Found) -> tuple[Found, tuple[OpenedComponent, ...]]:
        if step is None and target.blocked and any(map(target.since(listed), target.blocked)):
            hint = _step_hint(listed, target, also, located) if is_whole(listed) else None
            target.check_readable(target.since(listed), hint)
        found = expanded(listed, files)
        if ema_from_model:
            found = with_ema_of_model(found)
        return found, tuple(describe_place(found, name, files, base, shard_order) for name in component_names(found, type))

    def may_pass(listed: Found, error: CkptError) -> bool:
        if not isinstance(error, PASSED) or (choosing and not (isinstance(error, Undecidable) or contradicts(listed, error))):
            return isinstance(error, PASSED)
        whole = _other_step(listed, target, is_whole) if _helps(error) else None
        hint = _step_hint(whole, target, also, located) if whole is not None else None
        fetch = fetch_hint(path) if isinstance(error, MissingShard) else None
        error.hint = ", or ".join(filter(None, (error.hint or fetch, hint))) or None
        return False

    for listed, (found, components) in newest_first(reversed(target.checkpoints), attempt, passed, may_pass):
        problems = passed.reasons
        if choosing:
            _refuse_rival(listed, target, problems, lambda other: _why_not_whole(other, type, files, base, shard_order))
        newer = target.since(found) if step is None and target.run is not None else lambda _: False
        notes = bare_notes(target, newer, compared_stray_notes(target, [one.component for one in components], files))
        notes += skipped_notes(target, problems)
        if type in ("ema", "both") and (ema := called_ema(found)) not in ("ema", None):
            notes.append(Note("info", "ema-by-name", f"no component is called ema; {ema} was used, an average by its name"))
        notes += [*also_notes(target, [(found, [one.name for one in components])]), *several_notes(target, found, type)]
        notes += unread_averages(target, found, type)
        renamed = renamed_notes(found, [opened.component for opened in components])
        notes += [*(renamed or mixed_notes(found, components[0].place, files)), *lost_part_notes(found)]
        if step is None and target.run is not None:
            notes += [*newest_notes(target, found, is_whole), *inner_run_notes(target, found, files)]
        else:
            notes += told_by_trackers(target, found)
        opened = {(one.place.match.number, one.place.match.component) for one in components}
        notes += [note for one in components for note in one.component.notes
                  if not (note.others and opened.issuperset((one.place.match.number, other) for other in note.others))]  # fmt: skip
        notes += not_taken_notes(target, found, [one.place for one in components], notes, files)
        return Opened(target, found, components, problems, tuple(notes), step is None and target.run is not None and found.step is not None)
    target.check_readable(lambda _: True)
    first = why_none(target, passed.errors, type, files)
    if first is None:
        raise NotFound("there is no checkpoint", path=path)
    if isinstance(first, MissingShard):
        none = "; no step of this run is complete" if not any(isinstance(error, NotFound) for _, error in passed.errors) else ""
        first.hint = f"{first.hint or fetch_hint(path)}{none}"
    raise first


def describe_checkpoint(opened: Opened, extra_notes: Iterable[Note] = (), *, tensors: bool = False) -> Checkpoint:
    """The descriptor of an opened checkpoint, in totals or with its ``tensors``; components that were not opened are listed by name."""
    main = opened.components[0]
    described = {opened.name: ComponentInfo.of(opened.component, opened.name, listed=tensors) for opened in opened.components}
    listed = {place.name: described.get(place.name) or listed_component(place) for place in opened.found.places}
    return Checkpoint(
        path=str(opened.found.path),
        step=opened.found.step,
        run=str(opened.target.run) if opened.target.run else None,
        also=tuple(map(str, more_folders(opened.found))),
        framework=opened.found.trainer(opened.target.run),
        components=tuple(listed.values()),
        newest_complete=opened.chosen,
        steps=steps_of(opened.target, opened.problems),
        assets=tuple(main.assets.names),
        lacking=tuple(main.assets.lacking),
        architecture=architecture(main.assets.config),
        layers=layer_count(main.assets.config),
        notes=tuple(NoteInfo.of(note) for note in (*opened.notes, *extra_notes)),
    )


def describe_place(found: Found, name: str, files: Files, base: Path | None, shard_order: ShardOrder) -> OpenedComponent:
    """One component of a checkpoint, described and proved whole, with its assets. Raises what `describe` raises."""
    place = found.known_place(name)
    homes = tuple(asset_homes(found, place))
    check_more(found, place)
    assets = assets_of_step(found, homes, base, doubtful_homes(found, place))
    check_marks(found, place)
    try:
        options = reading_options(assets.config, shard_order)
        component = describe(place.match, files, options)
    except IsOptimizer as error:
        error.hint = weights_hint(place.match.root, Folders())
        raise
    except CkptError as error:
        tell_whole_form(error, place, files)
        raise
    assets, made = with_config(assets, component, place.match, files, base)
    refuse_stage(found, place, component, files)
    models = {} if found.is_named(place) else model_notes(found, place, component, assets.config, files)
    restarts = restart_notes(place.home, place.name, component.tensors, base, files)
    notes = (
        *component.notes,
        *(linked := other_step_notes(found, place, (*place.match.files, *component.files))),
        *made,
        *passed_over_notes(found, place, component, assets.config, files),
        *left_out_notes(found, place, component, assets.files.values(), files),
        *copy_notes(found, place, component, assets.files.values(), files),
        *leftover_index_notes(found, place),
        *registered_notes(found, place, component, files),
        *commit_notes(component.files, assets.files.get(CONFIG)),
        *unfinished_notes((*homes, *([base] if base is not None else [])), assets.files),
        *models.values(),
        *restarts.values(),
        *sibling_notes(found, place, component, assets.config, files, {*models, *restarts, *([base] if base is not None else [])}),
        *inner_step_notes(found, place, component, assets.config, options, files),
        *config_notes(found, place, assets),
        *neighbour_notes(found, place, homes, component, assets, options, files, is_linked=bool(linked)),
        *recorded_notes(homes, assets, place.match, files, base),
        *notes_of_ranks(place, files),
        *twin_notes(place.name, component.tensors),
        *lone_part_notes(place, assets.config),
        *train_mode_notes(found, place, files),
        *modelopt_notes(homes, place.name),
        *unread_notes(found, place),
        *mark_notes(found, place),
        *between_notes(found, place),
        *snapshot_notes(found),
        *asset_notes(found, place, assets, component.tensors),
        *([] if base is not None else _part_notes(homes, assets.config, component)),
    )
    average = is_average_name(unnumbered(name)[0])
    models_beside = {
        other: cache(partial(_live_tensors, found, other, files, base, shard_order)) for other in _models_beside(found, place, average)
    }
    live = model_of_average(name, component.tensors, models_beside) if average else next(iter(models_beside.values()), None)
    lacking: tuple[str, ...] = ()
    if live is not None and (tensors := live()) is not None:
        tensors = without_twin(tensors) if average else tensors
        lacking = lacking_of_model(component.tensors, tensors, assets.config, average=average)
        notes = (*notes, *lacking_notes(name, lacking, len(tensors)))
        if average and files.values:
            notes = (*notes, *statistics_notes(name, component.tensors, tensors))
    component = replace(component, name=name, notes=notes, watched=(*component.watched, *watched_manifest(component.root, files)))
    beside = tensors_beside(assets.files, assets.config, files, found.path)
    return OpenedComponent(name, place, component, assets, homes, live, lacking if average else (), made_by_ckpt(component), beside)


def _part_notes(homes: Sequence[Path], config: Config, component: Component) -> list[Note]:
    """A warning about layers without those before them, or without the rest of the model; the base of a merge tells more."""
    shapes = {name: tensor.shape for name, tensor in component.tensors.items()}
    return trained_layers_notes(homes, shapes) or later_notes(config, shapes)


def reading_options(config: Config, shard_order: ShardOrder) -> ReadOptions:
    """What a model's config and the user say that reading may need."""
    return ReadOptions(expert_count(config), bool(config), shard_order)


def _models_beside(found: Found, place: Place, average: bool) -> list[str]:
    """The models that a second component is compared with: for an average all; for another the first, if the same files hold it."""
    alike = [other for other in found.places if not is_average_name(unnumbered(other.name)[0]) and other.match.number == place.match.number]
    if not alike or alike[0].name == place.name or alike[0].match is place.match:
        return []
    if average:
        return [other.name for other in alike]
    return [alike[0].name] if alike[0].match.root == place.match.root else []


def _live_tensors(found: Found, model: str, files: Files, base: Path | None, shard_order: ShardOrder) -> Mapping[str, Tensor] | None:
    """The tensors of the model beside a component, None if it is not whole: it is only compared with."""
    try:
        return describe_place(found, model, files, base, shard_order).component.tensors
    except CkptError:
        return None


def _helps(error: CkptError) -> bool:
    """Whether another step may not have this error."""
    return isinstance(error, (IncompleteError, CorruptFile)) and not isinstance(error, Undecidable)


def _other_step(found: Found, target: Target, is_whole: Callable[[Found], bool]) -> Found | None:
    """The newest other step of the run that is whole, of the first few whose files are all there by name; None if none of these is."""
    siblings = target.checkpoints
    if found.step is not None and (target.run is None or len(siblings) <= 1):
        try:
            siblings = locate(found.numbered_at.parent).checkpoints
        except CkptError:
            return None  # only asked for the hint
    others = (other for other in reversed(siblings) if other.path != found.numbered_at and step_info(other).problem is None)
    return next(filter(is_whole, itertools.islice(others, MAX_OTHERS)), None)


def bare_notes(target: Target, counts: Callable[[Path], bool], stray: Iterable[Note] | None = None) -> list[Note]:
    """What is said about step folders without weights, of those that ``counts``, and about ``stray`` files beside them."""
    bare = [folder for folder in target.bare if counts(folder)]
    notes = [Note("warning", "step-skipped", f"{target.label(folder)} is skipped: {why_bare(folder)}") for folder in bare]
    return [*(stray_notes(target) if stray is None else stray), *notes]


def _step_hint(whole: Found, target: Target, also: tuple[Path, ...], located: Target | None) -> str | None:
    """How to ask for another step, which is whole: by number where the command takes one (others locate by themselves), or by folder."""
    if len(whole.more) < len(target.also):
        return None  # the folder of --also has no such step
    if target.run is not None and located is None and (option := target.option(whole)) is not None:
        return f"pass {option}, which is whole"
    return None if also or target.nodes > 1 else f"use {shell.path(whole.path)}, which is whole"


def _why_not_whole(found: Found, type: str | None, files: Files, base: Path | None, shard_order: ShardOrder) -> CkptError | None:
    """The error with which the components of another step that ``type`` means cannot be read."""
    try:
        found = expanded(found, files)
        for name in component_names(found, type):
            describe_place(found, name, files, base, shard_order)
    except CkptError as error:
        return error
    return None


def _refuse_rival(taken: Found, target: Target, problems: dict[Path, str], trouble: Callable[[Found], CkptError | None]) -> None:
    """Raise AmbiguousStep if another folder of the step that was taken is whole too, or cannot be looked at. Others are skipped ones."""
    age = target.age
    same = [found for found in target.checkpoints if age(found) == age(taken)]
    for other in same:
        if other.path == taken.path or other.path in problems:
            continue
        error = trouble(other)
        if error is None or isinstance(error, Undecidable) or not isinstance(error, (IncompleteError, CorruptFile, NotFound)):
            raise ambiguous(target, taken.step, [found for found in same if found.path not in problems])
        problems[other.path] = short_reason(error, other.path)
