"""Which tensors of a component are written, under which names: wrappers, key maps, filters, tied heads, replicas."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_cli import shell
from ckpt_cli.boxes import Shape
from ckpt_cli.errors import CkptError, Inconsistent, NotFound, Unsupported
from ckpt_cli.files.folders import is_file
from ckpt_cli.hub.adapters.other_kinds import factors_alone, factors_alone_text, like_factors, like_factors_text, other_adapters
from ckpt_cli.hub.adapters.parametrized import parametrized_factors, parametrized_text
from ckpt_cli.hub.assets import CONFIG
from ckpt_cli.hub.classes.absent.names_in_header import with_names_of_class
from ckpt_cli.hub.classes.absent.own_class import Apart
from ckpt_cli.hub.classes.absent.own_words import prefix_text
from ckpt_cli.hub.classes.computed.parametrized import refuse_made_of_part
from ckpt_cli.hub.classes.fit import KnownClass
from ckpt_cli.hub.classes.names import hub_tensors, renamed_for_hub, united, unknown_operations
from ckpt_cli.hub.classes.prefixes import UNCHANGED, PrefixChange, class_of, common_prefix, named_in_memory
from ckpt_cli.hub.classes.rules import HubRules, rules_for
from ckpt_cli.hub.config import architecture
from ckpt_cli.hub.config_text import with_known_dtype
from ckpt_cli.hub.dialects.rotary_order import order_notes
from ckpt_cli.hub.megatron.config import check_config, config_from, padding_note
from ckpt_cli.hub.megatron.convert import hub_tensors_of_megatron
from ckpt_cli.hub.megatron.names import is_megatron
from ckpt_cli.hub.peft_names import has_adapters
from ckpt_cli.hub.ties import Live, find_ties
from ckpt_cli.names import DDP, Naming, foreign_names, printable, strip_wrappers, stripped_names
from ckpt_cli.output.key_map import Rule, mapped_names, unused_rules
from ckpt_cli.output.options import WritingOptions
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.equality import unequal_copies
from ckpt_cli.tensors.tensor import Tensor

WRAPPED = DDP.removesuffix(".")

SAVED_BY_CLASS = re.compile(r"(pytorch_)?model(-[0-9]+-of-[0-9]+)?\.(safetensors|bin)(\.index\.json)?", re.ASCII)
"""What ``save_pretrained`` calls its files."""

BY_ITS_PROGRAM = "fuse each into its model with the program that made it"
PEFT = "these are LoRA adapters, which are not part of a model class"
OTHER = "these are adapters, which are not part of a model class"


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors to write, by output name, and the others: ``dropped`` with the reason, counts for the rest.

    ``tied`` maps tensors that were left out to those that they are tied to; ``filtered`` names those that filters left out, under
    the names that they would have. ``kind`` is the class whose tensors these should be, with names of ``naming``, or why there is
    nothing to compare with; ``change`` the prefix of the model's names that was taken away, or added, for that.
    ``differing`` maps tensors to those that the config ties them to, where the values differ. A key map sees names as trained, and
    ``dropped`` has what it leaves out under these: ``mapped_out``; ``unmapped`` are the names that they would have in the output.
    ``lacking`` are names of the output that a second component does not have, and the model beside it has. ``unwrapped`` counts names from
    which a wrapper's part was removed although not all have it. ``is_guess``: "module." was removed from all, and compared with nothing.
    """

    tensors: dict[str, Tensor]
    dropped: dict[str, str]
    renamed: int
    filtered: tuple[str, ...]
    notes: tuple[Note, ...]
    tied: Mapping[str, str]
    kind: KnownClass | str
    naming: Naming = "hub"
    change: PrefixChange = UNCHANGED
    differing: Mapping[str, str] = field(default_factory=dict)
    mapped_out: frozenset[str] = frozenset()
    unmapped: frozenset[str] = frozenset()
    lacking: tuple[str, ...] = ()
    unwrapped: int = 0
    is_guess: bool = False

    @property
    def left_out(self) -> int:
        return len(self.filtered)

    @property
    def on_purpose(self) -> set[str]:
        """Names of the output that it lacks because they were left out: they are not lacking."""
        return {*self.filtered, *self.unmapped, *(self.dropped.keys() - self.mapped_out)} - self.tensors.keys()

    def with_head(self, head: str, embedding: str) -> Selection:
        """With a tied output head as well, as its embedding: for a base that stores both."""
        dropped = {name: why for name, why in self.dropped.items() if name != head}
        tied = {name: partner for name, partner in self.tied.items() if name != head}
        return replace(self, tensors={**self.tensors, head: replace(self.tensors[embedding], name=head)}, dropped=dropped, tied=tied)


