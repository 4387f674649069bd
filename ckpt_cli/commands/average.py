"""`average`: one model from several checkpoints, straight from their shards. `weighted_sum` does the arithmetic."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypedDict

from typing_extensions import Unpack

from ckpt_cli.averaging.agreement import Agreed, agree
from ckpt_cli.averaging.coefficients import ORDERED, DecayShape, Method, formula
from ckpt_cli.averaging.steps import Snapshots, StepChoice, open_snapshots
from ckpt_cli.commands.strict import refuse_warnings
from ckpt_cli.discover.components import called_ema
from ckpt_cli.discover.folder_style import style_of
from ckpt_cli.discover.open import OpenedComponent, describe_checkpoint
from ckpt_cli.dtypes import Dtype
from ckpt_cli.errors import NonFinite, UsageError, within_memory
from ckpt_cli.files.source import Files
from ckpt_cli.formats.base import ShardOrder
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.given import DtypeLike, PathLike, boundary, options_of, path_of, path_text, paths_of, progress_of, text_of
from ckpt_cli.hub.assets import CONFIG, Assets, config_notes, lacking_notes, resolve_base
from ckpt_cli.hub.classes.claims import Claim, claim_for, refuse_lacking, without_allowed
from ckpt_cli.hub.classes.dtypes import odd_dtypes
from ckpt_cli.hub.text_assets import text_notes
from ckpt_cli.hub.ties import differing_notes
from ckpt_cli.merging.base_checks import checked_base
from ckpt_cli.merging.carry import BASE, carried_tensors, dtypes_of_base
from ckpt_cli.merging.plan import Base, MergeOptions, base_unread, named_alike, open_base
from ckpt_cli.names import Naming, few
from ckpt_cli.output import manifest, plan
from ckpt_cli.output.key_map import Rule, read_key_map
from ckpt_cli.output.publish import (
    DEFAULT_SHARD_SIZE,
    Order,
    Publication,
    Target,
    check_writing,
    class_comparison,
    model_files,
    overflow_notes,
    publish,
    refuse_overflows,
    written_facts,
)
from ckpt_cli.output.select import Selection, select_tensors
from ckpt_cli.output.target import check_target
from ckpt_cli.output.writer import Written
from ckpt_cli.progress import Progress
from ckpt_cli.results.checkpoint import NoteInfo
from ckpt_cli.results.written import AveragedComponent, AverageResult, AverageSource
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.torn import torn_notes
from ckpt_cli.tensors.weighted_sum import Formula

IRRELEVANT = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"}
"""Entries of a config.json that may differ between checkpoints of one model."""


@dataclass(frozen=True, slots=True)
class AverageOptions:
    """The options of `average`, with the meaning that ``ckpt average --help`` gives them.

    ``begin`` and ``end`` are ``--from`` and ``--to``; ``max_shard_size`` is in bytes; see `coefficients.formula` for what
    belongs to which ``method`` (None: uniform, or what the other options imply).
    """

    everything: bool = False
    last: int | None = None
    begin: int | None = None
    end: int | None = None
    every: int | None = None
    steps: tuple[int, ...] = ()
    method: Method | None = None
    weights: tuple[float, ...] | None = None
    normalize: bool = True
    decay: float | None = None
    half_life: float | None = None
    decay_shape: DecayShape | None = None
    sigma_rel: float | None = None
    source_sigma_rel: float | None = None
    dtype: str = "keep"
    names: Naming = "hub"
    intersect: bool = False
    strict: bool = False
    carry_from_base: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    key_map: str | os.PathLike[str] | None = None
    max_shard_size: int | None = None
    weights_name: str | None = None
    overwrite: bool = False
    jobs: int | None = None
    dry_run: bool = False
    checksum: bool = False
    allow_overflow: bool = False
    allow_non_finite: bool = False
    allow_unequal_replicas: bool = False
    shard_order: ShardOrder = "auto"

    @property
    def implied_method(self) -> Method:
        """The method that was asked for, by name or by an option that only one has."""
        if self.method is not None:
            return self.method
        if self.weights is not None:
            return "weighted"
        if self.decay is not None or self.half_life is not None:
            return "ema"
        if self.decay_shape is not None:
            return "wsm"
        return "uniform" if self.sigma_rel is None else "posthoc-ema"


class AverageKeywords(TypedDict, total=False):
    """The keyword arguments of `average` besides paths: `AverageOptions` as callers may give them."""

    everything: bool
    last: int | None
    begin: int | None
    end: int | None
    every: int | None
    steps: int | str | Sequence[int]
    method: Method | None
    weights: float | str | Sequence[float] | None
    normalize: bool
    decay: float | None
    half_life: float | None
    decay_shape: DecayShape | None
    sigma_rel: float | None
    source_sigma_rel: float | None
    dtype: DtypeLike
    names: Naming
    intersect: bool
    strict: bool
    carry_from_base: str | Sequence[str]
    allow_missing: str | Sequence[str]
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    key_map: PathLike | None
    max_shard_size: int | str | None
    weights_name: str | None
    overwrite: bool
    jobs: int | None
    dry_run: bool
    checksum: bool
    allow_overflow: bool
    allow_non_finite: bool
    allow_unequal_replicas: bool
    shard_order: ShardOrder


@dataclass(frozen=True, slots=True)
class Source:
    """One component of one checkpoint in an average; ``label`` is how messages call it."""

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
    def used(self) -> list[Source]:
        """The sources that enter the sum: those without weight are only compared."""
        return [source for source, weight in zip(self.sources, self.formula.weights, strict=True) if weight]


@boundary
@within_memory
def average(
    paths: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    type: str | None = None,
    base: PathLike | None = None,
    also: PathLike | Sequence[PathLike] = (),
    progress: Progress | None = None,
    **options: Unpack[AverageKeywords],
) -> AverageResult:
    """Average checkpoints into one model folder.

    ``paths`` are runs, checkpoints, component folders or files, from old to new; ``type`` chooses the component; ``options``
    are those of `AverageKeywords` (``last=5``, ``weights=(0.7, 0.3)``, ...). Every element is the exactly rounded value
    of the formula that the result reports. Raises what `merge` raises, and NonFinite for sources with NaN or infinities.
    """
    chosen, progress = options_of(AverageOptions, options), progress_of(progress)
    given, target = paths_of(paths, "PATH"), path_of(output, "--output", output=True)
    component, nodes = text_of(type, "--type"), paths_of(also, "--also")
    home = path_text(base, "--base") if base is not None else None
    if not given:
        raise UsageError("there are no checkpoints to average", expected="a run, or at least two checkpoints")
    check_writing(chosen.weights_name, chosen.jobs, chosen.max_shard_size)
    if base is None and (chosen.carry_from_base or chosen.dtype == BASE):
        option = "--carry-from-base" if chosen.carry_from_base else "--dtype base"
        raise UsageError(f"{option} needs a base", hint="pass --base with the folder of the base model")
    started = time.monotonic()
    rules = read_key_map(Path(chosen.key_map)) if chosen.key_map is not None else ()
    folder = resolve_base(home) if home is not None else None
    with Files() as files:
        snapshots = open_snapshots(
            given,
            StepChoice(chosen.everything, chosen.last, chosen.begin, chosen.end, chosen.every, chosen.steps),
            files,
            type=component,
            base=folder,
            also=nodes,
            shard_order=chosen.shard_order,
        )
        method = chosen.implied_method
        mixed = _formula(snapshots, method, chosen)
        reference = None
        if folder is not None:
            needed = MergeOptions(carry_from_base=chosen.carry_from_base, dtype=BASE if chosen.dtype == BASE else None)
            reference = open_base(folder, files, needed)
        jobs = _jobs(snapshots, mixed, method, Path(os.path.abspath(target)), reference, rules, chosen)
        newest = describe_checkpoint(snapshots.opened[-1]).without_tensors()
        if chosen.strict:
            refuse_warnings([*snapshots.notes, *newest.notes, *(note for job in jobs for note in job.notes)])
        outputs = _run(jobs, method, chosen, progress)
    return AverageResult(
        checkpoint=newest,
        method=method,
        divisor=mixed.divisor,
        outputs=tuple(outputs),
        dry_run=chosen.dry_run,
        seconds=time.monotonic() - started,
        notes=tuple(NoteInfo.of(note) for note in dict.fromkeys(snapshots.notes)),
    )


# -- deciding --------------------------------------------------------------------------------------------------------


def _formula(snapshots: Snapshots, method: Method, options: AverageOptions) -> Formula:
    steps = snapshots.steps
    if method in ORDERED and steps is not None and any(a >= b for a, b in itertools.pairwise(steps)):
        listed = ", ".join(map(str, steps))
        raise UsageError(f"the method {method} needs checkpoints from old to new, and these are steps {listed}", hint="pass them in order")
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


def _jobs(
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
    assets = next((c.assets for c in reversed(components) if CONFIG in c.assets.files), components[-1].assets)
    labels = _labels(snapshots, components)
    sources = tuple(
        Source(
            label,
            opened.found.path,
            opened.found.step,
            component,
            select_tensors(
                component.component,
                component.assets.config or assets.config,
                names=options.names,
                rules=rules,
                include=options.include,
                exclude=options.exclude,
                allow_unequal_replicas=options.allow_unequal_replicas,
                live=component.live,
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
        alike = named_alike(held, newest, assets.config)
        carried, more = carried_tensors({*agreed.tensors, *on_purpose}, alike, options.carry_from_base)
        agreed = replace(agreed, tensors={**agreed.tensors, **carried})
        notes += more
    if held is not None and options.dtype == BASE:
        dtypes, more = dtypes_of_base(agreed.tensors, held)
        notes += more
    shapes = {name: tensor.shape for name, tensor in agreed.tensors.items()}
    claim = claim_for(shapes, newest.kind, newest.naming, assets.config, on_purpose=on_purpose, change=newest.change)
    claim = without_allowed(claim, options.allow_missing)
    refuse_lacking(claim, shapes, held, options.names)
    made = plan.make_plan(
        agreed.tensors,
        dtype="keep" if options.dtype == BASE else options.dtype,
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
    notes += [note for source in sources for note in differing_notes(source.selection.differing, agreed.tensors)]
    notes += [*agreed.notes, *_config_notes(sources), *claim.notes]
    notes += config_notes(assets.config, shapes, {o.dtype.code for o in made.tensors if o.dtype.kind == "float"})
    notes += odd_dtypes(agreed.tensors, assets.config, newest.kind)
    notes += lacking_notes(assets, base.folder if base is not None else None)
    notes += [*text_notes(assets.files), *torn_notes(tensor for c in components for tensor in c.component.tensors.values())]
    return Job(name, sources, mixed, agreed, made, assets, target, tuple(dict.fromkeys(notes)), claim, tuple(carried))


def _base_notes(newest: Source, agreed: Agreed, assets: Assets, base: Base, options: AverageOptions) -> tuple[Note, ...]:
    """Notes about a base that may be another model. Raises Inconsistent if it is one, and anything is taken from it."""
    if base.component is None:
        return base_unread(base)
    folder = base.folder
    taken = bool(options.carry_from_base) or options.dtype == BASE or any(path.parent == folder for path in assets.files.values())
    own_config = CONFIG in assets.files and assets.files[CONFIG].parent != folder
    return checked_base(
        agreed.tensors,
        base.component.tensors,
        folder,
        config=assets.config,
        own_config=own_config,
        base_config=base.config,
        taken=taken,
        by_name=bool(options.carry_from_base) or options.dtype == BASE,
        unfiltered=newest.opened.component.tensors if options.include or options.exclude or options.intersect else None,
    )


def _dropped(newest: Selection, agreed: Agreed) -> dict[str, str]:
    """What was left out of the newest checkpoint, and why: what is tied to a tensor that --intersect leaves out goes with it."""
    return {name: agreed.dropped.get(newest.tied.get(name, ""), why) for name, why in newest.dropped.items()}


def _with_heads(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """With the tied output head of every checkpoint where that of one has values of its own."""
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
            f"the method posthoc-ema combines averages that training saved, and this is {few(plain)}",
            hint=f"{ema}use another method for plain weights",
        )


def _labels(snapshots: Snapshots, components: Sequence[OpenedComponent]) -> list[str]:
    """Steps where these tell the checkpoints apart, paths otherwise."""
    steps = snapshots.steps
    runs = {opened.found.path.parent for opened in snapshots.opened}
    if steps is not None and len(set(steps)) == len(steps) and len(runs) == 1:
        return [f"step {step}" for step in steps]
    return [os.fspath(component.component.root) for component in components]


def _config_notes(sources: Sequence[Source]) -> list[Note]:
    """Where the model's description changed on the way, the average is hardly what was meant."""
    newest = sources[-1].opened.assets.config
    for source in sources[:-1]:
        config = source.opened.assets.config
        if config and newest:
            keys = sorted(key for key in {*config, *newest} - IRRELEVANT if config.get(key) != newest.get(key))
            if keys:
                text = f"config.json of {source.label} and {sources[-1].label} differ: {few(keys)}"
                return [Note("warning", "configs-differ", text)]
    return []


