"""The plan of an average: the same component of all checkpoints, compared, combined and planned before anything is written."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_cli.averaging.agreement import Agreed, agree
from ckpt_cli.averaging.coefficients import formula
from ckpt_cli.averaging.histories import history_notes
from ckpt_cli.averaging.made_of import Origin, made_notes
from ckpt_cli.averaging.numbers import check_numbers, order_notes, unit_notes
from ckpt_cli.averaging.options import AverageOptions, Method
from ckpt_cli.averaging.steps import Snapshots
from ckpt_cli.base_model.alike import seen_alike
from ckpt_cli.base_model.opened import Base
from ckpt_cli.discover.before.parts import part_of_step, unnumbered_name
from ckpt_cli.discover.components import called_ema
from ckpt_cli.discover.found import Found
from ckpt_cli.discover.open import OpenedComponent
from ckpt_cli.drafting.draft import Draft, Setting
from ckpt_cli.drafting.job import Job, check_output, refuse_drafts
from ckpt_cli.drafting.steps import compared_claim, finished
from ckpt_cli.errors import NonFinite, UsageError
from ckpt_cli.formats.step_names import numbered
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.hub.assets import CONFIG, Assets
from ckpt_cli.hub.beside.tokenizers import has_vocabulary
from ckpt_cli.hub.classes.claims import without_allowed
from ckpt_cli.hub.classes.shapes.turned import turned_notes
from ckpt_cli.hub.config import is_quantised
from ckpt_cli.hub.contents.side_files import side_file_notes
from ckpt_cli.hub.contents.token_ids import contradicting
from ckpt_cli.hub.megatron.config import vocabulary_size
from ckpt_cli.hub.peft_names import has_adapters
from ckpt_cli.hub.settings import differences
from ckpt_cli.hub.ties import differing_notes
from ckpt_cli.hub.tokenizer_file import TOKENIZER
from ckpt_cli.lora.merge import adapters_alone, check_adapter_files
from ckpt_cli.names import few, plural
from ckpt_cli.output.key_map import Rule
from ckpt_cli.output.options import WritingOptions
from ckpt_cli.output.select import Selection, select_tensors
from ckpt_cli.output.writer import Written
from ckpt_cli.paths import absolute
from ckpt_cli.results.written import AverageSource
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import same_samples
from ckpt_cli.tensors.kinship import unrelated, unrelated_layers
from ckpt_cli.tensors.tensor import Tensor, places_of
from ckpt_cli.tensors.weighted_sum import Formula
from ckpt_cli.urls import full_name

MOST_PAIRED = 32
"""Checkpoints of which every pair is compared by samples; two steps of one run differ in the first."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """One component of one checkpoint in an average; ``label`` is its name in messages."""

    label: str
    found: Found
    opened: OpenedComponent
    selection: Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageJob(Job):
    """One output folder: the same component of all checkpoints. ``used`` are the labels of those that enter the sum."""

    sources: tuple[AverageSource, ...]
    used: tuple[str, ...]
    allow_non_finite: bool

    def met(self, written: Written) -> list[Note]:
        lines = self._non_finite(written)
        return [*Job.met(self, written), *(Note("warning", "non-finite", f"NaN or infinite: {line}") for line in lines)]

    def approve(self, written: Written, options: WritingOptions) -> None:
        """Raise NonFinite for sources with such values, and what every job does."""
        if written.non_finite and not self.allow_non_finite:
            where = sorted({place for counts in written.non_finite.values() for place in counts})
            raise NonFinite(
                f"NaN or infinite values in {plural(len(written.non_finite), 'tensor')} of {few([self.used[place] for place in where])}",
                details=self._non_finite(written),
                hint="leave out these checkpoints or tensors (--exclude), or pass --allow-non-finite to average them anyway",
            )
        Job.approve(self, written, options)

    def _non_finite(self, written: Written) -> list[str]:
        found = [(name, self.used[place], count) for name, counts in written.non_finite.items() for place, count in counts.items()]
        return [f"{name}: {count} in {label}" for name, label, count in found]


def formula_of(snapshots: Snapshots, method: Method, options: AverageOptions) -> Formula:
    check_numbers(snapshots, method, options)
    return formula(
        method,
        len(snapshots.opened),
        snapshots.steps,
        weights=_weights_in_order(options, snapshots),
        normalize=options.normalize,
        decay=options.decay,
        half_life=options.half_life,
        shape=options.decay_shape,
        sigma_rel=options.sigma_rel,
        source_sigma_rel=options.source_sigma_rel,
    )


def _weights_in_order(options: AverageOptions, snapshots: Snapshots) -> tuple[float, ...] | None:
    """The weights in the order of the checkpoints: a list of steps says whose each is by its position, whatever order it has.

    Raises UsageError where steps of several runs are not listed from old to new, so that positions say nothing.
    """
    weights, listed, steps = options.weights, options.steps, [opened.found.step for opened in snapshots.opened]
    is_ordered = list(listed) == sorted(listed) and (not listed or not snapshots.counted_anew)
    if weights is None or is_ordered or len(weights) != len(steps):
        return weights
    if len(steps) != len(listed) or set(steps) != set(listed):
        raise UsageError(
            "--weights cannot be told apart: --steps is not in order, and there are checkpoints besides these steps",
            expected="steps from old to new, and the weights in the order of the checkpoints",
            hint="--dry-run without --weights lists the checkpoints",
        )
    weight_of = dict(zip(listed, weights, strict=True))
    return tuple(weight_of[step] for step in steps if step is not None)


def planned_jobs(
    snapshots: Snapshots,
    mixed: Formula,
    method: Method,
    output: Path,
    base: Base | None,
    rules: tuple[Rule, ...],
    options: AverageOptions,
) -> list[AverageJob]:
    held = [{component.name: component for component in opened.components} for opened in snapshots.opened]
    newest = held[-1]
    setting = Setting.of(snapshots.opened[-1].found, base, rules, options)
    if all(len(named) == 1 for named in held):
        return [_job(snapshots, [next(iter(named.values())) for named in held], mixed, method, output, setting)]
    if any(named.keys() != newest.keys() for named in held):
        listed = " and ".join(dict.fromkeys(few(sorted(named)) for named in held))
        raise UsageError(f"the checkpoints have different components: {listed}", hint="average them one by one with --type")
    return [_job(snapshots, [named[name] for named in held], mixed, method, output / name, setting) for name in newest]


def _job(
    snapshots: Snapshots,
    components: Sequence[OpenedComponent],
    mixed: Formula,
    method: Method,
    target: Path,
    setting: Setting[AverageOptions],
) -> AverageJob:
    options, name = setting.options, components[-1].name
    notes: list[Note] = []
    _check_components(snapshots, components, method, notes)
    paths = [opened.found.path for opened in snapshots.opened]
    check_output(target, paths, components, setting)
    for component in components:
        check_adapter_files(component, keep=False)
    assets = next((c.assets for c in reversed(components) if CONFIG in c.assets.files), _made_assets(components))
    labels = _labels(snapshots, components)
    sources = tuple(
        Averaged(label, opened.found, component, _selected(component, assets, setting))
        for label, opened, component in zip(labels, snapshots.opened, components, strict=True)
    )
    sources, turned = _same_way_round(_with_heads(sources))
    newest = sources[-1].selection

    def drafted(tensors: dict[str, Tensor], uncommon: Iterable[str], **more: Any) -> Draft:
        selection = replace(newest, tensors=tensors, **more)
        return Draft(tuple(components), assets, components[-1].component.tensors, selection, uncommon=frozenset(uncommon))

    agreed = agree(
        [source.selection.tensors for source in sources],
        labels,
        mixed,
        intersect=options.intersect,
        strict=options.strict,
        quantised=is_quantised(assets.config),
        needed=lambda tensors, others: [*without_allowed(compared_claim(drafted(tensors, others)), options.allow_missing).lacking],
    )
    # Those with weight zero are only compared.
    used = [source for source, weight in zip(sources, mixed.weights, strict=True) if weight]
    notes += [*turned, *(note for source in sources for note in source.selection.notes)]
    notes += [note for source in sources[:-1] for note in differing_notes(source.selection.differing, agreed.tensors, assets.config)]
    notes += [*agreed.notes, *_same_weights_notes(sources, mixed, agreed), *_config_notes(sources), *_tokenizer_notes(sources)]
    notes += _older_files_notes(sources, assets)
    notes += side_file_notes([(source.label, source.opened.assets) for source in sources], assets)
    notes += _unrelated_notes(used, agreed, mixed) if method != "posthoc-ema" else []
    notes += [*order_notes(snapshots, method), *unit_notes(snapshots, method, options), *history_notes(paths, labels)]
    notes += made_notes([Origin(source.label, source.found.path, source.opened.name, source.opened.made) for source in used])
    draft = replace(
        drafted(agreed.tensors, agreed.dropped, dropped={**_dropped(newest, agreed), **agreed.dropped}),
        notes=tuple(notes),
        combinations=agreed.combinations,
        fused=tuple(digest for source in used if (made := source.opened.made) is not None for digest in made.fused_adapters),
    )
    draft = finished(draft, setting, options.weights_name or setting.style.weights_name(name, [name]))
    refuse_drafts([draft], setting)
    check_output(target, paths, components, setting, draft.plan)
    told = _told(sources, mixed)
    facts = {
        "method": method,
        "divisor": mixed.divisor,
        "averaged": [
            {
                **numbered(source.found.numbered_at, source.found.step),
                **said.model_dump(include={"component", "weight", "coefficient"}),
                "path": full_name(source.found.path),
            }
            for source, said in zip(sources, told, strict=True)
        ],
        "component": name,
        "trainer": snapshots.opened[-1].found.trainer(snapshots.opened[-1].target.run),
        "base": None if setting.base is None else absolute(setting.base.folder),
    }
    labels = [source.label for source in used]
    return AverageJob.of(
        [draft], target, draft.plan, setting, facts, sources=told, used=tuple(labels), allow_non_finite=options.allow_non_finite
    )


def _selected(component: OpenedComponent, assets: Assets, setting: Setting[AverageOptions]) -> Selection:
    """The tensors of a checkpoint under their names; ``assets`` are those of the average."""
    config = assets.config if component.assets.made else component.assets.config or assets.config
    whole, live, lacking = component.component, component.live, component.lacking
    return select_tensors(whole, config, setting.options, setting.rules, averaging=adapters_alone, live=live, lacking=lacking)


def _told(sources: Sequence[Averaged], mixed: Formula) -> tuple[AverageSource, ...]:
    """The checkpoints of an average, for its manifest and its result."""
    return tuple(
        AverageSource(
            path=str(source.found.path),
            step=source.found.step,
            component=source.opened.name,
            format=source.opened.component.format,
            weight=weight,
            coefficient=weight / mixed.divisor,
            bytes=sum(tensor.nbytes for tensor in source.selection.tensors.values()),
        )
        for source, weight in zip(sources, mixed.weights, strict=True)
    )


def _older_files_notes(sources: Sequence[Averaged], assets: Assets) -> list[Note]:
    """What is said where the newest checkpoint has no config.json, so that all files beside the weights are those of an older one.

    A warning if another step shows that it was lost, or if files that the newest one has are passed over.
    """
    newest = sources[-1].opened.assets
    older = next((source.label for source in sources[:-1] if source.opened.assets is assets), None)
    if older is None or CONFIG in newest.files or CONFIG not in assets.files:
        return []
    passed = f", and its {few(sorted(newest.files), 4)} {'is' if len(newest.files) == 1 else 'are'} not used" if newest.files else ""
    text = f"{sources[-1].label} has no {CONFIG}: the files beside the weights are those of {older}{passed}"
    return [Note("warning" if passed or CONFIG in newest.lost.files else "info", "fewer-files", text)]


def _made_assets(components: Sequence[OpenedComponent]) -> Assets:
    """The newest assets; of configs that arguments describe the one with the fewest tokens, as the others count rows that pad these."""
    made = [component.assets for component in components if component.assets.made]
    newest = components[-1].assets
    return min(made, key=lambda assets: vocabulary_size(assets.config)) if newest.made else newest


def _dropped(newest: Selection, agreed: Agreed) -> dict[str, str]:
    """What was left out of the newest checkpoint, and why: tensors tied to one that --intersect leaves out are left out too."""
    return {name: agreed.dropped.get(newest.tied.get(name, ""), why) for name, why in newest.dropped.items()}


def _with_heads(sources: tuple[Averaged, ...]) -> tuple[Averaged, ...]:
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


def _same_way_round(sources: tuple[Averaged, ...]) -> tuple[tuple[Averaged, ...], list[Note]]:
    """Every checkpoint with the layout of the newest one, where versions of transformers differ in it, and what is said of them."""
    newest, result, notes = sources[-1], [], []
    for source in sources[:-1]:
        configs = newest.opened.assets.config, source.opened.assets.config
        tensors, found = seen_alike(source.selection.tensors, newest.selection.tensors, configs)
        result.append(replace(source, selection=replace(source.selection, tensors=dict(tensors))))
        notes += turned_notes(found, source.label)
    return (*result, newest), notes


def _check_components(snapshots: Snapshots, components: Sequence[OpenedComponent], method: Method, notes: list[Note]) -> None:
    names = list(dict.fromkeys(component.name for component in components))
    if len(names) > 1:
        notes.append(Note("warning", "mixed-components", f"components of different names are averaged: {few(names)}"))
    parts = list(filter(None, map(part_of_step, [opened.found for opened in snapshots.opened], [each.place for each in components])))
    of_one_run = len({opened.found.numbered_at.parent for opened in snapshots.opened}) == 1
    if of_one_run and len(set(map(unnumbered_name, parts))) > 1:
        text = f"{few(list(dict.fromkeys(parts)), 4)}: weights from folders of different names are averaged, as if they were one model"
        notes.append(Note("warning", "mixed-components", text))
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
    runs = {opened.found.numbered_at.parent for opened in snapshots.opened}
    if steps is not None and len(set(steps)) == len(steps) and len(runs) == 1:
        return [f"step {step}" for step in steps]
    return [os.fspath(component.component.root) for component in components]


def _same_weights_notes(sources: Sequence[Averaged], mixed: Formula, agreed: Agreed) -> list[Note]:
    """Warnings about checkpoints whose averaged tensors are equal as far as samples tell, however each stores them."""
    used = [source for source, weight in zip(sources, mixed.weights, strict=True) if weight]
    places = [places_of(source.opened.component.tensors.values()) for source in used[:MOST_PAIRED]]
    notes = []
    for first, second in itertools.combinations(range(min(len(used), MOST_PAIRED)), 2):
        held = [combination.tensors for combination in agreed.combinations.values()]
        other_files = places[first] != places[second]
        if held and other_files and all(same_samples(tensors[first], tensors[second]) for tensors in held):
            text = f"{used[first].found.path} and {used[second].found.path} hold the same weights (samples of all tensors are equal)"
            notes.append(Note("warning", "same-twice", text))
    return notes


def _unrelated_notes(used: Sequence[Averaged], agreed: Agreed, mixed: Formula) -> list[Note]:
    """A warning about a checkpoint whose weights have nothing in common with those of the newest one: such an average is no model.

    A sum that is no average (--no-normalize) may be one of a base and a difference, which have nothing in common either.

    Averages that training began with may be far from later ones; posthoc-ema needs them.
    """
    held = {name: combination.tensors for name, combination in agreed.combinations.items()}
    if has_adapters(held):
        return []
    newest = {name: tensors[-1] for name, tensors in held.items()}
    for number, source in enumerate(used[:-1][-MOST_PAIRED:], max(len(used) - 1 - MOST_PAIRED, 0)):
        older = {name: tensors[number] for name, tensors in held.items()}
        if (measured := unrelated(older, newest)) is None and (strange := unrelated_layers(older, newest)) is not None:
            text = f"some layers of {source.label} and {used[-1].label} have nothing in common, while others have: {strange}"
            return [Note("warning", "unlike-layers", f"{text}; in one of them they are of another model, or were made anew")]
        if measured is not None:
            text = f"the weights of {source.label} and {used[-1].label} have nothing in common: {measured}"
            if not math.isclose(math.fsum(mixed.weights) / mixed.divisor, 1, rel_tol=1e-6):
                text = f"{text}, as of a model and a difference of two; a sum of models that were not trained from one is of no use"
                return [Note("info", "unrelated-weights", text)]
            return [Note("warning", "unrelated-weights", f"{text}; an average of models that were not trained from one is of no use")]
    return []


def _config_notes(sources: Sequence[Averaged]) -> list[Note]:
    """A warning about configs that differ: such an average is hardly intended."""
    held = [(source.label, source.opened.assets.config) for source in sources if source.opened.assets.config]
    for label, config in held[:-1]:
        told = [entry.pair for entry in differences(config, held[-1][1])]
        if told:
            return [Note("warning", "configs-differ", f"config.json of {label} and {held[-1][0]} differ: {few(told)}")]
    return []


def _tokenizer_notes(sources: Sequence[Averaged]) -> list[Note]:
    """Rows of an embedding that stand for other tokens cannot be averaged."""
    held = [(source.label, source.opened.assets) for source in sources]
    read = [(label, assets.tokenizer()) for label, assets in held if assets.tokenizer is not None]
    read = [(label, tokenizer) for label, tokenizer in read if tokenizer.digest is not None]
    plain = [(label, assets.files) for label, assets in held if assets.tokenizer is None and has_vocabulary(assets.files)]
    differing = [(label, TOKENIZER, read[-1][0]) for label, tokenizer in read[:-1] if tokenizer.gives_other_ids(read[-1][1])]
    differing += [(label, name, plain[-1][0]) for label, files in plain[:-1] if (name := contradicting(files, plain[-1][1]))]
    for label, name, last in differing[:1]:
        text = f"the tokenizers of {label} and {last} give other ids to tokens ({name}): rows of different tokens are averaged"
        return [Note("warning", "tokenizers-differ", text)]
    return []
