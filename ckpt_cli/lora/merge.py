"""What `merge` does with LoRA: fuses the adapters of a component into its weights, or exports them as a folder for PEFT."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ckpt_cli.errors import Inconsistent, Undecidable, Unsupported
from ckpt_cli.formats.safetensors.names import ADAPTER_STEM
from ckpt_cli.hub.adapters.other_kinds import other_adapters
from ckpt_cli.hub.assets import Assets
from ckpt_cli.hub.classes.tying import ties_embeddings
from ckpt_cli.hub.config import Config, architecture, is_quantised
from ckpt_cli.hub.peft_names import PREFIX, PeftState, has_adapters, parse_peft
from ckpt_cli.lora.alphas.guessed import guessed_notes
from ckpt_cli.lora.biases import check_biases, trained_biases
from ckpt_cli.lora.config import BY_EXPERT, CONFIG, AdapterFacts, adapter_facts, peft_config
from ckpt_cli.lora.copies import with_ties, without_copies
from ckpt_cli.lora.fit import (
    Fused,
    adapter_rank,
    check_variant,
    fuse_adapters,
    is_of_experts,
    lacks_base,
    layout_doubt,
    on_base,
    pattern_key,
)
from ckpt_cli.lora.on_base.adapted import adapted_name
from ckpt_cli.lora.on_base.seen import SeenBase, as_in_memory
from ckpt_cli.lora.on_base.tied import tied_to, told_tie, usually_tied
from ckpt_cli.lora.on_base.trained_class import heads_of_base
from ckpt_cli.lora.parts import is_for_a_part, names_within, part_note, placed, refuse_apart, within_part, without_lead
from ckpt_cli.lora.saved_embeddings import with_untrained_heads
from ckpt_cli.lora.settings import TYING, changed_base
from ckpt_cli.lora.untrained import untrained_notes
from ckpt_cli.lora.whole import check_whole
from ckpt_cli.names import few
from ckpt_cli.results.checkpoint import LoraInfo
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.tensor import Tensor

TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForConditionalGeneration": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
"""PEFT's word for the task of a class (peft/utils/peft_types.py); others work without."""


class Adapted(Protocol):
    """A component that may hold adapters; ``homes`` are the folders that may hold files about them."""

    @property
    def component(self) -> Component: ...

    @property
    def homes(self) -> tuple[Path, ...]: ...

    @property
    def assets(self) -> Assets: ...


@dataclass(frozen=True, slots=True)
class Exported:
    """The tensors of an adapter under the names of PEFT's files, and the config that belongs to them."""

    tensors: Mapping[str, Tensor]
    config: bytes
    info: LoraInfo
    notes: tuple[Note, ...]


def check_adapter_files(opened: Adapted, *, keep: bool) -> None:
    """Raise Inconsistent for an adapter's file without factors, Unsupported for another kind by its config (``keep``: it passes)."""
    component = opened.component
    named = next((path for path in component.files if path.name.startswith(ADAPTER_STEM)), None)
    if named is None or has_adapters(component.tensors):
        return
    try:
        adapter_facts(opened.homes, None)
    except Unsupported:
        if keep:
            return
        raise
    if other_adapters(component.tensors) is not None:
        return
    raise Inconsistent(
        "the adapter's file holds no LoRA factors",
        path=named,
        expected="tensors such as ...lora_A.weight",
        hint="it may have been saved by one rank that held none of them: look for the files of all ranks",
    )


def refuse_unfused(opened: Adapted, wanted: Collection[str] | None = None) -> None:
    """Raise Unsupported for adapters of another kind than PEFT's LoRA among the tensors, or those of them that are ``wanted``."""
    other = other_adapters(opened.component.tensors if wanted is None else wanted)
    if other is not None:
        raise Unsupported(
            other.text, tensor=other.names[0], path=opened.component.root, expected="weights, or LoRA of PEFT", hint=other.cure
        )


def refuse_unmergeable(opened: Adapted) -> None:
    """Raise what a merge without options raises for adapters, by their names and configs alone."""
    check_adapter_files(opened, keep=False)
    refuse_unfused(opened)
    if has_adapters(opened.component.tensors):
        parse_peft(opened.component.tensors)


