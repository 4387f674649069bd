"""The plan of an average: the same component of all checkpoints, compared, combined and planned before anything is written."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_cli.averaging.agreement import Agreed, agree
from ckpt_cli.averaging.coefficients import ORDERED, formula
from ckpt_cli.averaging.options import AverageOptions, Method
from ckpt_cli.averaging.steps import Snapshots, same_files_as
from ckpt_cli.base_model.carry import carried_tensors, dtypes_of_base, tied_heads
from ckpt_cli.base_model.checks import checked_base
from ckpt_cli.base_model.opened import Base, named_alike
from ckpt_cli.discover.beside.outputs import partial_notes
from ckpt_cli.discover.components import called_ema
from ckpt_cli.discover.folder_style import style_of
from ckpt_cli.discover.open import OpenedComponent
from ckpt_cli.dtypes import BASE, Dtype
from ckpt_cli.errors import UsageError
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.hub.assets import CONFIG, Assets, config_notes, lacking_notes
from ckpt_cli.hub.classes.claims import Claim, claim_for, refuse_lacking, without_allowed
from ckpt_cli.hub.classes.dtypes import odd_dtypes
from ckpt_cli.hub.config import differing_entries
from ckpt_cli.hub.megatron.config import vocabulary_size
from ckpt_cli.hub.text_assets import text_notes
from ckpt_cli.hub.ties import differing_notes
from ckpt_cli.hub.tokenizer import vocabulary_notes
from ckpt_cli.hub.tokenizer_file import TOKENIZER
from ckpt_cli.names import few
from ckpt_cli.output import plan
from ckpt_cli.output.key_map import Rule
from ckpt_cli.output.publish import (
    DEFAULT_SHARD_SIZE,
)
from ckpt_cli.output.select import Selection, select_tensors
from ckpt_cli.output.target import check_target
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import same_samples
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.torn import torn_notes
from ckpt_cli.tensors.weighted_sum import Formula

MOST_PAIRED = 32
"""Checkpoints of which every pair is compared by samples; two steps of one run differ in the first."""


@dataclass(frozen=True, slots=True)
class Source:
    """One component of one checkpoint in an average; ``label`` is its name in messages."""

    label: str
    path: Path
    step: int | None
    opened: OpenedComponent
    selection: Selection


@dataclass(frozen=True, slots=True)
class Job:
    """One output folder: the same component of all checkpoints."""

    name: str
    sources: tuple[Source, ...]
    formula: Formula
    agreed: Agreed
    plan: plan.Plan
    assets: Assets
    target: Path
    notes: tuple[Note, ...]
    claim: Claim
    carried: tuple[str, ...] = ()

    @property
    def left_out(self) -> set[str]:
        """The names of all tensors that a whole output would have, besides those that it has."""
        before = {name for source in self.sources if (made := source.opened.made) is not None for name in made.left_out}
        newest = self.sources[-1].selection
        now = {*newest.filtered, *newest.unmapped, *self.agreed.dropped, *self.claim.let_go}
        return (before | now) - {output.name for output in self.plan.tensors}

    @property
    def used(self) -> list[Source]:
        """The sources that enter the sum: those with weight zero are only compared."""
        return [source for source, weight in zip(self.sources, self.formula.weights, strict=True) if weight]


def formula_of(snapshots: Snapshots, method: Method, options: AverageOptions) -> Formula:
    steps = snapshots.steps
    if method in ORDERED and steps is not None and any(a >= b for a, b in itertools.pairwise(steps)):
        listed = ", ".join(map(str, steps))
        raise UsageError(
            f"the method {method} needs checkpoints ordered from old to new, but these are steps {listed}", hint="pass them in order"
        )
    return formula(
        method,
        len(snapshots.opened),
        steps,
        weights=options.weights,
        normalize=options.normalize,
        decay=options.decay,
        half_life=options.half_life,
        shape=options.decay_shape,
        sigma_rel=options.sigma_rel,
        source_sigma_rel=options.source_sigma_rel,
    )


def planned_jobs(
    snapshots: Snapshots,
    mixed: Formula,
    method: Method,
    output: Path,
    base: Base | None,
    rules: tuple[Rule, ...],
    options: AverageOptions,
) -> list[Job]:
    held = [{component.name: component for component in opened.components} for opened in snapshots.opened]
    if all(len(named) == 1 for named in held):
        return [_job(snapshots, [next(iter(named.values())) for named in held], mixed, method, output, base, rules, options)]
    if any(named.keys() != held[-1].keys() for named in held):
        listed = " and ".join(dict.fromkeys(few(sorted(named)) for named in held))
        raise UsageError(f"the checkpoints have different components: {listed}", hint="average them one by one with --type")
    return [_job(snapshots, [named[name] for named in held], mixed, method, output / name, base, rules, options) for name in held[-1]]


def _job(
    snapshots: Snapshots,
    components: Sequence[OpenedComponent],
    mixed: Formula,
    method: Method,
    target: Path,
    base: Base | None,
    rules: tuple[Rule, ...],
    options: AverageOptions,
) -> Job:
    name = components[-1].name
    notes: list[Note] = []
    _check_components(snapshots, components, method, notes)
    roots = [root for c in components for root in (c.component.root, *c.place.match.more_roots, *c.place.more_homes)]
    check_target(
        target,
        [*(o.found.path for o in snapshots.opened), *roots, *([base.folder] if base is not None else [])],
        overwrite=options.overwrite,
    )
    assets = next((c.assets for c in reversed(components) if CONFIG in c.assets.files), _made_assets(components))
    labels = _labels(snapshots, components)
    sources = tuple(
        Source(
            label,
            opened.found.path,
            opened.found.step,
            component,
            select_tensors(
                component.component,
                assets.config if component.assets.made else component.assets.config or assets.config,
                names=options.names,
                rules=rules,
                include=options.include,
                exclude=options.exclude,
                allow_unequal_replicas=options.allow_unequal_replicas,
                averaging=True,
                live=component.live,
                lacking=component.lacking,
            ),
        )
        for label, opened, component in zip(labels, snapshots.opened, components, strict=True)
    )
    sources = _with_heads(sources)
    quantised = "quantization_config" in assets.config
    agreed = agree(
        [source.selection.tensors for source in sources],
        labels,
        mixed,
        intersect=options.intersect,
        strict=options.strict,
        quantised=quantised,
    )
    style = style_of(snapshots.opened[-1].found, base.folder if base is not None else None)
    newest = sources[-1].selection
    on_purpose = {*newest.on_purpose, *agreed.dropped}
    dtypes: dict[str, Dtype] | None = None
    carried: dict[str, Tensor] = {}
    held = base.component.tensors if base is not None and base.component is not None else None
    notes += _base_notes(sources[-1], agreed, assets, base, options) if base is not None else ()
    if held is not None and options.carry_from_base:
        alike = named_alike(held, newest.kind, newest.naming, assets.config)
        carried, more = carried_tensors(
            {*agreed.tensors, *on_purpose}, alike, options.carry_from_base, tied_heads(agreed.tensors, alike, assets.config)
        )
        agreed = replace(agreed, tensors={**agreed.tensors, **carried})
        notes += more
    if held is not None and options.dtype == BASE:
        dtypes, more = dtypes_of_base(agreed.tensors, held)
        notes += more
    shapes = {name: tensor.shape for name, tensor in agreed.tensors.items()}
    claim = claim_for(shapes, newest.kind, newest.naming, assets.config, on_purpose=on_purpose, change=newest.change, beside=newest.lacking)
    claim = without_allowed(claim, options.allow_missing)
    refuse_lacking(claim, shapes, held, options.names)
    made = plan.make_plan(
        agreed.tensors,
        dtype="keep" if options.dtype in (None, BASE) else options.dtype,
        dtypes=dtypes,
        max_shard_size=options.max_shard_size or (DEFAULT_SHARD_SIZE if style.splits else None),
        weights_name=options.weights_name or style.weights_name(name, [name]),
        quantised=quantised,
        dropped={**_dropped(newest, agreed), **agreed.dropped},
        combinations=agreed.combinations,
    )
    read = [Path(source.path) for source in made.sources]
    check_target(target, [path for path in read if path.resolve().is_relative_to(target.resolve())], overwrite=options.overwrite)
    notes += [note for source in sources for note in source.selection.notes]
    notes += [note for c in components for note in partial_notes(c.component, c.made, agreed.tensors)] if not claim.is_whole else []
    notes += [note for source in sources for note in differing_notes(source.selection.differing, agreed.tensors)]
    notes += [
        *agreed.notes,
        *_same_weights_notes(sources, mixed, agreed),
        *_config_notes(sources),
        *_tokenizer_notes(sources),
        *claim.notes,
    ]
    notes += config_notes(assets.config, shapes, {o.dtype.code for o in made.tensors if o.dtype.kind == "float"})
    notes += odd_dtypes(agreed.tensors, assets.config, newest.kind)
    notes += lacking_notes(assets, base.folder if base is not None else None)
    notes += vocabulary_notes(assets, agreed.tensors)
    notes += [
        *text_notes(assets.files, {TOKENIZER: assets.tokenizer}),
        *torn_notes(tensor for c in components for tensor in c.component.tensors.values()),
    ]
    return Job(name, sources, mixed, agreed, made, assets, target, tuple(dict.fromkeys(notes)), claim, tuple(carried))


def _made_assets(components: Sequence[OpenedComponent]) -> Assets:
    """The newest assets; of configs that arguments describe the one with the fewest tokens, as the others count rows that pad these."""
    made = [component.assets for component in components if component.assets.made]
    newest = components[-1].assets
    return min(made, key=lambda assets: vocabulary_size(assets.config)) if newest.made else newest


def _base_notes(newest: Source, agreed: Agreed, assets: Assets, base: Base, options: AverageOptions) -> tuple[Note, ...]:
    """Notes about a base that may be another model. Raises Inconsistent if it is one, and anything is taken from it."""
    folder = base.folder
    taken = bool(options.carry_from_base) or options.dtype == BASE
    return checked_base(
        base,
        agreed.tensors,
        config=assets.config,
        own_config=CONFIG in assets.files and assets.files[CONFIG].parent != folder,
        taken=taken or any(path.parent == folder for path in assets.files.values()),
        by_name=taken,
        computed=bool(options.carry_from_base),
        unfiltered=newest.opened.component.tensors if options.include or options.exclude or options.intersect else None,
    )


def _dropped(newest: Selection, agreed: Agreed) -> dict[str, str]:
    """What was left out of the newest checkpoint, and why: tensors tied to one that --intersect leaves out are left out too."""
    return {name: agreed.dropped.get(newest.tied.get(name, ""), why) for name, why in newest.dropped.items()}


def _with_heads(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """Adds the tied output head of every checkpoint if one of the heads has its own values."""
    heads = {head: partner for source in sources for head, partner in source.selection.tied.items()}
    own = {head: partner for head, partner in heads.items() if any(head in source.selection.tensors for source in sources)}
    result = []
    for source in sources:
        selection = source.selection
        for head, partner in own.items():
            if selection.tied.get(head) == partner:
                selection = selection.with_head(head, partner)
        result.append(replace(source, selection=selection))
    return tuple(result)


def _check_components(snapshots: Snapshots, components: Sequence[OpenedComponent], method: Method, notes: list[Note]) -> None:
    names = list(dict.fromkeys(component.name for component in components))
    if len(names) > 1:
        notes.append(Note("warning", "mixed-components", f"components of different names are averaged: {few(names)}"))
    plain = [name for name in names if not is_average_name(name)]
    if method == "posthoc-ema" and plain:
        ema = "pass --type ema, or " if all(called_ema(opened.found) is not None for opened in snapshots.opened) else ""
        raise UsageError(
            f"the method posthoc-ema combines averages that training saved, but this is {few(plain)}",
            hint=f"{ema}use another method for plain weights",
        )


def _labels(snapshots: Snapshots, components: Sequence[OpenedComponent]) -> list[str]:
    """Steps if they tell the checkpoints apart, otherwise paths."""
    steps = snapshots.steps
    runs = {opened.found.path.parent for opened in snapshots.opened}
    if steps is not None and len(set(steps)) == len(steps) and len(runs) == 1:
        return [f"step {step}" for step in steps]
    return [os.fspath(component.component.root) for component in components]


def _same_weights_notes(sources: Sequence[Source], mixed: Formula, agreed: Agreed) -> list[Note]:
    """Warnings about checkpoints whose averaged tensors are equal as far as samples tell, however each stores them."""
    used = [source for source, weight in zip(sources, mixed.weights, strict=True) if weight]
    notes = []
    for first, second in itertools.combinations(range(min(len(used), MOST_PAIRED)), 2):
        held = [combination.tensors for combination in agreed.combinations.values()]
        other_files = same_files_as(used[first].opened) != same_files_as(used[second].opened)
        if held and other_files and all(same_samples(tensors[first], tensors[second]) for tensors in held):
            text = f"{used[first].path} and {used[second].path} hold the same weights (samples of all tensors are equal)"
            notes.append(Note("warning", "same-twice", text))
    return notes


def _config_notes(sources: Sequence[Source]) -> list[Note]:
    """Notes about configs that differ: such an average is hardly intended."""
    newest = sources[-1].opened.assets.config
    for source in sources[:-1]:
        config = source.opened.assets.config
        if config and newest:
            told = differing_entries(config, newest)
            if told:
                text = f"config.json of {source.label} and {sources[-1].label} differ: {few(told)}"
                return [Note("warning", "configs-differ", text)]
    return []


def _tokenizer_notes(sources: Sequence[Source]) -> list[Note]:
    """Rows of an embedding that stand for other tokens cannot be averaged."""
    read = [(source.label, tokenizer()) for source in sources if (tokenizer := source.opened.assets.tokenizer) is not None]
    digests = {label: tokenizer.digest for label, tokenizer in read if tokenizer.digest is not None}
    newest = digests.get(sources[-1].label)
    other = next((label for label, digest in digests.items() if newest is not None and digest != newest), None)
    if other is None:
        return []
    text = f"the tokenizers of {other} and {sources[-1].label} give other ids to tokens: rows of different tokens are averaged"
    return [Note("warning", "tokenizers-differ", text)]
