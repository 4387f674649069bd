"""The plan of a merge: options, components, names, dtypes, side files and place, decided before anything is written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_cli.base_model.carry import BASE, carried_tensors, dtypes_of_base, tied_heads
from ckpt_cli.base_model.opened import Base, base_unread, named_alike, open_base
from ckpt_cli.base_model.resemblance import checked_base, config_doubt
from ckpt_cli.discover.default_output import default_output
from ckpt_cli.discover.folder_style import FolderStyle, style_of
from ckpt_cli.discover.open import Opened, OpenedComponent
from ckpt_cli.errors import UsageError
from ckpt_cli.files.source import Files
from ckpt_cli.formats.safetensors.folder import INDEX
from ckpt_cli.hub.assets import AUXILIARY, CONFIG, config_notes
from ckpt_cli.hub.classes.claims import Claim, claim_for, refuse_lacking, without_allowed
from ckpt_cli.hub.classes.dtypes import odd_dtypes
from ckpt_cli.hub.config import Config, ties_embeddings
from ckpt_cli.hub.peft_names import LoraMode, has_adapters
from ckpt_cli.hub.text_assets import unmarked
from ckpt_cli.hub.tied_names import tied_pair
from ckpt_cli.hub.ties import differing_notes
from ckpt_cli.hub.tokenizer import vocabulary_notes
from ckpt_cli.lora.config import CONFIG as ADAPTER_CONFIG
from ckpt_cli.lora.merge import ADAPTER_WEIGHTS, adapters_alone, check_adapter_files, check_factors, exported_adapter, with_adapters_fused
from ckpt_cli.merging.adapters_fit import check_adapters_fit
from ckpt_cli.merging.match_base import match_base
from ckpt_cli.merging.options import MergeOptions
from ckpt_cli.names import few
from ckpt_cli.output import plan
from ckpt_cli.output.key_map import Rule, read_key_map
from ckpt_cli.output.publish import DEFAULT_SHARD_SIZE, model_files
from ckpt_cli.output.select import PEFT, Selection, compare_copies, is_wanted, select_tensors
from ckpt_cli.output.target import check_target
from ckpt_cli.results.lora import LoraInfo
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.torn import torn_notes

MODEL_CONFIGS = ("config.json", "generation_config.json", "llm_config.json", "vit_config.json", ADAPTER_CONFIG, AUXILIARY)
"""Assets that make a folder a model."""


@dataclass(frozen=True, slots=True)
class Part:
    """One component on its way into a folder; ``claim`` is the report about its names, ``lora`` the result for its adapters.

    ``carried`` are tensors that --carry-from-base took from the base, ``filled`` those that --fill-missing-from-base did.
    """

    opened: OpenedComponent
    selection: Selection
    plan: plan.Plan
    notes: tuple[Note, ...]
    claim: Claim
    lora: LoraInfo | None = None
    carried: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()

    @property
    def from_base(self) -> frozenset[str]:
        """Tensors that are the base's own: comparing them with it says nothing."""
        return frozenset((*self.carried, *self.filled))


@dataclass(frozen=True, slots=True)
class Job:
    """One output folder: one component, or several that share it."""

    parts: tuple[Part, ...]
    output: Path
    plan: plan.Plan
    side_files: Mapping[str, bytes | Path]
    state_files: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "+".join(part.opened.name for part in self.parts)


def planned_jobs(
    opened: Opened, output: str | os.PathLike[str] | None, base: Base | None, rules: tuple[Rule, ...], options: MergeOptions
) -> list[Job]:
    """One job per folder that will be written. Raises UsageError, OutputError, and what selecting tensors raises."""
    style = style_of(opened.found, base.folder if base else None)
    shared = style.shared or options.in_place
    groups = [opened.components] if shared else [(component,) for component in opened.components]
    jobs: list[Job] = []
    for group in groups:
        target = _target(opened, group[0], output, options, one_of_many=len(groups) > 1)
        adapted = [component for component in group if has_adapters(component.component.tensors)]
        for component in group:
            check_adapter_files(component, keep=options.lora == "keep")
        mode = _lora_mode(group, base, options)
        if options.lora in ("export", "both") and not adapted:
            raise UsageError(f"--lora {options.lora}: there are no LoRA adapters in {group[0].name}", hint="leave out --lora")
        if options.lora_alpha is not None and (not adapted or options.lora == "keep"):
            why = "with --lora keep nothing is scaled" if adapted else f"there are no LoRA adapters in {group[0].name}"
            raise UsageError(f"--lora-alpha does not apply: {why}", hint="leave it out")
        if mode != "export":
            jobs.append(_job(opened, group, target, style, base, rules, options))
        if mode in ("export", "both"):
            beside = target if mode == "export" else target.with_name(f"{target.name}_adapter")
            jobs += [_adapter_job(opened, component, beside, base, options) for component in adapted]
    if len({job.output for job in jobs}) < len(jobs):
        raise UsageError("two components would go to the same folder", hint="merge them one by one with --type and -o")
    return jobs


def _lora_mode(group: Sequence[OpenedComponent], base: Base | None, options: MergeOptions) -> LoraMode:
    """What happens to adapters: as requested, or fused; adapters alone are exported if there is no base."""
    if options.lora is not None:
        return options.lora
    return "export" if base is None and all(adapters_alone(component.component.tensors) for component in group) else "fuse"