# -- doing -----------------------------------------------------------------------------------------------------------


def _run(jobs: Sequence[Job], method: Method, options: AverageOptions, progress: Progress | None) -> list[AveragedComponent]:
    orders = [
        Order(
            job.plan,
            model_files(job.assets, job.plan),
            Target(job.target, options.overwrite),
            partial(_manifest, job, method, options),
            approve=_approval(job, options),
        )
        for job in jobs
    ]
    published = publish(orders, dry_run=options.dry_run, jobs=options.jobs, checksum=options.checksum, progress=progress)
    return [_result(job, options, done) for job, done in zip(jobs, published, strict=True)]


def _approval(job: Job, options: AverageOptions) -> Callable[[Written], None]:
    used = job.used

    def approve(written: Written) -> None:
        strange = written.non_finite
        if strange and not options.allow_non_finite:
            where = {place for counts in strange.values() for place in counts}
            raise NonFinite(
                f"NaN or infinite values in {len(strange)} tensors of {few([used[place].label for place in sorted(where)])}",
                details=_strange_lines(strange, used),
                hint="leave these checkpoints or tensors (--exclude) out, or pass --allow-non-finite to average them all the same",
            )
        if not options.allow_overflow:
            refuse_overflows(written, job.plan)
        if options.strict:
            refuse_warnings(_met_notes(job, written))

    return approve


