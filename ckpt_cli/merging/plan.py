"""The plan of a merge: options, components, names, dtypes, side files and place, decided before anything is written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckpt_cli.base_model.carry import carried_tensors, dtypes_of_base, tied_heads
from ckpt_cli.base_model.checks import checked_base
from ckpt_cli.base_model.opened import Base, named_alike, open_base
from ckpt_cli.discover.beside.outputs import partial_notes
from ckpt_cli.discover.folder_style import FolderStyle, style_of
from ckpt_cli.discover.open import Opened, OpenedComponent
from ckpt_cli.dtypes import BASE
from ckpt_cli.errors import UsageError
from ckpt_cli.files.source import Files
from ckpt_cli.formats.safetensors.folder import INDEX
from ckpt_cli.hub.assets import CONFIG, config_notes
from ckpt_cli.hub.classes.claims import Claim, claim_for, refuse_lacking, without_allowed
from ckpt_cli.hub.classes.dtypes import odd_dtypes
from ckpt_cli.hub.config import Config, ties_embeddings
from ckpt_cli.hub.peft_names import has_adapters
from ckpt_cli.hub.tied_names import tied_pair
from ckpt_cli.hub.ties import differing_notes
from ckpt_cli.hub.tokenizer import vocabulary_notes
from ckpt_cli.lora.merge import adapters_alone, check_adapter_files, check_factors, with_adapters_fused
from ckpt_cli.merging.adapters import adapter_job, adapter_part, fused_adapters, lora_mode
from ckpt_cli.merging.job import Job, Part, check_place_of, target_of
from ckpt_cli.merging.match_base import match_base
from ckpt_cli.merging.options import MergeOptions
from ckpt_cli.merging.trained_on import adapters_of_base
from ckpt_cli.names import few
from ckpt_cli.output import plan
from ckpt_cli.output.key_map import Rule, read_key_map
from ckpt_cli.output.publish import DEFAULT_SHARD_SIZE, model_files
from ckpt_cli.output.select import Selection, compare_copies, is_wanted, select_tensors
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.torn import torn_notes


def planned_jobs(
    opened: Opened, output: str | os.PathLike[str] | None, base: Base | None, rules: tuple[Rule, ...], options: MergeOptions
) -> list[Job]:
    """One job per folder that will be written. Raises UsageError, OutputError, and what selecting tensors raises."""
    style = style_of(opened.found, base.folder if base else None)
    shared = style.shared or options.in_place
    groups = [opened.components] if shared else [(component,) for component in opened.components]
    jobs: list[Job] = []
    for group in groups:
        target = target_of(opened, group[0], output, options, one_of_many=len(groups) > 1)
        adapted = [component for component in group if has_adapters(component.component.tensors)]
        for component in group:
            check_adapter_files(component, keep=options.lora == "keep")
        mode = lora_mode(group, base, options)
        if options.lora in ("export", "both") and not adapted:
            raise UsageError(f"--lora {options.lora}: there are no LoRA adapters in {group[0].name}", hint="leave out --lora")
        if options.lora_alpha is not None and (not adapted or options.lora == "keep"):
            why = "with --lora keep nothing is scaled" if adapted else f"there are no LoRA adapters in {group[0].name}"
            raise UsageError(f"--lora-alpha does not apply: {why}", hint="leave it out")
        if mode != "export":
            jobs.append(_job(opened, group, target, style, base, rules, options))
        if mode in ("export", "both"):
            beside = target if mode == "export" else target.with_name(f"{target.name}_adapter")
            jobs += [adapter_job(opened, component, beside, base, options) for component in adapted]
    if len({job.output for job in jobs}) < len(jobs):
        raise UsageError("two components would go to the same folder", hint="merge them one by one with --type and -o")
    return jobs


def _job(
    opened: Opened,
    group: tuple[OpenedComponent, ...],
    target: Path,
    style: FolderStyle,
    base: Base | None,
    rules: tuple[Rule, ...],
    options: MergeOptions,
) -> Job:
    parts = _parts(group, style, base, rules, options)
    for part in parts:
        _refuse_part_in_place(part, options)
        held = base.component.tensors if base is not None and base.component is not None else None
        refuse_lacking(part.claim, part.selection.tensors, held, options.names)
    loaded = options.weights_name or style.loaded
    whole = plan.united(
        [part.plan for part in parts], INDEX if style.loaded else parts[0].plan.index_name, loaded if style.loaded else None
    )
    names = [file.name for file in whole.files]
    if len(set(names)) < len(names):
        raise UsageError("two components would have the same weights file", hint="merge them one by one with --type")
    check_place_of(opened, group, target, whole, base, options)
    side = model_files(group[0].assets, whole)
    written = {file.name for file in whole.files}
    return Job(parts, target, whole, {name: content for name, content in side.items() if name not in written})


def _refuse_part_in_place(part: Part, options: MergeOptions) -> None:
    """Raise UsageError for a part of a model beside its config under the name of the whole: loaders would take it for that."""
    left_out = part.selection.filtered or part.selection.unmapped
    if options.in_place and options.weights_name is None and left_out and not part.claim.is_whole:
        name = part.plan.files[0].name
        raise UsageError(
            f"--in-place would write {name} without {len(left_out)} tensors of the model, and loaders take it for the whole",
            hint="name the file with --weights-name, or write to another folder with -o",
        )


def _parts(
    group: tuple[OpenedComponent, ...], style: FolderStyle, base: Base | None, rules: tuple[Rule, ...], options: MergeOptions
) -> tuple[Part, ...]:
    """The components of one folder, planned."""
    names = [component.name for component in group]
    if options.weights_name is not None and len(group) > 1:
        raise UsageError("one weights name for several components", hint="merge them one by one with --type")
    return tuple(
        _part(component, options.weights_name or style.weights_name(component.name, names), style, base, rules, options)
        for component in group
    )


def planned_parts(opened: Opened, base: Path | None, options: MergeOptions, files: Files) -> list[Part]:
    """What `merge` would write of an opened checkpoint with these options, without an output folder: for `verify`."""
    rules = read_key_map(Path(options.key_map)) if options.key_map is not None else ()
    reference = open_base(base, files, needed=options.needs_base_weights) if base is not None else None
    style = style_of(opened.found, base)
    shared = style.shared or options.in_place
    groups = [opened.components] if shared else [(component,) for component in opened.components]
    parts: list[Part] = []
    exported: list[Part] = []
    for group in groups:
        mode = lora_mode(group, reference, options)
        parts += _parts(group, style, reference, rules, options) if mode != "export" else ()
        adapted = [component for component in group if has_adapters(component.component.tensors)] if mode in ("export", "both") else []
        exported += [adapter_part(component, reference, options)[0] for component in adapted]
    return parts + exported


def _part(
    component: OpenedComponent, weights_name: str, style: FolderStyle, base: Base | None, rules: tuple[Rule, ...], options: MergeOptions
) -> Part:
    config = component.assets.config
    chosen, lora = component.component, None
    lora_notes: tuple[Note, ...] = ()
    fused = component.made.fused_adapters if component.made is not None else ()
    if options.lora == "keep":
        check_factors(chosen.tensors)
    elif has_adapters(chosen.tensors):
        reference = base.component if base is not None else None
        fused, lora_notes = fused_adapters(component, base, fused)
        chosen, lora, of_adapters = with_adapters_fused(
            component,
            reference,
            options.lora_alpha,
            cast=options.dtype not in (None, "keep"),
            allow_overflow=options.allow_overflow,
        )
        lora_notes = (*lora_notes, *of_adapters)
    selection = select_tensors(
        chosen,
        config,
        names=options.names,
        rules=rules,
        include=options.include,
        exclude=options.exclude,
        allow_unequal_replicas=options.allow_unequal_replicas,
        adapters=options.lora == "keep",
        live=component.live,
        lacking=component.lacking,
    )
    notes = [*lora_notes, *selection.notes, *_base_notes(component, chosen, selection, base, options)]
    carried_names: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()
    if options.carry_from_base and base is not None and base.component is not None:
        there = {*selection.tensors, *selection.on_purpose}
        alike = named_alike(base.component.tensors, selection.kind, selection.naming, config)
        carried, more = carried_tensors(there, alike, options.carry_from_base, tied_heads(selection.tensors, alike, config))
        carried_names = tuple(carried)
        selection, notes = replace(selection, tensors={**selection.tensors, **carried}), [*notes, *more]
        for tensor in carried.values():
            notes += compare_copies(tensor, options.allow_unequal_replicas) if tensor.check_copies else ()
    dtypes = None
    if options.match_base and base is not None and base.component is not None:
        for head, embedding in _lacking_heads(selection, base.component.tensors, config, options).items():
            selection = selection.with_head(head, embedding)
            notes.append(Note("info", "tied-head", f"{head} is written as {embedding}, to which it is tied, as the base stores both"))
        matched = match_base(
            selection.tensors,
            base.component.tensors,
            fill_missing=options.fill_missing_from_base,
            drop_extra=options.drop_extra,
        )
        filled = tuple(name for name in matched.tensors if name not in selection.tensors)
        for tensor in (matched.tensors[name] for name in filled):
            notes += compare_copies(tensor, options.allow_unequal_replicas) if tensor.check_copies else ()
        selection = replace(selection, tensors=matched.tensors, dropped={**selection.dropped, **matched.dropped})
        dtypes = matched.dtypes if options.dtype is None else None
        notes += matched.notes
    if options.dtype == BASE and base is not None and base.component is not None:
        dtypes, more = dtypes_of_base(selection.tensors, base.component.tensors)
        notes += more
    notes += differing_notes(selection.differing, selection.tensors)
    claim = _claim(selection, config, options)
    notes += partial_notes(component.component, component.made, selection.tensors) if not claim.is_whole else ()
    made = plan.make_plan(
        selection.tensors,
        dtype="keep" if options.dtype in (None, BASE) else options.dtype,
        dtypes=dtypes,
        max_shard_size=options.max_shard_size or (DEFAULT_SHARD_SIZE if style.splits else None),
        weights_name=weights_name,
        quantised="quantization_config" in config,
        dropped=selection.dropped,
    )
    if weights_name == style.loaded:
        notes.append(Note("info", "weights-name", f"written as {weights_name}, the file that {style.name}'s loader reads"))
    stored = {output.dtype.code for output in made.tensors if output.dtype.kind == "float"}
    notes += config_notes(config, {name: tensor.shape for name, tensor in selection.tensors.items()}, stored)
    notes += odd_dtypes(selection.tensors, config, selection.kind)
    notes += vocabulary_notes(component.assets, selection.tensors)
    notes += torn_notes([*component.component.tensors.values(), *(output.tensor for output in made.tensors)])
    if base is not None and (carried_names or filled):
        fused = (*fused, *adapters_of_base(base))
    return Part(component, selection, made, (*notes, *claim.notes), claim, lora, carried_names, filled, tuple(dict.fromkeys(fused)))


def _claim(selection: Selection, config: Config, options: MergeOptions) -> Claim:
    """The report about the names of a selection."""
    if options.lora == "keep" and has_adapters(selection.tensors):
        return Claim("PEFT's, as they are", None, (), {})
    shapes = {name: tensor.shape for name, tensor in selection.tensors.items()}
    claim = claim_for(
        shapes,
        selection.kind,
        selection.naming,
        config,
        on_purpose=selection.on_purpose,
        change=selection.change,
        beside=selection.lacking,
    )
    if options.match_base:
        # The base decides what belongs to the model, also where its config has a place for more.
        text = f"{len(claim.lacking)} of the tensors of {claim.named} are also missing in the base: {few(list(claim.lacking), 3)}"
        notes = (*claim.notes, Note("warning", "missing-in-base", text)) if claim.lacking else claim.notes
        return replace(claim, lacking={}, notes=notes)
    return without_allowed(claim, options.allow_missing)


def _base_notes(
    component: OpenedComponent, chosen: Component, selection: Selection, base: Base | None, options: MergeOptions
) -> tuple[Note, ...]:
    """Notes about a base that may be another model. Raises Inconsistent if it is one, and anything is taken from it."""
    if base is None:
        return ()
    config = component.assets.config
    own_config = CONFIG in component.assets.files and component.assets.files[CONFIG].parent != base.folder
    wanted = options.match_base or options.dtype == BASE or bool(options.carry_from_base)
    by_name = bool(options.carry_from_base) or options.fill_missing_from_base
    return checked_base(
        base,
        selection.tensors,
        config=config,
        own_config=own_config,
        taken=wanted or any(path.parent == base.folder for path in component.assets.files.values()),
        by_name=by_name or options.dtype == BASE,
        computed=by_name or adapters_alone(component.component.tensors),
        unfiltered=chosen.tensors if options.include or options.exclude else None,
    )


def _lacking_heads(selection: Selection, base: Mapping[str, Tensor], config: Config, options: MergeOptions) -> dict[str, str]:
    """Tied tensors that a base stores and the selection lacks because they are tied, not because a filter or a key map left them out."""
    lacking = {head: embedding for head, embedding in selection.tied.items() if head in base and embedding in base}
    pair = tied_pair(list(base)) if ties_embeddings(config) else None
    wanted = pair is not None and is_wanted(pair[0], options.include, options.exclude)
    if pair is not None and wanted and pair[0] not in {*selection.tensors, *selection.on_purpose} and pair[1] in selection.tensors:
        lacking[pair[0]] = pair[1]
    return lacking
