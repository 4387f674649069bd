"""`open`, `load_state_dict` and `load_into`: the weights of a checkpoint in Python, without writing a file."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import Unpack

from ckpt_cli.base_model.alike import spelled_alike
from ckpt_cli.discover.found import Target
from ckpt_cli.discover.open import Opened, open_checkpoint
from ckpt_cli.drafting.draft import Draft
from ckpt_cli.drafting.held_beside import tell_what_holds
from ckpt_cli.errors import CkptError, MissingTensors, UsageError, within_memory
from ckpt_cli.files.source import Files
from ckpt_cli.given import PathLike, boundary, int_of, options_of, path_of, path_text, paths_of, progress_of, text_of
from ckpt_cli.hub.adapters.other_kinds import other_adapters
from ckpt_cli.hub.classes.dtypes import undeclared_codes
from ckpt_cli.hub.classes.fit import KnownClass
from ckpt_cli.hub.classes.in_memory.loaded import loaded_names_of
from ckpt_cli.hub.classes.names import hub_tensors, unknown_operations
from ckpt_cli.hub.classes.precision.kept import FP32, kept_in_fp32
from ckpt_cli.hub.classes.rules import rules_for
from ckpt_cli.hub.classes.shapes.turned import turned_alike
from ckpt_cli.hub.classes.tying import ties_embeddings
from ckpt_cli.hub.config import Config, is_quantised
from ckpt_cli.hub.dialects.rotary_order import ROTARY_ORDER, order_notes
from ckpt_cli.hub.peft_names import has_adapters
from ckpt_cli.hub.settings import different_settings, settings_notes
from ckpt_cli.hub.ties import tied_together
from ckpt_cli.loading.elements import target_dtype, torch_module
from ckpt_cli.loading.fill import fill
from ckpt_cli.loading.lazy import LazyCheckpoint, LazyTensor
from ckpt_cli.loading.live import config_of, describe_model
from ckpt_cli.loading.match import Matched, best_match, matched
from ckpt_cli.loading.modules.adapter_scales import adapter_notes
from ckpt_cli.loading.modules.load_hooks import not_run
from ckpt_cli.loading.modules.transient_buffers import buffer_notes
from ckpt_cli.loading.notes import lacking_notes, notes_of_reading
from ckpt_cli.loading.options import LoadKeywords, LoadOptions, OpenKeywords, OpenOptions
from ckpt_cli.loading.peft_model import plain_names, plainly_named, with_own_names
from ckpt_cli.lora.merge import adapters_alone, is_kept_for_reading
from ckpt_cli.merging.options import MergeOptions
from ckpt_cli.merging.plan import planned_drafts
from ckpt_cli.merging.trained_on import opened_on_base
from ckpt_cli.names import LoraMode, Naming, few, stripped_names
from ckpt_cli.output.key_map import mapped_names, read_key_map
from ckpt_cli.output.options import check_cast_all
from ckpt_cli.output.select import is_wanted
from ckpt_cli.progress import Progress
from ckpt_cli.results.checkpoint import NoteInfo
from ckpt_cli.results.loading import LoadResult
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Named:
    """The tensors of a component under the names of a merge, and the tied ones that a merge leaves out."""

    part: Draft
    tensors: Mapping[str, Tensor]
    tied: Mapping[str, Tensor]

    @property
    def notes(self) -> tuple[NoteInfo, ...]:
        """What concerns reading: a folder that nobody writes needs no advice."""
        return tuple(map(NoteInfo.of, notes_of_reading(self.part)))


@boundary
@within_memory
def open(  # noqa: A001 - as `ckpt_cli.open`
    path: PathLike,
    *,
    type: str | None = None,
    step: int | None = None,
    base: PathLike | None = None,
    also: PathLike | Sequence[PathLike] = (),
    **options: Unpack[OpenKeywords],
) -> LazyCheckpoint:
    """A checkpoint as a mapping from names to lazy tensors: the names that a merge would write, or with ``names="native"`` as trained.

    ``path`` is a run, a checkpoint, a component folder or a file; ``type`` and ``step`` choose component and step; ``base`` supplies what
    a merge would take from it; ``options`` are those of `OpenKeywords`. No weights are read before they are asked for, except replicas
    and tied tensors, which are compared. With native names tied tensors have all their names.

    Raises InputError (unreadable), IncompleteError (incomplete, contradictory), UsageError.
    """
    chosen = options_of(OpenOptions, options)
    files = Files()
    try:
        opened, home = opened_component(path, files, type, step, base, also, chosen)
        named = named_tensors(opened, home, files, chosen, chosen.names)
    except BaseException:
        files.close()
        raise
    config = named.part.opened.assets.config
    if chosen.dtype not in (None, "keep") and (is_quantised(config) or undeclared_codes(named.tensors, config)):
        raise UsageError("these weights are quantised: they are not cast", hint="leave out dtype")
    check_cast_all(chosen.cast_all, chosen.dtype)
    everything = {**named.tensors, **(named.tied if chosen.names == "native" else {})}
    casts_all = chosen.cast_all or has_adapters(everything)
    kept = frozenset() if casts_all else kept_in_fp32(everything, named.part.selection.kind, config, chosen.dtype)
    return LazyCheckpoint(
        {
            name: LazyTensor(
                replace(tensor, name=name), FP32 if name in kept else target_dtype(chosen.dtype, tensor.dtype), checksum=chosen.checksum
            )
            for name, tensor in everything.items()
        },
        files,
        path=str(opened.found.path),
        step=opened.found.step,
        component=opened.components[0].name,
        components=tuple(place.name for place in opened.found.places),
        notes=(*map(NoteInfo.of, (*opened.notes, *lacking_notes(named.part, chosen.include, chosen.exclude))), *named.notes),
    )


@boundary
@within_memory
def load_state_dict(
    path: PathLike,
    *,
    type: str | None = None,
    step: int | None = None,
    base: PathLike | None = None,
    also: PathLike | Sequence[PathLike] = (),
    **options: Unpack[OpenKeywords],
) -> dict[str, torch.Tensor]:
    """The tensors of a component as a state dict in CPU memory, with the arguments of `open`; tied tensors are one object.

    A dict has no place for notes: each warning among those of `open` is a UserWarning that begins with the checkpoint's path. Raises what
    `open` raises, Unsupported if torch is not installed, CastOverflow.
    """
    torch_module()
    with open(path, type=type, step=step, base=base, also=also, **options) as checkpoint:
        for note in checkpoint.notes:
            if note.level == "warning":
                # Python shows a text once for each line of code: with the path, it is another one for each checkpoint.
                warnings.warn(f"{checkpoint.path}: {note.text}", stacklevel=4)
        return checkpoint.read_all()


@boundary
@within_memory
def load_into(
    model: torch.nn.Module,
    path: PathLike,
    *,
    type: str | None = None,
    step: int | None = None,
    base: PathLike | None = None,
    also: PathLike | Sequence[PathLike] = (),
    progress: Progress | None = None,
    **options: Unpack[LoadKeywords],
) -> LoadResult:
    """Fill the parameters and persistent buffers of a live model in place, each cast to its own dtype, rounded once.

    The model may be plain, or sharded by FSDP2 or tensor parallelism (DTensors), on any number of ranks: every rank calls this and reads
    its own slices only; nothing is communicated. Names, shapes and dtypes are compared before anything is written. ``options`` are those
    of `LoadKeywords`.

    Raises MissingTensors and DifferentTensors where model and checkpoint do not fit (``strict``), Inconsistent for different values of
    tied tensors, CastOverflow (when everything is filled), Unsupported for models that cannot be filled, and what `open` raises.
    """
    chosen, progress = options_of(LoadOptions, options), progress_of(progress)
    if chosen.jobs is not None and not 1 <= chosen.jobs <= 256:
        raise UsageError("jobs is out of range", expected="1 to 256")
    started = time.monotonic()
    live = describe_model(model)
    ignored = not_run(model, strict=chosen.strict)
    with Files() as files:
        opened, home = opened_component(path, files, type, step, base, also, chosen)
        config = config_of(model)
        found, named = _matched(opened, home, files, chosen, live, config)
        settings = settings_notes(different_settings(opened.components[0].assets.config, config), "model")
        of_order = [] if any(note.code == ROTARY_ORDER for note in named.part.notes) else _order_notes(opened, chosen, config, live, model)
        try:
            found.refuse(strict=chosen.strict, path=opened.found.path)
        except MissingTensors as error:
            tell_what_holds(error, named.part, {name: live[name].shape for name in found.missing if name in live})
            raise
        of_adapters = _adapter_notes(opened, chosen, model, found)
        done = fill(found.pairs, jobs=chosen.jobs, progress=progress, allow_overflow=chosen.allow_overflow, checksum=chosen.checksum)
        files.check_unchanged()
    left = [*_tie_notes(found, config), *buffer_notes(model)]
    return LoadResult(
        path=str(opened.found.path),
        step=opened.found.step,
        component=opened.components[0].name,
        naming=found.naming,
        tensors=len(found.pairs),
        elements=sum(pair.target.numel for pair in found.pairs),
        local_elements=done.elements,
        bytes_read=done.bytes_read,
        cast=sum(pair.source.dtype != pair.target.dtype for pair in found.pairs),
        missing=found.missing,
        unexpected=found.unexpected,
        overflowed=sum(done.overflowed.values()),
        notes=(*(NoteInfo.of(note) for note in (*opened.notes, *settings, *of_adapters, *of_order, *left)), *named.notes, *ignored),
        seconds=time.monotonic() - started,
    )


def _order_notes(opened: Opened, options: LoadOptions, config: Config, live: Mapping[str, Tensor], model: object) -> list[Note]:
    """What a merge into this model's folder would say of the rows of its queries and keys, where the checkpoint has no config."""
    stored = stripped_names(opened.components[0].component.tensors).values()
    mapped = mapped_names(stored, read_key_map(options.key_map)) if options.key_map else {}
    return order_notes(mapped, lambda new: new in live, config, type(model).__name__)