def _met_notes(job: Job, written: Written) -> list[Note]:
    """What is said about values that were met while writing, where they are allowed."""
    strange = [Note("warning", "non-finite", f"NaN or infinite: {line}") for line in _strange_lines(written.non_finite, job.used)]
    return [*overflow_notes(written), *strange]


def _strange_lines(strange: Mapping[str, Mapping[int, int]], used: Sequence[Source]) -> list[str]:
    found = [(name, used[place], count) for name, counts in strange.items() for place, count in counts.items()]
    return [f"{name}: {count} in {source.label}" for name, source, count in found]


def _source_facts(job: Job) -> list[AverageSource]:
    return [
        AverageSource(
            path=str(source.path),
            step=source.step,
            component=source.opened.name,
            format=source.opened.component.format,
            weight=weight,
            coefficient=weight / job.formula.divisor,
            bytes=sum(tensor.nbytes for tensor in source.selection.tensors.values()),
        )
        for source, weight in zip(job.sources, job.formula.weights, strict=True)
    ]


def _manifest(job: Job, method: Method, options: AverageOptions, written: Written) -> bytes:
    facts = {
        "method": method,
        "divisor": job.formula.divisor,
        "averaged": [
            {**source.model_dump(include={"step", "component", "weight", "coefficient"}), "path": os.path.abspath(source.path)}
            for source in _source_facts(job)
        ],
        "component": job.name,
        "elements": job.plan.elements,
        "dropped": dict(job.plan.dropped),
        "names": [job.claim.text],
    }
    unwanted = ("dry_run", "overwrite", "jobs", "checksum")
    settings = {name: getattr(options, name) for name in AverageOptions.__slots__ if name not in unwanted}
    settings["key_map"] = None if options.key_map is None else os.path.abspath(options.key_map)
    side = [*job.assets.files, *([job.plan.index_name] if job.plan.index_name else [])]
    return manifest.build(
        "average", settings, job.plan.sources, job.plan.digest, written.files, written.checksums, side, written.side_files, facts
    )


def _result(job: Job, options: AverageOptions, published: Publication) -> AveragedComponent:
    notes = [*job.notes, *_met_notes(job, published.written)]
    return AveragedComponent(
        **written_facts(job.plan, published, options.jobs),
        component=job.name,
        output=str(job.target),
        sources=tuple(_source_facts(job)),
        averaged=len(job.agreed.combinations),
        copied=len(job.plan.tensors) - len(job.agreed.combinations),
        renamed=job.sources[-1].selection.renamed,
        naming=job.claim.text,
        compared=class_comparison(job.claim),
        carried=job.carried,
        left_out=job.sources[-1].selection.left_out,
        lacking=tuple(job.assets.lacking),
        notes=tuple(NoteInfo.of(note) for note in notes),
    )