def select_tensors(
    component: Component,
    config: Mapping[str, Any],
    options: WritingOptions,
    rules: tuple[Rule, ...] = (),
    *,
    adapters: bool = False,
    averaging: Callable[[Mapping[str, Tensor]], bool] | None = None,
    live: Live | None = None,
    lacking: Sequence[str] = (),
) -> Selection:
    """Decide names and tensors, by ``options`` (filters and names) and the ``rules`` of a key map.

    ``adapters``: tensors of PEFT are written as they are; ``averaging``: factors of any adapter are refused, and it tells whether there
    are only these; ``live`` gives the tensors of the model beside an EMA, which has those of the names ``lacking`` too.

    Raises NotFound if nothing is left, Unsupported for PEFT weights otherwise, Inconsistent for names that collide and replicas
    that differ.
    """
    names, include, exclude = options.names, options.include, options.exclude
    notes: list[Note] = []
    dropped: dict[str, str] = {}
    mapped_out: dict[str, Tensor] = {}
    saved = component.tensors
    if not rules:
        component, notes = with_names_of_class(component, config, names)
    stripped = stripped_names(component.tensors)
    is_guess = _is_guess(stripped) and not isinstance(class_of(config, _shapes(component, stripped)), KnownClass)
    if is_guess and _is_saved_by_class(component, config):
        is_guess, stripped = False, stripped_names(component.tensors, keep_module=True)
    mapped = mapped_names(stripped.values(), rules)
    refuse_made_of_part(mapped if rules else {})
    unused = [f"a rule of the key map has no effect: no tensor name {wanted}" for wanted in unused_rules(stripped.values(), rules)]
    notes += [Note("warning", "unused-rule", text) for text in unused]
    native: dict[str, Tensor] = {}
    for old, short in stripped.items():
        new = mapped[short]
        if new is None:
            dropped[short] = "left out by the key map"
            mapped_out[short] = component.tensors[old]
        else:
            native[new] = component.tensors[old]
    stored = native
    if names == "hub" and not rules and is_megatron(native):
        notes += [*check_config(config, component.arguments), *padding_note(config, component.arguments)]
        why = config_from(component.arguments) if not config else ""
        native = hub_tensors_of_megatron(native, config, str(why))
    kept_adapters, other = adapters and has_adapters(native), other_adapters(native)
    change, unwrapped = UNCHANGED, 0
    shapes = {name: tensor.shape for name, tensor in native.items()}
    kind: KnownClass | str = (
        PEFT if has_adapters(native) else OTHER if other is not None and other.alone else class_of(with_known_dtype(config), shapes)
    )
    if kind not in (PEFT, OTHER) and other is None:
        notes += _like_factors_notes(shapes, config, kind)
    if isinstance(kind, KnownClass):
        config = kind.config
        if names == "hub" and not rules:
            native, change = _with_prefix_of(native, kind, as_saved=_is_saved_by_class(component, config))
            if kind.own and change.removed:
                notes.append(Note("warning", "own-prefix", prefix_text(kind.own, kind.kind, change.removed)))
            native, unwrapped = _without_stray_wrappers(native, kind)
    hub = kind.rules if isinstance(kind, KnownClass) else None if isinstance(kind, Apart) else rules_for(config)
    naming: Naming = names
    tensors, left, replaced = dict(native), dict[str, tuple[str, ...]](), frozenset[str]()
    if names == "hub" and hub is not None and not kept_adapters:
        unknown = unknown_operations(hub)
        if unknown:
            naming = "native"
            text = f"names stay as the training has them: {hub.architecture} is re-cut by {', '.join(unknown)}, which is not known here"
            notes.append(Note("warning", "native-names", text))
        else:
            tensors, left = united(native, hub, config, exclude)
            dropped |= dict.fromkeys(left, "left out by --exclude")
            # The other form of a tensor that was left out by its name is what is wanted.
            replaced = frozenset(left.keys() & tensors.keys() & {*exclude})
            native = {name: tensor for name, tensor in native.items() if name not in left}
    if naming == "hub" and tensors.keys() == native.keys() and isinstance(kind, KnownClass) and named_in_memory(native, kind):
        naming = "native"
    if kept_adapters:
        notes.append(Note("warning", "lora-kept", "these are the names of PEFT, which no model class loads: for tools that know LoRA"))
    kept = {name: tensor for name, tensor in tensors.items() if is_wanted(name, include, () if name in replaced else exclude)}
    if not kept:
        if not (include or exclude):
            raise NotFound("the key map leaves out every tensor", expected="at least one tensor")
        raise NotFound("no tensor is left after --include and --exclude", hint=_pattern_meant(include, list(tensors)))
    patterns = (*include, *exclude)
    notes += [_unused(pattern) for pattern in patterns if not fnmatch.filter([*tensors, *dropped], pattern)]
    _refuse_factors(component, kept, adapters, averaging)
    # Re-cut tensors share their copies with what they were cut from: each is compared once.
    compared = stored.values() if tensors.keys() != stored.keys() and not patterns else kept.values()
    for tensor in compared:
        if tensor.check_copies:
            notes += compare_copies(tensor, options.allow_unequal_replicas)
    notes += _foreign_notes(native, config, kind)
    if isinstance(kind, KnownClass) and rules:
        of_class = kind
        notes += order_notes(mapped, lambda new: new in native and of_class.count({new: native[new].shape}) > 0, config, kind.kind)
    final = {id(tensor): name for name, tensor in tensors.items()}
    ties, differing = find_ties(component.name, native, config, hub, kind, live)
    tied: dict[str, str] = {}
    for tie in ties:
        name, partner = final.get(id(native[tie.name])), final.get(id(native[tie.partner]))
        if name is not None and partner is not None and name in kept and partner in kept:
            tied[name] = partner
            dropped[name] = tie.reason.replace(tie.partner, partner)
            del kept[name]
    named = {final.get(id(native[name]), name): final.get(id(native[partner]), partner) for name, partner in differing}
    renamed = sum(saved.get(new) is not tensor for new, tensor in kept.items())
    known = dict.fromkeys([*tensors, *(new for names_on_hub in left.values() for new in names_on_hub)])
    filtered = tuple(name for name in known if name not in kept and name not in tied)
    unmapped = _unmapped(mapped_out, rules, hub if naming == "hub" and not kept_adapters else None, config)
    absent = _mapped_lacking(lacking, rules, kind.rules if naming == "hub" and isinstance(kind, KnownClass) else None)
    absent = tuple(name for name in absent if is_wanted(name, include, exclude) and name not in kept and name not in tied)
    return Selection(
        kept,
        dropped,
        renamed,
        filtered,
        tuple(notes),
        tied,
        kind,
        naming,
        change,
        named,
        frozenset(mapped_out),
        unmapped,
        absent,
        unwrapped,
        is_guess and not rules and not isinstance(kind, KnownClass),
    )