def check_factors(tensors: Mapping[str, Tensor]) -> None:
    """Raise Inconsistent for incomplete adapters, whatever kind the others are."""
    with contextlib.suppress(Unsupported):
        parse_peft(tensors)


def adapters_alone(tensors: Mapping[str, Tensor]) -> bool:
    """Whether these are LoRA adapters of PEFT without the weights that they are for."""
    return has_adapters(tensors) and other_adapters(tensors) is None and lacks_base(parse_peft(tensors))


def is_kept_for_reading(tensors: Mapping[str, Tensor]) -> bool:
    """Whether tensors are looked at as they are, since nothing can be fused: adapters alone, and those of another kind."""
    return other_adapters(tensors) is not None or adapters_alone(tensors)


def with_adapters_fused(
    opened: Adapted, base: Component | None, alpha: float | None, *, cast: bool, allow_overflow: bool = False
) -> tuple[Component, LoraInfo, tuple[Note, ...]]:
    """A component with its adapters in its weights; if it holds adapters alone, in those of ``base``.

    ``cast``: the result will be cast, so it is not rounded to the dtype of the weights before. Raises what `parse_peft`,
    `adapter_facts` and `fuse_adapters` raise.
    """
    component = opened.component
    facts = adapter_facts(opened.homes, alpha, opened.assets.config)
    state = without_lead(parse_peft(component.tensors), facts.lead)
    seen = SeenBase({}, opened.assets.config)
    if base is not None and lacks_base(state):
        seen = as_in_memory(base.tensors, opened.assets.config, state.adapters, facts.config)
    weights, config = seen.tensors, seen.config
    state = placed(state, weights)
    check_variant(state, facts)
    if not state.adapters and state.wrapped:
        raise Inconsistent(
            "modules are wrapped for adapters, but no factors of adapters are here",
            tensor=state.tensors[next(iter(state.wrapped))].name,
            path=component.root,
            expected="tensors such as ...lora_A.weight beside ...base_layer.weight",
            hint="look for the files of all ranks, or for the adapter in a folder of its own; --lora keep writes the tensors as they are",
        )
    notes, saved, held, biases = [*facts.notes], saved_names(state), state.tensors, trained_biases(state, facts)
    if is_quantised(opened.assets.config):
        hint = "pass --lora export, and fuse it with PEFT"
        raise Unsupported("the config says that the model is quantised: LoRA cannot be fused into it", path=component.root, hint=hint)
    if lacks_base(state):
        if (way := changed_base(facts.config)) is not None:
            raise Unsupported(
                f"the adapters were initialised with {way}, which changed the base's weights",
                path=component.root,
                hint=f"fuse them with the program that trained them; if --base has that change, set init_lora_weights to true in {CONFIG}",
            )
        if base is None:
            raise Undecidable(
                "these are LoRA adapters without their base model",
                path=component.root,
                hint="pass --base with the model that training started from to fuse them, or --lora export to write a PEFT folder",
            )
        check_biases(state, weights, biases)
        state = without_copies(state, weights, config, biases, has_config=bool(facts.config))
        state, told = with_untrained_heads(state, weights, config, facts.config)
        notes += told
        state = on_base(state, weights)
        notes.append(Note("info", "lora-base", "the shards hold the adapters alone; all other weights are those of the base"))
        if seen.inner is not None:
            text = f"the adapters are for {seen.inner.kind}, whose tensors are those of the base that begin with {seen.inner.outer}"
            notes.append(Note("info", "lora-base", text))
    else:
        # A file that holds each tensor once, as accelerate writes it, has a tied head as the first state of the embedding.
        state, told = with_untrained_heads(state, state.originals, config, facts.config)
        notes += told
    notes += check_whole(state, facts, saved, config, seen.of_the_model(state.tensors), held)
    state = replace(state, tensors=with_ties(state.tensors, config, state.adapters))
    notes += _tie_notes(state, config, facts.config)
    result = fuse_adapters(state, facts, wide=cast, allow_overflow=allow_overflow)
    notes += guessed_notes(facts, result.ranks, state.parts)
    if result.once:
        text = f"{few(result.once)} and what it is tied to have the same factors, which are added once, as in training"
        notes.append(Note("info", "lora-tied", f"{text} (PEFT's merge_and_unload adds them twice)"))
    if result.summed:
        notes.append(Note("warning", "lora-tied", _summed_text(result, ties=facts.config.get(TYING) is True)))
    notes += [*_layout_notes(state, facts), *untrained_notes(state.adapters)]
    info = _info("fused", state, facts, result.ranks, result.scales)
    whole = seen.whole(result.tensors)
    if seen.tensors and (heads := heads_of_base(whole, config, facts.config, [adapter.module for adapter in state.adapters])):
        notes.append(Note("info", "other-head", f"{few(heads)} of the base is not written: the adapters are for a classifier without it"))
        whole = {name: tensor for name, tensor in whole.items() if name not in heads}
    return replace(component, tensors=whole), info, tuple(notes)


