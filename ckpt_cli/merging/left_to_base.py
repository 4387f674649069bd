"""What an adapter leaves to its base: the weights of the checkpoint that are not in it must be the base's, or it is not what was trained.

A state of a whole model holds them. Tensors may have been trained without PEFT's knowledge (LongLoRA's norms and embedding), buffers follow
the activations, an embedding was given more rows, or the training began from other weights than the base has: adapters that were fused in
memory. Of an average of factors alone the model beside it holds them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_cli.base_model.alike import laid_out_alike
from ckpt_cli.base_model.opened import Base, open_base
from ckpt_cli.discover.open import OpenedComponent
from ckpt_cli.drafting.draft import Setting
from ckpt_cli.errors import CkptError, Inconsistent
from ckpt_cli.files.source import Files
from ckpt_cli.hub.classes.computed.recomputed import is_idle
from ckpt_cli.hub.classes.fit import KnownClass
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.peft_names import PeftState, has_adapters, parse_peft
from ckpt_cli.hub.ties import tied_together
from ckpt_cli.lora.biases import trained_biases
from ckpt_cli.lora.config import AdapterFacts, adapter_facts
from ckpt_cli.lora.fit import lacks_base
from ckpt_cli.lora.parts import without_lead
from ckpt_cli.lora.settings import changed_base
from ckpt_cli.merging.frozen import ROUNDED, measured_under
from ckpt_cli.merging.options import MergeOptions
from ckpt_cli.merging.same_but_rounded import is_comparable, is_in_store, same_but_rounded
from ckpt_cli.merging.trained_on import recorded_base
from ckpt_cli.name_patterns import grouped, pattern_of
from ckpt_cli.names import few, plural, printable
from ckpt_cli.output.select import Selection, select_tensors
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

DIFFERS, LEFT = "left-behind", "left-to-base"
REPEATED = (DIFFERS, LEFT)
"""Codes of what is said here, which is as true of an adapter that was written before."""


@dataclass(frozen=True, slots=True)
class Rest:
    """The weights of a checkpoint that an adapter does not hold: the model's ``state`` with its adapters, without what is in the adapter.

    ``without`` are the names of that; ``beside``: they are those of the model beside an average.
    """

    state: PeftState
    facts: AdapterFacts
    without: frozenset[str]
    beside: bool

    @property
    def count(self) -> int:
        return sum(name not in self.without for name in self.state.tensors)


@dataclass(frozen=True, slots=True)
class Compared:
    """The rest beside a base: names of tensors that have other values, have another shape, or that the base has not. False if none do."""

    differing: tuple[str, ...]
    reshaped: tuple[str, ...]
    absent: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.differing or self.reshaped or self.absent)

    def text_for(self, base: str) -> str:
        """What is other than in the base, in words."""
        found = (
            (self.differing, f"{{}} not those of {base}"),
            (self.reshaped, "{} of another shape there"),
            (self.absent, "{} not there at all"),
        )
        return "; ".join(
            f"{len(names)} {how.format('is' if len(names) == 1 else 'are')} ({few(grouped(names))})" for names, how in found if names
        )


def export_notes(component: OpenedComponent, setting: Setting[MergeOptions], written: bytes) -> list[Note]:
    """What is said of an adapter that is written alone; ``written`` is its adapter_config.json.

    A warning about weights of the checkpoint that are neither in the adapter nor in the base, or a line that nothing was compared.
    """
    rest = _rest_of(component, setting.options.lora_alpha)
    if rest is None or not rest.count:
        return []
    named = setting.base.folder if setting.base is not None else recorded_base(json.loads(written))
    if setting.base is not None and setting.base.component is not None:
        compared = _compared(rest, component, setting.base, setting.options)
    elif setting.base is None and named is not None:
        compared = _compared_with_recorded(rest, component, named, setting.options)
    else:
        compared = None
    others = f"{plural(rest.count, 'tensor')} {'of the model beside it' if rest.beside else 'of the checkpoint'}"
    if compared is None:
        cure = " (--base DIR compares them)" if setting.base is None else ""
        is_left = "is" if rest.count == 1 else "are"
        return [Note("info", LEFT, f"{others} that {is_left} not in the adapter: left to the base, and not compared with it{cure}")]
    if not compared:
        return []
    text = f"of {others} that the adapter does not hold, {compared.text_for(str(named))}: on that base it is not the model "
    return [Note("warning", DIFFERS, f"{text}that was trained; {_cure(rest, setting.options)}")]


def beside_notes(component: OpenedComponent, base: Base, options: MergeOptions) -> list[Note]:
    """A warning about a base that the adapters of an average are fused into, where the model beside it has other weights.

    Raises Inconsistent if these are weights under adapters, of which PEFT trains nothing else: then the base is another model.
    """
    rest = _rest_of(component, options.lora_alpha)
    if rest is None or not rest.beside or base.component is None:
        return []
    compared = _compared(rest, component, base, options)
    if compared is None or not compared:
        return []
    try:
        measured = measured_under(rest.state, base.component.tensors, component.assets.config, rest.facts)
    except CkptError:
        measured = []
    text = compared.text_for("the base")
    apart = max((each for each in measured if each.distance > ROUNDED), key=lambda each: each.distance, default=None)
    if apart is not None and not any(each.merged for each in measured):
        others = f"of {plural(rest.count, 'tensor')} of the model beside it {text}"
        raise Inconsistent(
            f"the base is not the model that {component.name} was trained on: {others}; "
            f"{printable(apart.name)} is {apart.distance:.1%} apart, although it has an adapter",
            tensor=rest.state.wrapped.get(apart.name, apart.name),
            path=base.folder,
            expected="the weights of the model in the same checkpoint, without its adapters",
            hint="pass --base with the model that has these weights, or pass --lora export, without --base, to write the adapters alone",
        )
    said = f"{component.name} is fused into weights of the base, but of {plural(rest.count, 'tensor')} of the model beside it {text}"
    return [Note("warning", DIFFERS, f"{said}: the output has these from the base, and not from the training")]


def _rest_of(component: OpenedComponent, alpha: float | None) -> Rest | None:
    """What the adapters of a component leave to the base; None where nothing here holds that."""
    try:
        facts = adapter_facts(component.homes, alpha, component.assets.config)
        state = without_lead(parse_peft(component.component.tensors), facts.lead)
        if not lacks_base(state):
            return Rest(state, facts, frozenset((*state.saved, *trained_biases(state, facts))), False)
        beside = component.live() if component.live is not None else None
        if beside is None or not has_adapters(beside):
            return None
        model = without_lead(parse_peft(beside), facts.lead)
        return None if lacks_base(model) else Rest(model, facts, frozenset((*model.saved, *state.tensors)), True)
    except CkptError:
        return None  # what cannot be read, or does not fit, is told where it is needed


def _compared_with_recorded(rest: Rest, component: OpenedComponent, folder: Path, options: MergeOptions) -> Compared | None:
    try:
        with Files() as files:
            return _compared(rest, component, open_base(folder, files, needed=True), options)
    except CkptError:
        return None  # it was not asked for


def _compared(rest: Rest, component: OpenedComponent, base: Base, options: MergeOptions) -> Compared | None:
    """The rest beside the weights of a base; None if they cannot be compared, as with a quantised one, or by other names."""
    if base.component is None:
        return None
    try:
        mine, kind = _as_written(rest, component, options)
        configs = (component.assets.config, base.config)
        held, _ = laid_out_alike(base.component.tensors, mine.tensors, kind, mine.naming, configs)
        partners = _tied_in(held, mine, configs[0])
        alone = frozenset(rest.state.tensors[name].name for name in rest.without if name in rest.state.tensors)
        found = {name: tensor for name, tensor in mine.tensors.items() if tensor.name not in alone and name not in rest.without}
        there = {name: held[other] for name in found if (other := partners.get(name, name)) in held}
        if 2 * len(there) < len(found):
            return None
        skipped = _holding_adapters(rest, component, base)
        reshaped = [name for name in there if there[name].shape != found[name].shape]
        pairs = {
            name: (found[name], other)
            for name, other in there.items()
            if found[name].shape == other.shape and found[name].name not in skipped and is_comparable(found[name], other)
        }
        if not pairs and not reshaped:
            return None
        differing = [name for name in _affordable(pairs) if not same_but_rounded(name, *pairs[name])]
    except CkptError:
        return None  # what cannot be read is told where it is needed
    absent = [name for name, tensor in found.items() if name not in there and _is_of_training(name, tensor)]
    return Compared(tuple(differing), tuple(reshaped), tuple(absent))


def _as_written(rest: Rest, component: OpenedComponent, options: MergeOptions) -> tuple[Selection, KnownClass | str]:
    """The tensors of the model as a merge would write them without adapters: so a base has them too."""
    chosen = replace(component.component, tensors={name: replace(each, copies=()) for name, each in rest.state.tensors.items()})
    plain = replace(options, names="hub", include=(), exclude=(), key_map=())
    selection = select_tensors(chosen, component.assets.config, plain)
    return selection, selection.kind


def _tied_in(base: Mapping[str, Tensor], mine: Selection, config: Config) -> dict[str, str]:
    """Tensors that a base stores under the name of one that they are tied to, and that name."""
    together = tied_together({*base, *mine.tensors}, config, mine.kind, mine.naming)
    stored = {together[name]: name for name in base if name in together}
    return {name: stored[together[name]] for name in mine.tensors if name not in base and together.get(name) in stored}


def _holding_adapters(rest: Rest, component: OpenedComponent, base: Base) -> frozenset[str]:
    """Weights under adapters that are not to be the base's: of a state that was saved while merged, or initialised in another way.

    PEFT makes the base's anew with the adapters of such an initialisation, and a merged state lies apart by the adapter alone.
    """
    under = frozenset(tensor.name for name, tensor in rest.state.tensors.items() if name in rest.state.wrapped)
    if changed_base(rest.facts.config) is not None:
        return under
    try:
        measured = measured_under(rest.state, base.weights().tensors, component.assets.config, rest.facts)
    except CkptError:
        return frozenset()
    return under if any(each.merged for each in measured) else frozenset()


def _affordable(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[str]:
    """Names of what is compared: all tensors, or of those in a store the first, middle and last one of every kind."""
    kinds: dict[str, list[str]] = {}
    for name, pair in pairs.items():
        if any(map(is_in_store, pair)):
            kinds.setdefault(pattern_of(name)[0], []).append(name)
        else:
            yield name
    for names in kinds.values():
        yield from dict.fromkeys((names[0], names[len(names) // 2], names[-1]))


def _is_of_training(name: str, tensor: Tensor) -> bool:
    """Whether a tensor that a base does not have may hold what was trained: no buffer that is computed anew."""
    return tensor.dtype.kind == "float" and not is_idle(name, tensor.shape)


def _cure(rest: Rest, options: MergeOptions) -> str:
    if rest.beside:
        return "put it on the model that has these weights"
    if options.lora == "both":
        return "the fused model that is written beside it is"
    return "leave out --lora export to write that model, with its adapters fused, or pass --lora both to write it too"