def _like_factors_notes(shapes: Mapping[str, Shape], config: Mapping[str, Any], kind: KnownClass | str) -> list[Note]:
    """A warning about factors of adapters of no known kind; code of the model's own may have a place for them."""
    if "auto_map" in config:
        return []
    if (rank := factors_alone(shapes)) is not None and not isinstance(kind, KnownClass):
        return [Note("warning", "unfused-adapters", factors_alone_text(len(shapes), rank))]
    for names, text in ((parametrized_factors(shapes), parametrized_text), (like_factors(shapes), like_factors_text)):
        found = [name for name in names if not (isinstance(kind, KnownClass) and kind.count({name: shapes[name]}))]
        if found:
            return [Note("warning", "unfused-adapters", text(found))]
    return []


def _foreign_notes(native: Mapping[str, Tensor], config: Mapping[str, Any], kind: KnownClass | str) -> list[Note]:
    """A warning about names that only a trainer has; code of the model's own may have any."""
    if "auto_map" in config or foreign_names(native) is None:
        return []
    placed = {name for name, tensor in native.items() if isinstance(kind, KnownClass) and kind.count({name: tensor.shape})}
    trainer = foreign_names(native.keys() - placed)
    text = f"these are tensor names of {trainer}, which no class of transformers has: rename them with --key-map"
    return [Note("warning", "foreign-names", text)] if trainer is not None else []


def _is_guess(stripped: Mapping[str, str]) -> bool:
    """Whether every name lost "module.", which DistributedDataParallel puts there, and which a class may have itself."""
    return bool(stripped) and all(strip_wrappers(old) != new for old, new in stripped.items())


def _shapes(component: Component, names: Mapping[str, str]) -> dict[str, Shape]:
    return {new: component.tensors[old].shape for old, new in names.items()}


def _is_saved_by_class(component: Component, config: Mapping[str, Any]) -> bool:
    """Whether the files are those of ``save_pretrained``, beside the config of the class: it never writes the names of a wrapper."""
    names = [path.name for path in component.files]
    return bool(architecture(config) and names and all(map(SAVED_BY_CLASS.fullmatch, names)) and is_file(component.root / CONFIG))


def _refuse_factors(
    component: Component, kept: Iterable[str], adapters: bool, alone: Callable[[Mapping[str, Tensor]], bool] | None
) -> None:
    """Raise Unsupported for factors of adapters where weights are wanted, Inconsistent where some of them are missing."""
    other = other_adapters(kept) if alone is not None else None
    inside = parametrized_factors(kept) if alone is not None else ()
    foreign = other.names[0] if other is not None else next(iter(inside), None)
    factor = foreign or next((name for name in kept if not adapters and has_adapters({name: None})), None)
    if factor is None:
        return
    what, fuse = ("factors of an adapter", BY_ITS_PROGRAM) if foreign else _adapters_and_cure(component, alone)
    raise Unsupported(
        f"these are {what}, which cannot be averaged: a mean of products is not the product of means",
        tensor=factor,
        expected="weights without adapters",
        hint=f"{fuse}, then average the results",
    )