def _tie_notes(state: PeftState, config: Config, settings: Config) -> list[Note]:
    """A warning about an adapter on one of several tied tensors: training used the others without it.

    What is written has it in all, as a model that PEFT's ``merge_and_unload`` leaves tied. ``settings`` are those of adapter_config.json.
    """
    if not ties_embeddings(config):
        return []
    adapted = [name for adapter in state.adapters if (name := adapted_name(adapter, state.tensors)) is not None]
    for name in adapted:
        others = tied_to(name, config, settings)
        others = usually_tied(name, state.tensors) if others is None else others
        stored = [other for other in others if other in state.tensors]
        apart = stored and not any(state.tensors[each].alias_of for each in (name, *stored))
        if others and not apart and not {*others} & {*adapted}:
            other = told_tie(name, others)
            text = f"the adapter of {name} changes {other} too, which config.json ties to it: in training {other} had no adapter"
            return [Note("warning", "lora-tied", text)]
    return []


def _summed_text(fused: Fused, *, ties: bool) -> str:
    """What is said of tied tensors with an adapter each; ``ties``: the config says that PEFT ties these as well."""
    if not (ties and fused.differing):
        text = (
            f"the adapter of {few(fused.summed)} changes a tensor that another adapter changes too: in training each was in one use of it"
        )
        return f"{text} alone, and a merged model has the sum in both"
    text = (
        f"{CONFIG} says {TYING}, but the adapters of {few(fused.differing)} and of what it is tied to have other factors: older versions of"
    )
    return f"{text} PEFT trained each in one use of it alone, newer ones load one of them for both, and a merged model has the sum in both"


def exported_adapter(opened: Adapted, base: str | None, alpha: float | None, reference: Component | None = None) -> Exported:
    """The adapters of a component as PEFT stores them; with a ``reference``, the base, they must be whole for it.

    Raises what `parse_peft`, `adapter_facts` and `check_whole` raise, Undecidable without alpha.
    """
    config, stored = opened.assets.config, parse_peft(opened.component.tensors)
    facts = adapter_facts(opened.homes, alpha, config)
    stored = without_lead(stored, facts.lead)
    seen = SeenBase({}, config)
    if reference is not None and lacks_base(stored):
        seen = as_in_memory(reference.tensors, config, stored.adapters, facts.config)
    weights = seen.tensors
    stored = placed(stored, weights)
    refuse_apart(stored, saved_names(stored))
    state, of_part = within_part(stored), is_for_a_part(stored, config)
    if facts.task_type is None and not of_part:
        kind = architecture(config) or ""
        facts = replace(facts, task_type=next((task for suffix, task in TASKS.items() if kind.endswith(suffix)), None))
    check_variant(state, facts)
    ranks = {adapter.path: adapter_rank(adapter, state.tensors, facts) for adapter in state.adapters}
    keys = {adapter.path: pattern_key(adapter, adapted_name(adapter, state.tensors), facts) for adapter in state.adapters}
    for path, rank in ranks.items():
        facts.check_rank(keys[path], rank)
    scales = {path: facts.scale(keys[path], rank) for path, rank in ranks.items()}
    dora = any(adapter.magnitude is not None for adapter in state.adapters)
    bias = any(adapter.bias is not None for adapter in state.adapters)
    named = base or (config.get("_name_or_path") if isinstance(config.get("_name_or_path"), str) else None)
    content = peft_config(facts, ranks, saved_names(state), base=named or None, dora=dora, transposed=_is_transposed(state), bias=bias)
    info = _info("exported", state, facts, ranks, scales)
    whole = check_whole(
        state,
        facts,
        saved_names(state),
        seen.config,
        names_within(seen.of_the_model(weights), stored.part) if lacks_base(state) else state.tensors,
        state.tensors,
    )
    told = [*_layout_notes(state, facts, exported=True), *untrained_notes(state.adapters)]
    guessed = guessed_notes(facts, ranks, state.parts)
    notes = (*facts.notes, *guessed, *([part_note(stored)] if of_part else []), *whole, *told)
    return Exported(_exported(state, trained_biases(state, facts)), content, info, notes)


