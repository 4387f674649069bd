"""The plan of a merge: options, components, names, dtypes, side files and place, decided before anything is written."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_cli.base_model.opened import Base, open_base
from ckpt_cli.discover.default_output import among_steps_notes, default_output
from ckpt_cli.discover.nodes.also import more_folders
from ckpt_cli.discover.open import Opened, OpenedComponent
from ckpt_cli.drafting.draft import Draft, Setting
from ckpt_cli.drafting.job import Job, check_output, refuse_drafts
from ckpt_cli.drafting.steps import copies_compared, finished
from ckpt_cli.errors import UsageError
from ckpt_cli.files.folders import is_file
from ckpt_cli.files.source import Files
from ckpt_cli.formats.safetensors.names import INDEX, SINGLE
from ckpt_cli.formats.step_names import numbered
from ckpt_cli.hub.assets import CONFIG
from ckpt_cli.hub.peft_names import ADAPTER_CONFIG, has_adapters
from ckpt_cli.lora.merge import adapters_alone, check_adapter_files, check_factors, with_adapters_fused
from ckpt_cli.merging.adapters import adapter_draft, adapter_files, fused_adapters, lora_mode, refuse_other_adapters
from ckpt_cli.merging.adapters_fit import check_adapters_fit
from ckpt_cli.merging.export_options import check_export_options
from ckpt_cli.merging.kept_config import kept_config_notes
from ckpt_cli.merging.match_base import matched_with_base
from ckpt_cli.merging.options import MergeOptions
from ckpt_cli.merging.plain_weights import with_plain_config
from ckpt_cli.names import plural
from ckpt_cli.output import plan
from ckpt_cli.output.key_map import Rule, read_key_map
from ckpt_cli.output.select import select_tensors
from ckpt_cli.paths import absolute
from ckpt_cli.results.checkpoint import LoraInfo
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import same_bytes

Group = tuple[OpenedComponent, ...]


def planned_jobs(
    opened: Opened, output: str | os.PathLike[str] | None, base: Base | None, rules: tuple[Rule, ...], options: MergeOptions
) -> list[Job]:
    """One job per folder that will be written. Raises UsageError, OutputError, and what selecting tensors raises."""
    setting = Setting.of(opened.found, base, rules, options)
    _refuse_itself(opened, base)
    groups = _groups(opened, setting)
    jobs: list[Job] = []
    for group in groups:
        target = _target_of(opened, group[0], output, options, one_of_many=len(groups) > 1)
        adapted = [component for component in group if has_adapters(component.component.tensors)]
        for component in group:
            check_adapter_files(component, keep=options.lora == "keep")
            refuse_other_adapters(component, options)
        mode = lora_mode(group, setting)
        if options.lora in ("export", "both") and not adapted:
            raise UsageError(f"--lora {options.lora}: there are no LoRA adapters in {group[0].name}", hint="leave out --lora")
        if options.lora_alpha is not None and (not adapted or options.lora == "keep"):
            why = "with --lora keep nothing is scaled" if adapted else f"there are no LoRA adapters in {group[0].name}"
            raise UsageError(f"--lora-alpha does not apply: {why}", hint="leave it out")
        if mode != "export":
            jobs.append(_model_job(opened, group, target, setting))
        if mode in ("export", "both"):
            beside = target if mode == "export" else target.with_name(f"{target.name}_adapter")
            jobs += [_adapter_job(opened, component, beside, setting) for component in adapted]
    if len({job.output for job in jobs}) < len(jobs):
        raise UsageError("two components would go to the same folder", hint="merge them one by one with --type and -o")
    if output is None and not options.in_place:
        jobs = [replace(job, notes=(*job.notes, *among_steps_notes(opened.found, job.output))) for job in jobs]
    return jobs


def planned_drafts(opened: Opened, base: Path | None, options: MergeOptions, files: Files) -> list[Draft]:
    """What `merge` would write of an opened checkpoint with these options, without an output folder: for `verify` and `open`."""
    reference = open_base(base, files, needed=options.needs_base_weights) if base is not None else None
    setting = Setting.of(opened.found, reference, read_key_map(options.key_map), options)
    drafts: list[Draft] = []
    exported: list[Draft] = []
    for group in _groups(opened, setting):
        mode = lora_mode(group, setting)
        drafts += _drafts(group, setting) if mode != "export" else ()
        adapted = [component for component in group if has_adapters(component.component.tensors)] if mode in ("export", "both") else []
        exported += [adapter_draft(component, setting)[0] for component in adapted]
    return drafts + exported


def _refuse_itself(opened: Opened, base: Base | None) -> None:
    """Raise UsageError if the base is what is merged, also through links: what is said of it would be no comparison."""
    if base is None or base.component is None:
        return
    held = base.component.tensors.values()
    if all(same_bytes(component.component.tensors.values(), held) for component in opened.components):
        hint = "pass the model that training started from, or leave out --base"
        raise UsageError("--base names what is merged itself, so there is nothing to compare", path=base.folder, hint=hint)


def _groups(opened: Opened, setting: Setting[MergeOptions]) -> Sequence[Group]:
    """The components of each folder."""
    shared = setting.style.shared or setting.options.in_place
    return [opened.components] if shared else [(component,) for component in opened.components]


def _target_of(
    opened: Opened, first: OpenedComponent, output: str | os.PathLike[str] | None, options: MergeOptions, *, one_of_many: bool
) -> Path:
    """The folder that a component is written to."""
    if options.in_place:
        return first.place.home
    if output is None:
        return default_output(opened.found, first.name)
    given = Path(absolute(output))
    return given / first.name if one_of_many else given


def _model_job(opened: Opened, group: Group, target: Path, setting: Setting[MergeOptions]) -> Job:
    drafts, style, options = _drafts(group, setting), setting.style, setting.options
    for draft in drafts:
        _refuse_part_in_place(draft, options)
    refuse_drafts(drafts, setting)
    loaded = options.weights_name or style.loaded
    index_name = INDEX if style.loaded else drafts[0].plan.index_name
    whole = plan.united([draft.plan for draft in drafts], index_name, loaded if style.loaded else None)
    names = [file.name for file in whole.files]
    if options.in_place:
        _refuse_beside_adapter(target, {*names, whole.index_name})
        _refuse_beside_config(target, drafts)
    if len(set(names)) < len(names):
        hint = (
            "leave out --in-place: each then gets a folder of its own" if options.in_place else "merge them one by one with --type and -o"
        )
        raise UsageError("two components would have the same weights file", hint=hint)
    if not options.in_place:
        check_output(target, [opened.found.path], group, setting, whole)
    job = Job.of(drafts, target, whole, setting, _facts(opened, drafts, setting))
    # Under a name of its own nothing loads the weights by the config.
    if not options.in_place or options.weights_name is not None:
        return job
    return replace(job, notes=(*job.notes, *kept_config_notes(target, job.side_files)))


def _adapter_job(opened: Opened, component: OpenedComponent, target: Path, setting: Setting[MergeOptions]) -> Job:
    """The adapters of a component as a folder that PEFT loads."""
    fusible = setting.base is not None or not adapters_alone(component.component.tensors)
    told = check_export_options(setting.options, fusible=fusible)
    if setting.base is not None and setting.base.component is not None:
        check_adapters_fit(component, setting.base.component, setting.base.folder)
    draft, config = adapter_draft(component, setting)
    draft = replace(draft, notes=(*draft.notes, *told))
    whole = plan.united([draft.plan], None, None)
    if not setting.options.in_place:
        check_output(target, [opened.found.path], [component], setting, whole)
    return Job.of([draft], target, whole, setting, _facts(opened, [draft], setting), adapter_files(component, config))


def _facts(opened: Opened, drafts: Sequence[Draft], setting: Setting[MergeOptions]) -> dict[str, object]:
    """What the manifest says besides what every output has."""
    return {
        "checkpoint": absolute(opened.found.path),
        **({"also": list(map(absolute, more))} if (more := more_folders(opened.found)) else {}),
        **numbered(opened.found.numbered_at, opened.found.step),
        "trainer": opened.found.trainer(opened.target.run),
        "component": "+".join(draft.opened.name for draft in drafts),
        "base": None if setting.base is None else absolute(setting.base.folder),
    }


def _refuse_part_in_place(draft: Draft, options: MergeOptions) -> None:
    """Raise UsageError for a part of a model beside its config under the name of the whole: loaders would take it for that."""
    left_out = draft.selection.filtered or draft.selection.unmapped
    if options.in_place and options.weights_name is None and left_out and not draft.claim.is_whole:
        name = draft.plan.files[0].name
        raise UsageError(
            f"--in-place would write {name} without {plural(len(left_out), 'tensor')} of the model, and loaders take it for the whole",
            hint="name the file with --weights-name, or write to another folder with -o",
        )


def _refuse_beside_config(folder: Path, drafts: Sequence[Draft]) -> None:
    """Raise UsageError for weights beside a config.json that says of them what is not true, and stays there."""
    unsaid = [entry for draft in drafts for entry in draft.assets.unsaid]
    if unsaid and is_file(folder / CONFIG):
        raise UsageError(
            f"--in-place would write plain weights beside a config.json with {unsaid[0]}, which stays there: loaders look for codes",
            path=folder,
            hint="pass -o instead of --in-place",
        )


def _refuse_beside_adapter(folder: Path, names: Collection[str | None]) -> None:
    """Raise UsageError for weights under the ``names`` of a model beside an adapter_config.json, which stays there."""
    if is_file(folder / ADAPTER_CONFIG) and not {SINGLE, INDEX}.isdisjoint(names):
        raise UsageError(
            f"--in-place would write a model beside {ADAPTER_CONFIG}, for which transformers loads an adapter on top of the model",
            path=folder,
            hint="pass -o instead of --in-place",
        )


def _drafts(group: Group, setting: Setting[MergeOptions]) -> list[Draft]:
    """The components of one folder, planned."""
    names, own = [component.name for component in group], setting.options.weights_name
    if own is not None and len(group) > 1:
        # A second one finds the manifest of the first in place, and is refused.
        first = "leave out --in-place, and " if setting.options.in_place else ""
        raise UsageError("one weights name for several components", hint=f"{first}merge them one by one with --type and -o")
    matched = matched_with_base if setting.options.match_base else None
    return [
        finished(_fused(component, setting), setting, own or setting.style.weights_name(component.name, names), matched)
        for component in group
    ]


def _fused(component: OpenedComponent, setting: Setting[MergeOptions]) -> Draft:
    """A component with its adapters in its weights, unless they are kept, and the tensors that are selected."""
    options, chosen, keep = setting.options, component.component, setting.options.lora == "keep"
    fused = component.made.fused_adapters if component.made is not None else ()
    notes: tuple[Note, ...] = ()
    lora: LoraInfo | None = None
    if keep:
        check_factors(chosen.tensors)
    refuse_other_adapters(component, options)
    if not keep and has_adapters(chosen.tensors):
        alone = setting.base is not None and adapters_alone(chosen.tensors)
        reference = setting.base.weights() if setting.base is not None and alone else None
        component, told = with_plain_config(component, setting.base, {} if reference is None else reference.tensors)
        fused, notes = fused_adapters(component, setting.base, fused, options)
        chosen, lora, more = with_adapters_fused(
            component, reference, options.lora_alpha, cast=options.dtype not in (None, "keep"), allow_overflow=options.allow_overflow
        )
        # What is computed of tensors has no replicas any more.
        kept = {id(tensor) for tensor in chosen.tensors.values()}
        computed = [tensor for tensor in component.component.tensors.values() if id(tensor) not in kept]
        notes = (*notes, *told, *more, *copies_compared(computed, setting))
    config, live, lacking = component.assets.config, component.live, component.lacking
    selection = select_tensors(chosen, config, options, setting.rules, adapters=keep, live=live, lacking=lacking)
    return Draft((component,), component.assets, chosen.tensors, selection, (*notes, *selection.notes), fused=fused, lora=lora)