def _target(
    opened: Opened, first: OpenedComponent, output: str | os.PathLike[str] | None, options: MergeOptions, *, one_of_many: bool
) -> Path:
    """The folder that a component is written to."""
    if options.in_place:
        return first.place.home
    if output is None:
        return default_output(opened.found, first.name)
    given = Path(os.path.abspath(output))
    return given / first.name if one_of_many else given


def _check_target(
    opened: Opened, group: tuple[OpenedComponent, ...], target: Path, whole: plan.Plan, base: Base | None, options: MergeOptions
) -> None:
    """Raise OutputError for a folder that exists, or that is inside the input."""
    if options.in_place:
        return
    roots = [root for component in group for root in (component.component.root, *component.place.match.more_roots)]
    check_target(target, [opened.found.path, *roots, *([base.folder] if base else [])], overwrite=options.overwrite)
    read = [Path(source.path) for source in whole.sources]
    check_target(target, [path for path in read if path.resolve().is_relative_to(target.resolve())], overwrite=options.overwrite)


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
        held = base.component.tensors if base is not None and base.component is not None else None
        refuse_lacking(part.claim, part.selection.tensors, held, options.names)
    loaded = options.weights_name or style.loaded
    whole = plan.united(
        [part.plan for part in parts], INDEX if style.loaded else parts[0].plan.index_name, loaded if style.loaded else None
    )
    names = [file.name for file in whole.files]
    if len(set(names)) < len(names):
        raise UsageError("two components would have the same weights file", hint="merge them one by one with --type")
    _check_target(opened, group, target, whole, base, options)
    side = model_files(group[0].assets, whole)
    written = {file.name for file in whole.files}
    return Job(parts, target, whole, {name: content for name, content in side.items() if name not in written})


def _adapter_job(opened: Opened, component: OpenedComponent, target: Path, base: Base | None, options: MergeOptions) -> Job:
    """The adapters of a component as a folder that PEFT loads: no config.json, or loaders would take it for a model."""
    if options.include or options.exclude:
        hint = "leave out --lora export" if options.lora is not None else "pass --base to fuse the adapters, or --lora keep"
        raise UsageError("--include and --exclude choose tensors of a model, not of an adapter", hint=hint)
    if base is not None and base.component is not None:
        check_adapters_fit(component, base.component, base.folder)
    part, config = _adapter_part(component, base, options)
    whole = plan.united([part.plan], None, None)
    _check_target(opened, (component,), target, whole, base, options)
    assets = {name: unmarked(path) for name, path in component.assets.files.items() if name not in MODEL_CONFIGS and name[-3:] != ".py"}
    return Job((part,), target, whole, {**assets, ADAPTER_CONFIG: config})


def _adapter_part(component: OpenedComponent, base: Base | None, options: MergeOptions) -> tuple[Part, bytes]:
    """The adapters of a component, planned, and their config."""
    folder = os.path.abspath(base.folder) if base is not None else None
    adapter = exported_adapter(component, folder, options.lora_alpha, base.component if base is not None else None)
    selection = Selection(dict(adapter.tensors), {}, len(adapter.tensors), (), (), {}, PEFT, "native")
    claim = Claim("those of PEFT's adapter files", None, (), {})
    made = plan.make_plan(selection.tensors, dtype=options.dtype or "keep", weights_name=ADAPTER_WEIGHTS)
    notes = adapter.notes
    if options.lora is None:
        text = "adapters without their base model: exported as a PEFT folder; pass --base to fuse them"
        notes = (*notes, Note("info", "lora-alone", text))
    return Part(component, selection, made, notes, claim, adapter.info), adapter.config


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
        mode = _lora_mode(group, reference, options)
        parts += _parts(group, style, reference, rules, options) if mode != "export" else ()
        adapted = [component for component in group if has_adapters(component.component.tensors)] if mode in ("export", "both") else []
        exported += [_adapter_part(component, reference, options)[0] for component in adapted]
    return parts + exported


def _part(
    component: OpenedComponent, weights_name: str, style: FolderStyle, base: Base | None, rules: tuple[Rule, ...], options: MergeOptions
) -> Part:
    config = component.assets.config
    chosen, lora = component.component, None
    lora_notes: tuple[Note, ...] = ()
    if options.lora == "keep":
        check_factors(chosen.tensors)
    elif has_adapters(chosen.tensors):
        reference = base.component if base is not None else None
        chosen, lora, lora_notes = with_adapters_fused(
            component,
            reference,
            options.lora_alpha,
            cast=options.dtype not in (None, "keep"),
            allow_overflow=options.allow_overflow,
        )
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
    return Part(component, selection, made, (*notes, *claim.notes), claim, lora, carried_names, filled)


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
    if base.component is None:
        doubt = config_doubt(config, base.config) if own_config else None
        notes = () if doubt is None else (Note("warning", "other-base", f"the base may be another model: {doubt}"),)
        return (*notes, *base_unread(base))
    wanted = options.match_base or options.dtype == BASE or bool(options.carry_from_base)
    taken = wanted or any(path.parent == base.folder for path in component.assets.files.values())
    return checked_base(
        selection.tensors,
        base.component.tensors,
        base.folder,
        config=config,
        own_config=own_config,
        base_config=base.config,
        taken=taken,
        by_name=bool(options.carry_from_base) or options.fill_missing_from_base or options.dtype == BASE,
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