def _adapter_notes(opened: Opened, options: LoadOptions, model: object, found: Matched) -> list[Note]:
    """What this model's adapters do otherwise than those of the checkpoint. Raises Unsupported where both belong to other weights."""
    part, filled = opened.components[0], [pair.name for pair in found.pairs]
    alone = adapters_alone(part.component.tensors)
    return adapter_notes(model, part.homes, options.lora_alpha, filled=filled, missing=found.missing, alone=alone)


def opened_component(
    path: PathLike,
    files: Files,
    type: str | None,
    step: int | None,
    base: PathLike | None,
    also: PathLike | Sequence[PathLike],
    options: OpenOptions | LoadOptions,
    located: Target | None = None,
) -> tuple[Opened, Path | None]:
    """The checkpoint with the one component that is meant, and the folder of the base; ``located`` as in `open_checkpoint`."""
    place, component, step, nodes = path_of(path), text_of(type, "--type"), int_of(step, "--step"), paths_of(also, "--also")

    def opened_with(home: Path | None) -> Opened:
        return open_checkpoint(
            place,
            files,
            type=component,
            step=step,
            base=home,
            also=nodes,
            shard_order=options.shard_order,
            ema_from_model=options.ema_from_model,
            located=located,
        )

    opened, home = opened_on_base(path_text(base, "--base") if base is not None else None, opened_with)
    if len(opened.components) > 1:
        names = [component.name for component in opened.components]
        raise UsageError(f"type {component} means several components", expected=f"one of: {', '.join(names)}", hint="open them one by one")
    return opened, home