def _layout_notes(state: PeftState, facts: AdapterFacts, *, exported: bool = False) -> list[Note]:
    """Warnings about fused experts whose lora_B may have another layout than PEFT reads."""
    doubt = layout_doubt(state, facts)
    if doubt is not None:
        return [Note("warning", "expert-layout", doubt)]
    names = [adapted_name(adapter, state.tensors) for adapter in state.adapters if is_of_experts(adapter, state.tensors, facts)]
    if exported and any(facts.expert_layout(name) == BY_EXPERT for name in names):
        text = f"lora_B of fused experts is laid out {BY_EXPERT}, as {CONFIG} says: PEFT and vLLM do not read that, Unsloth does"
        return [Note("warning", "expert-layout", text)]
    return []


def exported_scales(opened: Adapted, alpha: float | None) -> dict[str, float]:
    """The scale of each module of a run's adapters."""
    facts = adapter_facts(opened.homes, alpha, opened.assets.config)
    state = within_part(without_lead(parse_peft(opened.component.tensors), facts.lead))
    return scales_of(state, facts, state.tensors)


def scales_of(state: PeftState, facts: AdapterFacts, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """The scale of each module of adapters; of fused experts it takes their ``weights`` to tell the rank and the name of the parameter."""
    keys = {adapter.path: pattern_key(adapter, adapted_name(adapter, weights), facts) for adapter in state.adapters}
    return {adapter.path: facts.scale(keys[adapter.path], adapter_rank(adapter, weights, facts)) for adapter in state.adapters}


def saved_names(state: PeftState) -> tuple[str, ...]:
    """Tensors that were trained as a whole: as PEFT marks them, or all that lie beside adapters without a base."""
    return state.saved or (tuple(name for name in state.tensors if name not in state.wrapped) if lacks_base(state) else ())


def _exported(state: PeftState, biases: Iterable[str]) -> dict[str, Tensor]:
    """With trained biases, and what an adapter file has beside its adapters, whose names have no mark of PEFT."""
    beside = state.tensors if lacks_base(state) else {name: state.tensors[name] for name in biases}
    named = {state.wrapped.get(name, f"{PREFIX}{name}"): tensor for name, tensor in beside.items() if name not in state.saved}
    return {**named, **state.exported}


def _is_transposed(state: PeftState) -> bool:
    """Whether weights are stored as [in, out], as far as shapes tell."""
    for adapter in state.adapters:
        weight = state.tensors.get(f"{adapter.module}.weight")
        if weight is not None and not adapter.embedding and len(weight.shape) == 2 and weight.shape[0] != weight.shape[1]:
            return weight.shape == (adapter.a.shape[-1], adapter.b.shape[0])
    return False


def _info(outcome: str, state: PeftState, facts: AdapterFacts, ranks: Mapping[str, int], scales: Mapping[str, float]) -> LoraInfo:
    alphas = {facts.alpha_of(pattern_key(adapter, adapted_name(adapter, state.tensors), facts)) for adapter in state.adapters}
    return LoraInfo(
        outcome=outcome,
        modules=len(ranks),
        ranks=tuple(sorted(set(ranks.values()))),
        scales=tuple(sorted(set(scales.values()))),
        alpha=facts.alpha,
        origin=facts.origin,
        dora=any(adapter.magnitude is not None for adapter in state.adapters),
        alphas=tuple(sorted(alphas)),
    )
