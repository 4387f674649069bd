"""The steps from opened components to a planned output, which every command takes; what a command adds is decided before or handed in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

from ckpt_cli.base_model.carry import carried_tensors, dtypes_of_base
from ckpt_cli.base_model.checks import checked_base
from ckpt_cli.base_model.ends import moved_end_notes
from ckpt_cli.base_model.lacking import lacks_of_base, may_lack, of_one_class, with_lacks
from ckpt_cli.base_model.opened import Base
from ckpt_cli.base_model.vocabulary import base_tokenizer_notes
from ckpt_cli.boxes import Shape
from ckpt_cli.discover.beside.outputs import partial_notes
from ckpt_cli.discover.downloads.commits import commit_notes
from ckpt_cli.drafting.draft import Draft, Options, Setting
from ckpt_cli.drafting.header_metadata import carried_metadata
from ckpt_cli.drafting.side_tensors import with_fitting_side_tensors
from ckpt_cli.dtypes import BASE, CAST_NAMES
from ckpt_cli.errors import Unsupported
from ckpt_cli.hub.assets import CONFIG, config_notes
from ckpt_cli.hub.beside.codes import without_settings_of_codes
from ckpt_cli.hub.classes.claims import Claim, claim_for, without_allowed
from ckpt_cli.hub.classes.computed.optional import with_optional_notes, with_optional_of_base
from ckpt_cli.hub.classes.computed.stored_buffers import stored_buffers
from ckpt_cli.hub.classes.dtypes import odd_dtypes, undeclared_codes
from ckpt_cli.hub.classes.fit import KnownClass
from ckpt_cli.hub.classes.precision.kept import kept_in_fp32
from ckpt_cli.hub.classes.prefixes import class_of
from ckpt_cli.hub.classes.shapes.turned import turned_notes
from ckpt_cli.hub.config import is_quantised, not_loaded
from ckpt_cli.hub.critics import repaired_class
from ckpt_cli.hub.entries.generation import lost_settings
from ckpt_cli.hub.layers.later import CODE as NO_LAYERS
from ckpt_cli.hub.peft_names import has_adapters
from ckpt_cli.hub.ties import differing_notes, tied_together
from ckpt_cli.hub.tokenizer import vocabulary_notes
from ckpt_cli.lora.merge import adapters_alone
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import DDP, few
from ckpt_cli.output.plan import make_plan
from ckpt_cli.output.publish import DEFAULT_SHARD_SIZE
from ckpt_cli.output.select import compare_copies, is_wanted
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.kinship import unrelated, unrelated_layers
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.torn import torn_notes

Step = Callable[[Draft, Setting[Options]], Draft]

GUESS = f"without {DDP}, with which every name began (--key-map ={DDP.removesuffix('.')} puts it back)"
"""What is said of names where the prefix of a wrapper was removed, and nothing shows that it is one."""


def finished(draft: Draft, setting: Setting[Options], weights_name: str, matched: Step[Options] | None = None) -> Draft:
    """A draft whose tensors were selected, taken through all further steps; ``matched`` gives it the form of the base.

    Nothing is refused here that `verify` and `open` can still look at: see `ckpt_cli.drafting.job.refuse_drafts`.
    """
    draft = _checked_with_base(draft, setting)
    draft = with_fitting_side_tensors(draft, setting)
    draft = _carried(draft, setting)
    if matched is not None:
        draft = matched(draft, setting)
    draft = _with_dtypes_of_base(draft, setting)
    draft = _with_fitting_settings(draft, setting)
    draft = _claimed(draft, setting)
    draft = _planned(draft, setting, weights_name)
    return _noted(draft, setting, weights_name)


def noted(draft: Draft, notes: Iterable[Note]) -> Draft:
    """With more notes."""
    return replace(draft, notes=tuple(dict.fromkeys((*draft.notes, *notes))))


def copies_compared(tensors: Iterable[Tensor], setting: Setting[Options]) -> list[Note]:
    """Notes about replicas of tensors that come from the base. Raises Inconsistent for some that differ, unless these are allowed."""
    allowed = setting.options.allow_unequal_replicas
    return [note for tensor in tensors if tensor.check_copies for note in compare_copies(tensor, allowed)]


def _checked_with_base(draft: Draft, setting: Setting[Options]) -> Draft:
    """With notes about a base that may be another model. Raises Inconsistent if it is one, and anything is taken from it."""
    base, options, files = setting.base, setting.options, draft.assets.files
    if base is None:
        return draft
    filtered = options.include or options.exclude or draft.uncommon
    taken = options.takes_from_base or any(path.parent == base.folder for path in files.values())
    computed = options.fills_from_base or adapters_alone(draft.opened.component.tensors)
    notes = checked_base(
        base,
        draft.tensors,
        config=draft.assets.config,
        own_config=CONFIG in files and files[CONFIG].parent != base.folder,
        taken=taken,
        by_name=options.fills_from_base or options.dtype == BASE,
        computed=computed,
        unfiltered=draft.stored if filtered else None,
    )
    weights = base.component.files if base.component is not None and (taken or computed) else ()
    doubts = _doubts_of(base) if computed else ()
    config = files.get(CONFIG)
    commits = commit_notes(weights, config if config is not None and config.is_relative_to(base.folder) else None)
    return noted(draft, [*notes, *doubts, *commits, *_unlike_base(draft, setting)])


def _doubts_of(base: Base) -> Iterable[Note]:
    """The warnings of whoever read the weights of a base that an output gets."""
    warnings = () if base.component is None else (note for note in base.component.notes if note.level == "warning")
    return (replace(note, text=f"the base: {note.text}") for note in warnings)


UNLIKE = "they are of another model, or were made anew"


def _unlike_base(draft: Draft, setting: Setting[Options]) -> list[Note]:
    """A warning about a base whose weights fit by name and shape, and have nothing in common with those of the run."""
    if setting.base is None or setting.of_base is None or adapters_alone(draft.opened.component.tensors):
        return []
    alike = setting.alike(draft)[0]
    measured = unrelated(draft.tensors, alike)
    if measured is None:
        strange = unrelated_layers(draft.tensors, alike)
        text = f"some layers have nothing in common with those of the base, while others have: {strange}; {UNLIKE}"
        return [Note("warning", "unlike-layers", text)] if strange is not None else []
    text = f"the weights have nothing in common with those of the base: {measured}; it is another base, or training started from scratch"
    return [Note("warning", "unlike-base", text)]


def _carried(draft: Draft, setting: Setting[Options]) -> Draft:
    """With the tensors that --carry-from-base takes from the base."""
    base, globs, config, selection = setting.base, setting.options.carry_from_base, draft.assets.config, draft.selection
    if base is None or setting.of_base is None or not globs:
        return draft
    alike, turned = setting.alike(draft)
    together = tied_together({*alike, *selection.tensors}, config, selection.kind, selection.naming)
    carried, notes = carried_tensors(selection.tensors, draft.on_purpose, alike, globs, together)
    selection = replace(selection, tensors={**selection.tensors, **carried})
    notes += [*copies_compared(carried.values(), setting), *turned_notes(turned.among(carried), "the base")]
    return noted(replace(draft, selection=selection, carried=tuple(carried)), notes)


def _with_dtypes_of_base(draft: Draft, setting: Setting[Options]) -> Draft:
    if setting.of_base is None or setting.options.dtype != BASE:
        return draft
    dtypes, notes = dtypes_of_base(draft.tensors, setting.alike(draft)[0])
    return noted(replace(draft, dtypes=dtypes), notes)


def _with_fitting_settings(draft: Draft, setting: Setting[Options]) -> Draft:
    """Without what a base says of its weights, and is not true of these."""
    assets, notes = without_settings_of_codes(draft.assets, draft.tensors, setting.base.folder if setting.base is not None else None)
    return noted(replace(draft, assets=assets), notes)


def _claimed(draft: Draft, setting: Setting[Options]) -> Draft:
    """With the report about its names."""
    if has_adapters(draft.tensors):
        return replace(draft, claim=Claim("PEFT's, as they are", None, (), {}))
    claim = compared_claim(draft)
    if not draft.by_base:
        claim = _with_lacks_of_base(claim, draft, setting)
        return replace(draft, claim=with_optional_notes(without_allowed(claim, setting.options.allow_missing)))
    # The base decides what belongs to the model, also where its config has a place for more.
    text = f"{len(claim.lacking)} of the tensors of {claim.named} are also missing in the base: {few(list(claim.lacking), 3)}"
    notes = (*claim.notes, Note("warning", "missing-in-base", text)) if claim.lacking else claim.notes
    return replace(draft, claim=with_optional_notes(replace(claim, lacking={}, notes=notes)))


def _with_lacks_of_base(claim: Claim, draft: Draft, setting: Setting[Options]) -> Claim:
    """With what only the base has, where no class says that there must be such tensors."""
    held, base, options, selection = setting.of_base, setting.base, setting.options, draft.selection
    if held is None or base is None:
        return claim
    fit, config = claim.fit, draft.assets.config
    of_class = fit is not None and fit.expected is not None
    as_base = fit is not None and of_one_class(fit.own, base.config)
    if of_class and not as_base and not claim.computing:
        return claim
    alike, _ = setting.alike(draft)
    wanted = {name: tensor for name, tensor in alike.items() if is_wanted(name, options.include, options.exclude)}
    together = tied_together({*alike, *draft.tensors}, config, selection.kind, selection.naming)
    if not (as_base or wanted.keys() - draft.tensors.keys()) or not may_lack(draft.stored, held, config, base.config):
        return claim
    if of_class:
        claim = with_optional_of_base(claim, wanted.keys())
    if of_class and not as_base:
        return claim
    claim = _without_replaced(claim, alike) if as_base else claim
    besides = {*draft.on_purpose, *claim.optional}
    return with_lacks(claim, lacks_of_base(draft.tensors, wanted, config, base.config, together, besides))


def _without_replaced(claim: Claim, base: Collection[str]) -> Claim:
    """Without the warning about tensors of another class that a base of the same class has as little."""
    if claim.fit is None or any(claim.fit.name_in(base, name) in base for name in claim.fit.replaced):
        return claim
    return replace(claim, notes=tuple(note for note in claim.notes if note.code != "replaced-tensors"))


def compared_claim(draft: Draft) -> Claim:
    """What comparing the tensors of a draft with their class says."""
    selection = draft.selection
    shapes = {name: tensor.shape for name, tensor in draft.tensors.items()}
    buffers = stored_buffers(draft.tensors, draft.assets.config, selection.kind)
    claim = claim_for(
        shapes,
        _class_written(draft, shapes),
        selection.naming,
        draft.assets.config,
        on_purpose=draft.on_purpose - selection.tied.keys(),  # a class that needs what is tied is told
        change=GUESS if selection.is_guess else selection.change.told,
        beside=selection.lacking,
        uncommon=draft.uncommon,
        told=buffers.told,
    )
    told = f", {DDP} was removed from {selection.unwrapped} of them" if selection.unwrapped else ""
    # What was said of layers when they were opened is not said again.
    known = {note.code for source in draft.sources for note in source.component.notes if note.code == NO_LAYERS}
    return replace(claim, text=claim.text + told, notes=(*(note for note in claim.notes if note.code not in known), *buffers.notes()))


def _class_written(draft: Draft, shapes: Mapping[str, Shape]) -> KnownClass | str:
    """The class of what is written: another one than that of all tensors where a head was left out, so that config.json will name it."""
    kind = draft.selection.kind
    named = repaired_class(draft.assets.config, shapes).get("architectures", [None])[0]
    return class_of(draft.assets.config, shapes) if isinstance(kind, KnownClass) and named not in (None, kind.kind) else kind


def _planned(draft: Draft, setting: Setting[Options], weights_name: str) -> Draft:
    options = setting.options
    _refuse_cast_of_codes(draft, options.dtype)
    plan = partial(
        make_plan,
        draft.tensors,
        dtype="keep" if options.dtype in (None, BASE) else options.dtype,
        dtypes=draft.dtypes,
        max_shard_size=options.max_shard_size or (DEFAULT_SHARD_SIZE if setting.style.splits else None),
        weights_name=weights_name,
        quantised=is_quantised(draft.assets.config),
        dropped=draft.selection.dropped,
        combinations=draft.combinations,
        kept=_kept_in_fp32(draft, setting),
    )
    made = plan()
    metadata, notes = carried_metadata(draft.opened.component.metadata, draft.opened.component.tensors, made)
    draft = noted(draft, notes)
    if setting.base is not None and draft.from_base:
        draft = replace(draft, fused=(*draft.fused, *setting.base.fused_adapters))
    return replace(draft, plan=plan(metadata=metadata) if metadata else made, fused=tuple(dict.fromkeys(draft.fused)))


def _refuse_cast_of_codes(draft: Draft, dtype: str | None) -> None:
    """Raise Unsupported for a cast of quantised weights of which the config says nothing: their scales would be rounded too."""
    codes = undeclared_codes(draft.tensors, draft.assets.config) if dtype in (*CAST_NAMES, BASE) else []
    if codes:
        raise Unsupported(
            f"quantised weights cannot be cast to {dtype}: {few(grouped(codes), 3)} are codes, which mean nothing without their scales",
            tensor=codes[0],
            hint="use --dtype keep",
        )


def _kept_in_fp32(draft: Draft, setting: Setting[Options]) -> frozenset[str]:
    """The tensors that transformers keeps in fp32 in a model of the dtype that was asked for; no loader does so for adapters."""
    if setting.options.cast_all or has_adapters(draft.tensors):
        return frozenset()
    return kept_in_fp32(draft.tensors, draft.selection.kind, draft.assets.config, setting.options.dtype)


def _noted(draft: Draft, setting: Setting[Options], weights_name: str) -> Draft:
    """With what is said of the finished plan: ties, names, config, dtypes, vocabulary, and the files that were read."""
    config, tensors, style = draft.assets.config, draft.tensors, setting.style
    notes = differing_notes(draft.selection.differing, tensors, config)
    if not draft.claim.is_whole:
        notes += [note for source in draft.sources for note in partial_notes(source.component, source.made, tensors)]
    if weights_name == style.loaded:
        notes.append(Note("info", "weights-name", f"written as {weights_name}, the file that {style.name}'s loader reads"))
    passed_over = not_loaded(config, draft.plan.index_name or weights_name) if config and not style.shared else None
    if passed_over is not None:
        notes.append(Note("warning", "unloaded-name", f"{'; '.join(passed_over)}"))
    floats = {output.dtype.code for output in draft.plan.tensors if output.dtype.kind == "float"}
    home = draft.assets.files.get(CONFIG)
    of_base = setting.base is not None and home is not None and home.parent == setting.base.folder
    notes += config_notes(config, {name: tensor.shape for name, tensor in tensors.items()}, floats, of_base=of_base)
    notes += odd_dtypes(tensors, config, draft.selection.kind)
    notes += vocabulary_notes(draft.assets, tensors, setting.base.assets if setting.base is not None else None)
    if setting.base is not None:
        notes += base_tokenizer_notes(setting.base, draft.assets, tensors)
        notes += moved_end_notes(setting.base.assets, draft.assets, notes)
        notes += _generation_notes(draft, setting.base)
    read = [tensor for source in draft.sources for tensor in source.component.tensors.values()]
    notes += torn_notes([*read, *(output.tensor for output in draft.plan.tensors)])
    return noted(draft, [*notes, *draft.claim.notes])


def _generation_notes(draft: Draft, base: Base) -> list[Note]:
    """A warning about settings for generation that only the config.json of the base has, if that is the same model."""
    if draft.is_adapter or any(note.code == "other-base" for note in draft.notes):
        return []
    config, files = draft.assets.config, draft.assets.files
    lost = lost_settings(base.config, base.assets.files, config=config, files=files, where="of the merged folder")
    return [Note("warning", "generation-settings", lost)] if lost is not None else []