def named_tensors(
    opened: Opened, home: Path | None, files: Files, options: OpenOptions | LoadOptions, naming: Naming, *, fuse: bool = True
) -> Named:
    """The component as a merge with these options would name it; ``fuse``: with adapters in its weights, where they can be."""
    settings = MergeOptions(
        names=naming,
        include=options.include,
        exclude=options.exclude,
        key_map=options.key_map,
        lora=_lora_mode(opened.components[0].component.tensors, home, naming) if fuse else "keep",
        lora_alpha=options.lora_alpha,
        ema_from_model=options.ema_from_model,
        allow_unequal_replicas=options.allow_unequal_replicas,
    )
    part = planned_drafts(opened, home, settings, files)[0]
    tensors = part.selection.tensors
    tied = {name: tensors[partner] for name, partner in part.selection.tied.items() if partner in tensors}
    return Named(part, tensors, tied)


def _lora_mode(tensors: Mapping[str, Tensor], home: Path | None, naming: Naming) -> LoraMode | None:
    """Adapters are kept where they are read as they are, and where nothing here could fuse them."""
    as_trained = naming == "native" and home is None and is_kept_for_reading(tensors)
    return "keep" if as_trained or other_adapters(tensors) is not None else None


def _tie_notes(found: Matched, config: Config) -> list[Note]:
    """A warning about parameters that the config of a model ties and the model does not, as after ``to_empty``."""
    if not found.apart or not ties_embeddings(config):
        return []
    text = f"the config of the model ties {few(found.apart)} to what it was filled with, but the model has two parameters"
    return [Note("warning", "untied", f"{text}, which training parts: model.tie_weights() makes them one")]


