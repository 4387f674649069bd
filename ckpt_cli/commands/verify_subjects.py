"""What `verify` checks: sets of weights of a model folder, a file of one, or the components of a sharded checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_cli.discover.before.parts import lost_part_notes
from ckpt_cli.discover.before.restarts import restart_notes
from ckpt_cli.discover.before.settings import step_settings_notes
from ckpt_cli.discover.before.side_files import assets_of_step
from ckpt_cli.discover.before.tensors import step_tensors_notes
from ckpt_cli.discover.beside.homes import asset_homes, doubtful_homes
from ckpt_cli.discover.beside.marks import mark_notes
from ckpt_cli.discover.beside.siblings import notes_below
from ckpt_cli.discover.components import SYNONYMS
from ckpt_cli.discover.downloads.commits import commit_notes
from ckpt_cli.discover.downloads.copies import notes_of_copies
from ckpt_cli.discover.downloads.unfinished import unfinished_notes
from ckpt_cli.discover.forms.composite import composite_in
from ckpt_cli.discover.forms.inner_steps import Read, notes_inside
from ckpt_cli.discover.forms.states_inside import steps_inside_notes
from ckpt_cli.discover.found import Found
from ckpt_cli.discover.locate import locate
from ckpt_cli.discover.open import Opened, open_checkpoint
from ckpt_cli.discover.places import places_in
from ckpt_cli.drafting.draft import Draft
from ckpt_cli.errors import CkptError, NotFound, UsageError
from ckpt_cli.files.folders import Folders, is_file, is_folder
from ckpt_cli.files.manifest import Manifest
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ReadOptions
from ckpt_cli.formats.registry import describe, format_of
from ckpt_cli.formats.safetensors.folder import FORMAT
from ckpt_cli.formats.safetensors.names import INDEX_SUFFIX, SUFFIX, is_index, safetensors_part, stem_of
from ckpt_cli.formats.safetensors.scan import WeightSet
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.hub.adapters.other_kinds import OtherAdapters, other_adapters
from ckpt_cli.hub.assets import CONFIG, files_of
from ckpt_cli.hub.beside.lacking import lost_notes
from ckpt_cli.hub.peft_names import has_adapters
from ckpt_cli.loading.notes import notes_of_reading
from ckpt_cli.lora.config import CONFIG as ADAPTER_CONFIG
from ckpt_cli.lora.merge import is_kept_for_reading
from ckpt_cli.merging.options import MergeOptions
from ckpt_cli.merging.plan import planned_drafts
from ckpt_cli.names import few
from ckpt_cli.paths import absolute
from ckpt_cli.progress import Progress
from ckpt_cli.results.verify import Finding
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor, same_bytes
from ckpt_cli.verifying.adapter import check_adapter, check_on_top, no_factors
from ckpt_cli.verifying.beside import damaged_files
from ckpt_cli.verifying.checks import Checks, Outcome
from ckpt_cli.verifying.config import ConfigCheck, check_config, without_config
from ckpt_cli.verifying.findings import KINDS, finding
from ckpt_cli.verifying.folder import MODEL, FolderCheck, check_folder, index_findings, is_model_folder, is_of_torch
from ckpt_cli.verifying.options import Asked, VerifyOptions
from ckpt_cli.verifying.values import check_ties, check_values, check_weights_beside

STATE, THE_STEP = "extract-state", "the step"
UNREAD = ("damaged-config", "lfs-pointer", "file-pointer", "unreadable-file")
"""What can be found about a config that is not compared with anything."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is verified: tensors by name of one set of weights, and findings about its files.

    ``stored`` are the tensors as the files have them, whose bytes are read; for a model folder these are the same. ``homes``
    are the folders that may hold files about its adapters; ``notes`` were made while opening it, such as a skipped step. ``loaded_as`` is
    the file that loaders of a model folder need to know: the index, or the only one.
    """

    path: Path
    component: str
    format: str
    files: int
    tensors: Mapping[str, Tensor]
    stored: Mapping[str, Tensor]
    readable: bool
    folder: FolderCheck | None
    config_home: Path | None
    findings: tuple[Finding, ...]
    homes: tuple[Path, ...] = ()
    notes: tuple[Note, ...] = ()
    loaded_as: str | None = None

    @property
    def manifest(self) -> Manifest | None:
        return self.folder.manifest if self.folder is not None else None

    @property
    def is_model(self) -> bool:
        return self.manifest is None or self.manifest.command != STATE


def is_output(path: Path) -> bool:
    """Whether a path is a model folder, or a file in one: --step then means the source."""
    return is_model_folder(path) if is_folder(path) else _is_of_model(path.name)


def _is_of_model(name: str) -> bool:
    return name.endswith(SUFFIX) or is_index(name)


def find_subjects(path: Path, files: Files, asked: Asked, *, of_source: bool) -> list[Subject]:
    """The weights that a path refers to, the main ones first. Folders of safetensors files are taken as they are, damaged or not.

    ``of_source``: component, step and folders of other nodes are those of what the weights are compared with. Raises NotFound if the
    component that is asked for is not there.
    """
    step, also = (None, ()) if of_source else (asked.step, asked.also)
    plain = step is None and not also
    if plain and is_folder(path) and is_model_folder(path) and (of_source or _has(path, files, asked.type)):
        places = tuple(places_in(path, Folders()))
        taken = {place.match.root for place in places}
        as_step = Found(path, step_of(path), places)
        lost = [*_lost_by_step(as_step, files), *(mark_notes(as_step, places[0]) if places else ())]
        found = _folder_subjects(path, files, asked.type)
        lost += _steps_inside(path) if as_step.step is None else []
        return [replace(one, notes=(*_notes_below(path, taken, one, files), *lost, *_of_downloads(path, one, files))) for one in found]
    in_folder = plain and is_file(path) and _is_of_model(path.name) and is_model_folder(path.parent)
    if in_folder and (of_source or _has(path.parent, files, asked.type)):
        return [_file_subject(path, files)]
    opened = open_checkpoint(path, files, type=asked.type, step=step, also=also, shard_order=asked.options.shard_order)
    return [subject for one in opened.components for subject in _of_component(replace(opened, components=(one,)), files, asked)]


def _has(folder: Path, files: Files, type: str | None) -> bool:
    """Whether a component of this name is among the sets of weights of a model folder, rather than beside them or nowhere."""
    if type is None or SYNONYMS.get(type, type) == MODEL:
        return True
    checked = check_folder(folder, files)
    made = checked.manifest.facts.get("component") if checked.manifest is not None else None
    there = {*(str(made).split("+") if made is not None else ()), *(weights.name for weights in checked.sets)}
    if checked.manifest is None:
        return type in there
    if type == "all" or type in there or (type == "both" and len(there) > 1):
        return True
    raise NotFound(
        f"this output does not hold what --type {type} asks for", path=folder, expected=few(sorted(there)), hint="leave --type out"
    )


def _of_component(opened: Opened, files: Files, asked: Asked) -> list[Subject]:
    """What the only component of a checkpoint has: the sets of weights of its folder, or the tensors that a merge would write."""
    first = opened.components[0]
    root, notes = first.component.root, (*opened.notes, *lost_notes(first.assets, THE_STEP))
    if format_of(first.component).is_loaded and is_folder(root):
        subjects = _folder_subjects(root, files, first.place.match.component if asked.type is not None else None)
        return [replace(subject, notes=notes) for subject in subjects]
    home = first.assets.files[CONFIG].parent if CONFIG in first.assets.files else None
    part, component = _merged_part(opened, files, asked.options.lora_alpha), first.component
    # What a merge says of values, unless the checks that follow find it themselves: they see no adapters that were fused.
    adapted = has_adapters(component.tensors)
    notes = (*notes, *(note for note in notes_of_reading(part) if adapted or note.code not in KINDS))
    known = part.claim.fit is not None and part.claim.fit.expected is not None
    beside = {name: what for name, what in part.claim.lacking.items() if name in part.selection.lacking and not known}
    return [
        Subject(
            path=opened.found.path,
            component=first.name,
            format=component.format,
            files=len(component.files),
            tensors={output.name: output.tensor for output in part.plan.tensors},
            stored=component.tensors,
            readable=True,
            folder=None,
            config_home=home,
            findings=(
                *(finding("less-than-model", what, tensor=name) for name, what in beside.items()),
                *index_findings(component.files, files),
                *damaged_files(first.assets.files, written=False),
                *(check_on_top(root, component.tensors) if is_of_torch(component.files) else ()),
            ),
            homes=first.homes,
            notes=notes,
        )
    ]


def _lost_by_step(found: Found, files: Files) -> list[Note]:
    """Warnings about what another step has, and a folder that is a step lacks or has otherwise: files, parts with weights, tensors."""
    if found.step is None or not found.places:
        return []
    with contextlib.suppress(CkptError):  # what cannot be read is found by other checks
        place, options = found.places[0], ReadOptions()
        homes = tuple(asset_homes(found, place))
        assets = assets_of_step(found, homes, None, doubtful_homes(found, place))
        notes = [*lost_notes(assets, THE_STEP), *step_settings_notes(found, homes, assets), *lost_part_notes(found)]
        with contextlib.suppress(CkptError):  # the same, and what is said so far counts
            notes += step_tensors_notes(found, place, describe(place.match, files, options).tensors, options, files)
        return notes
    return []


def _steps_inside(path: Path) -> list[Note]:
    """A warning about steps in a folder that has weights of its own."""
    with contextlib.suppress(CkptError):  # what cannot be looked at is told where it is read
        return steps_inside_notes(locate(path))
    return []


def _of_downloads(path: Path, one: Subject, files: Files) -> list[Note]:
    """What is said of downloads into a folder: files that did not arrive, second ones, those of several commits."""
    weights = dict.fromkeys(Path(piece.source.path) for tensor in one.stored.values() for piece in tensor.pieces)
    with contextlib.suppress(CkptError):
        assets = files_of(path)
        copies = notes_of_copies({*map(absolute, weights)}, [*weights, *assets.values()], files)
        return [*unfinished_notes((path,), {}), *commit_notes(weights, assets.get(CONFIG)), *copies]
    return []


def _notes_below(path: Path, taken: Collection[Path], one: Subject, files: Files) -> list[Note]:
    read = {Path(piece.source.path) for tensor in one.stored.values() for piece in tensor.pieces}
    restarts = restart_notes(path, one.component, one.stored, None, files)
    below = notes_below((path,), path, {*taken, *restarts}, one.component, one.tensors, {}, files, read=read)
    inside = notes_inside(path, Read(one.component, [*read], one.tensors, {}, ReadOptions(), one.component == MODEL), files)
    return [*restarts.values(), *below, *inside]


def refuse_itself(subject: Subject, opened: Opened, option: str, hint: str) -> None:
    """Raise UsageError if an option names what is verified, also through links: comparing a thing with itself says nothing."""
    if same_bytes(subject.stored.values(), opened.components[0].component.tensors.values()):
        raise UsageError(f"{option} names what is verified itself, so there is nothing to compare", path=subject.path, hint=hint)


def in_parts(asked: Asked) -> dict[str, Asked]:
    """What is asked of each part of a model that has several, by its path in the folder; of other models nothing."""
    whole = composite_in(asked.path, Folders()) if asked.step is None and asked.type is None and is_folder(asked.path) else None
    source = None if asked.against is None else composite_in(asked.against, Folders())
    parts = {} if whole is None else dict(zip(whole.names, whole.parts, strict=True))
    return {
        name: replace(asked, path=part, against=asked.against / name if source is not None and asked.against is not None else asked.against)
        for name, part in parts.items()
    }


def merged_tensors(opened: Opened, files: Files, alpha: float | None) -> dict[str, Tensor]:
    """The tensors of the first component of a checkpoint, as a merge would write them."""
    return {output.name: output.tensor for output in _merged_part(opened, files, alpha).plan.tensors}


def _merged_part(opened: Opened, files: Files, alpha: float | None) -> Draft:
    tensors = opened.components[0].component.tensors
    kept, adapted = is_kept_for_reading(tensors), has_adapters(tensors)
    options = MergeOptions(allow_unequal_replicas=True, lora="keep" if kept else None, lora_alpha=alpha if adapted and not kept else None)
    return planned_drafts(opened, None, options, files)[0]


def _file_subject(path: Path, files: Files) -> Subject:
    """One file of a model folder: all files that are loaded with it, and what was found about these."""
    folder = path.parent
    checked = check_folder(folder, files)
    for weights in checked.sets:
        own = {file.name for file in (*weights.files, *([weights.index] if weights.index else []))}
        if path.name in own:
            own |= {f"{stem_of(path.name)}{INDEX_SUFFIX}"} if safetensors_part(path.name) else set()
            about = tuple(item for item in checked.findings if item.file in own or (item.tensor is not None and item.file is None))
            return set_subject(folder, replace(checked, findings=about), weights)
    return _folder_subjects(folder, files, None)[0]


def _folder_subjects(folder: Path, files: Files, type: str | None) -> list[Subject]:
    checked = check_folder(folder, files)
    if not checked.sets:
        if not checked.findings:
            raise NotFound("there are no weights to verify", path=folder, expected="safetensors files")
        return [Subject(folder, type or "model", FORMAT, 0, {}, {}, False, checked, folder, checked.findings)]
    return [set_subject(folder, checked, weights) for weights in _chosen(checked, type)]


def set_subject(folder: Path, checked: FolderCheck, weights: WeightSet) -> Subject:
    """One set of weights of a folder."""
    files_read = len(weights.files) + (weights.index is not None)
    return Subject(
        folder,
        weights.name,
        FORMAT,
        files_read,
        weights.tensors,
        weights.tensors,
        weights.readable,
        checked,
        folder,
        checked.findings,
        (folder,),
        loaded_as=(weights.index or weights.files[0]).name,
    )


def _chosen(checked: FolderCheck, type: str | None) -> list[WeightSet]:
    """The selected sets of weights: all that were written, or the main one; with ``type``, those of that name."""
    outputs = checked.manifest.outputs if checked.manifest is not None else {}
    written = [weights for weights in checked.sets if any(path.name in outputs for path in weights.files)]
    if type in (None, "all", "both"):
        return written or list(checked.sets[:1])
    name = SYNONYMS.get(type, type)
    named = [weights for weights in checked.sets if weights.name == name]
    # A folder with one set of weights has no names for components: what was merged into it is what is meant.
    alone = written or list(checked.sets)
    if named or len(alone) == 1 or name == "model":
        return named or alone[:1]
    raise NotFound(f"there is no component {type}", path=checked.folder, expected=", ".join(weights.name for weights in checked.sets))


def config_of(subject: Subject) -> ConfigCheck:
    """The config that belongs to what is verified, compared with its tensors."""
    if not subject.is_model:
        return ConfigCheck({}, ())
    other = other_adapters(subject.tensors)
    if other is not None:
        return _with_other_adapters(subject, other)
    return _compared(subject)


def _with_other_adapters(subject: Subject, other: OtherAdapters) -> ConfigCheck:
    """Weights with adapters of another kind than PEFT's LoRA beside them, or such adapters alone."""
    told = finding("unfused-adapters", other.text, tensor=other.names[0])
    if other.alone:
        return ConfigCheck({}, (told, finding("not-compared", "these are adapters, which are not part of a model class")))
    factors = {*other.names}
    checked = _compared(subject)
    return replace(checked, findings=(told, *(item for item in checked.findings if item.tensor not in factors)))