def _adapters_and_cure(component: Component, alone: Callable[[Mapping[str, Tensor]], bool] | None) -> tuple[str, str]:
    """What a component with names of PEFT is, and what makes weights of it."""
    try:
        only = alone is not None and alone(component.tensors)
    except Unsupported:  # which a merge does not fuse either
        return "weights with adapters", BY_ITS_PROGRAM
    if only:
        return "LoRA adapters without their base model", "merge each with --base and the model that training started from"
    return "weights with LoRA adapters", "merge each checkpoint first, which fuses them"


def _mapped_lacking(lacking: Sequence[str], rules: tuple[Rule, ...], hub: HubRules | None) -> tuple[str, ...]:
    """The names that tensors which are not there would have in the output."""
    mapped = [name for name in mapped_names(lacking, rules).values() if name is not None]
    return tuple(mapped) if hub is None else tuple(renamed_for_hub(dict.fromkeys(mapped, ()), hub))


def _unmapped(mapped_out: Mapping[str, Tensor], rules: tuple[Rule, ...], hub: HubRules | None, config: Mapping[str, Any]) -> frozenset[str]:
    """The names that tensors which a key map leaves out would have in the output without the rules that leave them out."""
    renaming = tuple(rule for rule in rules if rule.to is not None)
    kept = {new: tensor for old, tensor in mapped_out.items() if (new := mapped_names([old], renaming)[old]) is not None}
    if hub is None or not kept:
        return frozenset(kept)
    try:
        return frozenset(hub_tensors(kept, hub, config))
    except CkptError:  # some of what is gathered
        return frozenset(renamed_for_hub({name: tensor.shape for name, tensor in kept.items()}, hub))


def _with_prefix_of(native: dict[str, Tensor], kind: KnownClass, *, as_saved: bool) -> tuple[dict[str, Tensor], PrefixChange]:
    """The tensors with the prefix that their class has, where the model's begin otherwise, and what was changed for it.

    A class of the user's own may hold the model as a module, beside others: its names stay ``as_saved`` by itself, and beside others.
    """
    change = common_prefix(kind, {name: tensor.shape for name, tensor in native.items()})
    if kind.own and change.removed and (as_saved or not change.whole):
        return native, UNCHANGED
    return ({change.of(name): tensor for name, tensor in native.items()} if change else native), change


def _without_stray_wrappers(native: dict[str, Tensor], kind: KnownClass) -> tuple[dict[str, Tensor], int]:
    """The tensors without the wrapper's part in names that only fit the class without it, and are no other tensor's; and how many."""
    wrapped = [name for name in native if WRAPPED in name.split(".") and not kind.count({name: native[name].shape})]
    bare = {name: ".".join(part for part in name.split(".") if part != WRAPPED) for name in wrapped}
    seen = Counter([*bare.values(), *native])
    fitting = {name: new for name, new in bare.items() if seen[new] == 1 and kind.count({new: native[name].shape})}
    return {fitting.get(name, name): tensor for name, tensor in native.items()}, len(fitting)


def compare_copies(tensor: Tensor, allowed: bool) -> list[Note]:
    """Notes about replicas of one tensor that differ. Raises Inconsistent for them unless ``allowed``."""
    for piece, copy in unequal_copies(tensor):
        text = f"ranks {piece.rank} and {copy.rank} hold different values of what should be replicas"
        if not allowed:
            raise Inconsistent(
                text,
                tensor=tensor.name,
                expected="the same values on all ranks (files of one step)",
                hint=f"pass --allow-unequal-replicas to use those of rank {piece.rank}",
            )
        return [Note("warning", "replicas-differ", f"{printable(tensor.name)}: {text}; those of rank {piece.rank} were used")]
    return []


def _pattern_meant(include: Sequence[str], names: Sequence[str]) -> str:
    """A pattern that matches where one of these does not: for a part of a name, and for a regular expression."""
    for pattern in include:
        plain = re.sub(r"\.\*|\.\+", "*", pattern.strip("^$")).replace("\\", "")
        for meant in (plain, f"{plain}*", f"*{plain}*"):
            if not fnmatch.filter(names, pattern) and fnmatch.filter(names, meant):
                return f"patterns are matched against whole names: did you mean --include {shell.word(meant)}?"
    return "patterns are matched against whole names, as in '*.mlp.*'"


def _unused(pattern: str) -> Note:
    return Note("warning", "unused-pattern", f"the pattern {printable(pattern)} matches no tensor name (it must match a whole name)")


def is_wanted(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether filters keep a name."""
    included = not include or any(fnmatch.fnmatchcase(name, pattern) for pattern in include)
    return included and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)