def _matched(
    opened: Opened, home: Path | None, files: Files, options: LoadOptions, live: Mapping[str, Tensor], config: Config
) -> tuple[Matched, Named]:
    """The checkpoint paired with the model, under the names (as trained, or of the hub) with which they agree best.

    ``config`` is that of the model: it says what is tied where the checkpoint has none.
    """
    candidates: list[tuple[Matched, Named]] = []
    errors: list[CkptError] = []
    plain = plain_names(live) if has_adapters(live) else {}
    own = {short: live[name] for short, name in plain.items()} or live
    namings: tuple[Naming, ...] = ("native", "hub") if options.names is None else (options.names,)
    for naming in namings:
        try:
            named = named_tensors(opened, home, files, options, naming, fuse=not plain)
            targets = _under_hub_names(own, named) if naming == "hub" else own
        except CkptError as error:
            errors.append(error)
            continue
        stored = plainly_named(named.tensors, targets) if plain else named.tensors
        its = named.part.opened.assets.config
        stored, _ = turned_alike(spelled_alike(stored, targets, loaded_names_of(its) or loaded_names_of(config)), targets, {}, its)
        lacking = {
            name: tensor for name, tensor in targets.items() if name not in stored and is_wanted(name, options.include, options.exclude)
        }
        tied = {**_tied_in_class(stored, lacking, named, config), **named.tied}
        found = matched(stored, tied, targets, naming, options.allow_missing)
        found = with_own_names(found, plain) if plain else found
        candidates.append((found, named))
        if not found.faults:
            break
    best = best_match([found for found, _ in candidates], errors)
    return next((found, named) for found, named in candidates if found is best)


def _tied_in_class(stored: Mapping[str, Tensor], lacking: Mapping[str, Tensor], named: Named, config: Config) -> dict[str, Tensor]:
    """Tensors of the model that the checkpoint has no copy of, since its class ties them to one that it has."""
    if not lacking:
        return {}
    selection = named.part.selection
    common = tied_together([*stored, *lacking], named.part.opened.assets.config or config, selection.kind, selection.naming)
    partners = {name: [other for other in stored if common.get(other) == common[name]] for name in lacking if name in common}
    found = {name: stored[others[0]] for name, others in partners.items() if len(others) == 1}
    return {name: partner for name, partner in found.items() if partner.shape == lacking[name].shape}


def _under_hub_names(live: Mapping[str, Tensor], named: Named) -> Mapping[str, Tensor]:
    """The tensors of a model re-cut as its checkpoint is on the hub, so that both have the same names."""
    kind, config = named.part.selection.kind, named.part.opened.assets.config
    rules, config = (kind.rules, kind.config) if isinstance(kind, KnownClass) else (rules_for(config), config)
    if named.part.selection.naming != "hub" or rules is None or unknown_operations(rules):
        return live
    return hub_tensors({name: tensor for name, tensor in live.items() if name not in rules.ignored}, rules, config)