def _compared(subject: Subject) -> ConfigCheck:
    """The config of a model, or of PEFT's adapters, compared with the tensors."""
    if has_adapters(subject.tensors):
        known = check_adapter(subject.homes, subject.tensors)
        return ConfigCheck({}, (*known, finding("not-compared", "these are LoRA adapters, which are not part of a model class")))
    if subject.config_home is None:
        return without_config(subject.tensors, written=False)
    if subject.folder is not None and subject.readable and not is_file(subject.config_home / CONFIG):
        adapter = is_file(subject.config_home / ADAPTER_CONFIG)
        lacking = no_factors(subject.config_home, subject.tensors) if adapter else []
        checked = check_config(subject.config_home, subject.tensors, written=not adapter)
        told = {item.code for item in lacking}
        return replace(checked, findings=(*lacking, *(item for item in checked.findings if item.code not in told)))
    # Of a damaged file, what is missing is known already.
    tensors = subject.tensors if subject.readable else {}
    checked = check_config(subject.config_home, tensors, written=subject.folder is not None, loaded_as=subject.loaded_as)
    if not subject.readable:
        return ConfigCheck(checked.config, tuple(item for item in checked.findings if item.code in UNREAD))
    return checked


def checksums_of(subject: Subject) -> dict[str, int]:
    """The CRC-32 of tensors that the manifest has, by name; other files are not covered."""
    if subject.manifest is None:
        return {}
    owners = {name: Path(tensor.pieces[0].source.path).name for name, tensor in subject.tensors.items() if tensor.pieces}
    known = subject.manifest.checksums
    return {name: known[file][name] for name, file in owners.items() if name in known.get(file, {})}


def values_of(
    subjects: Sequence[Subject],
    told: Sequence[Sequence[Finding]],
    files: Files,
    chosen: VerifyOptions,
    progress: Progress | None,
    checks: Checks,
) -> list[Outcome]:
    """What reading the values of each subject finds; ``told`` is what was found about its config.

    Weights beside a model count for the first.
    """
    with_jobs: dict[str, Any] = {"jobs": chosen.jobs, "progress": progress, "checks": checks}
    values = [
        [check_values(one.stored, checksums_of(one), sample=chosen.sample, name=f"values {number}", **with_jobs)]
        for number, one in enumerate(subjects)
    ]
    first = subjects[0]
    if first.manifest is not None and chosen.sample is None:
        values[0].append(check_weights_beside(first.path, first.manifest.side_checksums, files, **with_jobs))
    for number, (one, found) in enumerate(zip(subjects, told, strict=True)):
        values[number].append(check_ties(one.tensors, found, checks, name=f"ties {number}"))
    return [Outcome.joined(outcomes) for outcomes in values]
