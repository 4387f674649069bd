"""Whether LoRA adapters are complete, by adapter_config.json and the weights that they belong to.

PEFT adapts every module that the config names (`targets.py`) and no other, and saves every module of ``modules_to_save``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_cli.errors import Inconsistent
from ckpt_cli.hub.classes.tying import ties_embeddings
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.layers.counts import layer_count
from ckpt_cli.hub.peft_names import PeftState
from ckpt_cli.hub.tied_names import MODULES
from ckpt_cli.lora.biases import bias_kind, missing_biases
from ckpt_cli.lora.config import CONFIG, AdapterFacts
from ckpt_cli.lora.fit import is_of_experts
from ckpt_cli.lora.on_base.adapted import adapted_name
from ckpt_cli.lora.parts import names_within, within_part
from ckpt_cli.lora.settings import TYING
from ckpt_cli.lora.targets import Targets, ends, is_end
from ckpt_cli.names import few, plural
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

OF_THE_TASK = frozenset({"classifier", "score", "qa_outputs"})
"""What PEFT adds to ``modules_to_save`` for classes with a head of their own, whatever that is called (``peft_model.py``)."""

NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Lacking:
    """A missing part of an adapter; ``sure``: by the config and the weights, otherwise by comparison with other parts.

    ``remedy``: the change to the config if nothing else was trained.
    """

    text: str
    tensor: str | None
    sure: bool
    remedy: str = ""


def check_whole(
    state: PeftState, facts: AdapterFacts, saved: Collection[str], config: Config, base: Mapping[str, Tensor], held: Collection[str]
) -> list[Note]:
    """Warnings about parts that seem to be missing; arguments as in `lacking_parts`.

    Raises Inconsistent for one that certainly is, and for factors of modules that the config does not name.
    """
    notes = []
    base, held = names_within(base, state.part), names_within(dict.fromkeys(held), state.part)
    saved, state = names_within(dict.fromkeys(saved), state.part), within_part(state)
    _check_named(state, facts)
    for lacking in lacking_parts(state, facts, saved, config, base, held):
        if lacking.sure:
            raise Inconsistent(
                lacking.text,
                tensor=lacking.tensor,
                expected=f"all that {CONFIG} says was trained",
                hint=f"look for the adapter's other files; if nothing else was trained, {lacking.remedy} in {CONFIG}",
            )
        notes.append(Note("warning", "partial-adapter", lacking.text))
    for setting, patterns in facts.unused_patterns(_pattern_keys(state, facts)).items():
        text = f"{setting} in {CONFIG} has entries that match no adapted module, and so no effect: {few(patterns, 3)}"
        notes.append(Note("warning", "unused-pattern", text))
    return notes


def _pattern_keys(state: PeftState, facts: AdapterFacts) -> set[str]:
    """All names that a pattern of ranks or alphas may mean; of parameters whose names are not known, those that the config gives."""
    keys = {adapter.module for adapter in state.adapters}
    parameters = {target.rpartition(".")[2] for target in Targets(facts.config).parameters}
    for adapter in state.adapters if parameters else ():
        name = adapted_name(adapter, state.tensors)
        keys |= {f"{adapter.module}.{parameter}" for parameter in parameters} if name is None else {name}
    return keys


def lacking_parts(
    state: PeftState, facts: AdapterFacts, saved: Collection[str], config: Config, base: Mapping[str, Tensor], held: Collection[str]
) -> Iterator[Lacking]:
    """The missing parts of adapters.

    ``saved`` are the tensors that were trained as a whole, ``config`` is that of the model (empty: not known), ``base`` are the
    weights that the adapters are for, by the names in memory (empty: not at hand), ``held`` the tensors that lie beside the factors.
    """
    missing = missing_biases({*held, *saved}, base, state, facts)
    if missing:
        are = "is" if len(missing) == 1 else "are"
        text = f"the config says that biases were trained ({bias_kind(facts)}), but {few(missing, 3)} {are} missing"
        yield Lacking(text, state.would_be(missing[0]), True, "set bias to none")
    yield from _unsaved(facts, list(saved), config, base)
    targets, count = Targets(facts.config), layer_count(config)
    modules = [adapter.module for adapter in state.adapters if not is_of_experts(adapter, state.tensors, facts)]
    weights = [module for module in _matrices(base) if not _is_beyond(module, count)]
    verdicts = {module: targets.leaves_out(module) for module in weights}
    meant = [module for module, setting in verdicts.items() if setting == ""]
    yield from _lacking_targets(modules, meant, targets, bool(base))
    yield from _lacking_parameters(state, base, targets)
    if base:
        # Where names do not decide, PEFT may have left any module out.
        undecided = [] if targets.by_name else [module for module, setting in verdicts.items() if setting is None]
        yield from _lacking_of_base(state, modules, [*meant, *undecided], sure=targets.by_name or targets.is_all_linear)
    else:
        yield from _lacking_of_others(modules, facts, config)


def left_out(state: PeftState, facts: AdapterFacts) -> dict[str, list[str]]:
    """Modules that have factors but that the config does not name, so that PEFT would leave the factors out; by the setting at fault."""
    targets, found = Targets(facts.config), dict[str, list[str]]()
    modules = {adapter.module for adapter in state.adapters}
    for adapter in state.adapters:
        name = adapted_name(adapter, state.tensors)
        # Attention of torch holds its output projection, which goes with it.
        if targets.names_parameter(adapter.module, name) or adapter.module.rpartition(".")[0] in modules:
            continue
        setting = targets.leaves_out(adapter.module)
        if setting and targets.parameters and name not in (None, f"{adapter.module}.weight"):
            setting = "target_parameters"
        if setting:
            found.setdefault(setting, []).append(adapter.module)
    return found


def left_out_text(setting: str, modules: Sequence[str]) -> str:
    """What is said of modules with factors that a setting leaves out."""
    them = "it" if len(modules) == 1 else "them"
    return f"there are factors for {few(modules, 3)}, but the config's {setting} leaves {them} out"


def stored_of(state: PeftState, module: str) -> str:
    """A tensor of a module's adapter, as its file calls it."""
    return next(adapter.stored for adapter in state.adapters if adapter.module == module)


def _check_named(state: PeftState, facts: AdapterFacts) -> None:
    """Raise Inconsistent for factors of modules that the config does not name."""
    for setting, modules in left_out(state, facts).items():
        raise Inconsistent(
            left_out_text(setting, modules),
            tensor=stored_of(state, modules[0]),
            expected=f"factors of the modules that {CONFIG} names: PEFT loads no others",
            hint=f"the adapter's files may be from two runs; if these modules were trained, correct {setting} in {CONFIG}",
        )


def _lacking_targets(modules: Sequence[str], meant: Sequence[str], targets: Targets, has_base: bool) -> Iterator[Lacking]:
    """Names in ``target_modules`` without factors, unless the model at hand has no such module.

    An expression stands for the last parts of the modules that it matches.
    """
    there = {end for module in modules for end in ends(module)}
    there_in_base = {end for module in meant for end in ends(module)}
    named = targets.names if targets.expression is None else list(dict.fromkeys(module.rpartition(".")[2] for module in meant))
    for target in named:
        if target not in there and (target in there_in_base if has_base else targets.excludes(target) is False):
            yield Lacking(f"the config targets {target}, but there are no factors for it", None, True, "correct target_modules")


def _lacking_parameters(state: PeftState, base: Mapping[str, Tensor], targets: Targets) -> Iterator[Lacking]:
    """Parameters that ``target_parameters`` names and that have no factors."""
    adapted = [(adapter.module, adapted_name(adapter, state.tensors)) for adapter in state.adapters]
    unknown = {module for module, name in adapted if name is None}
    there = {name for _, name in adapted if name is not None}
    for target in targets.parameters:
        owner = target.rpartition(".")[0]
        own = [name for name in base if is_end(name, target)]
        lacking = [name for name in own if name not in there and name.rpartition(".")[0] not in unknown]
        if base and not lacking:
            continue
        if not base and (not owner or any(is_end(module, owner) for module, _ in adapted)):
            continue
        of = f" ({few(lacking, 3)})" if lacking and len(lacking) < len(own) else ""
        text = f"the config targets the parameter {target}, but there are no factors for it{of}"
        yield Lacking(text, state.would_be(lacking[0]) if lacking else None, True, "correct target_parameters")


def _unsaved(facts: AdapterFacts, saved: Sequence[str], config: Config, base: Mapping[str, Tensor]) -> Iterator[Lacking]:
    """Modules that were trained as a whole but are missing."""
    entries = _names(facts.config.get("modules_to_save"))
    owners, of_base = _owners(saved), _owners(base)
    heads = [entry for entry in OF_THE_TASK if _is_saved(entry, of_base)]
    some = any(_is_saved(entry, owners) for entry in entries if entry in OF_THE_TASK)
    may_tie = not config or ties_embeddings(config) or facts.config.get(TYING) is True
    tied = may_tie and any(_is_saved(entry, owners) for entry in MODULES)
    for entry in entries:
        if _is_saved(entry, owners) or (entry in MODULES and tied):
            continue
        if entry in OF_THE_TASK and (some or (heads and entry not in heads)):
            continue
        yield Lacking(f"the config says that {entry} was trained as a whole, but it is missing", None, True, "correct modules_to_save")


def _lacking_of_base(state: PeftState, modules: Sequence[str], weights: Sequence[str], *, sure: bool) -> Iterator[Lacking]:
    """Modules of the base without factors, where others of their kind have them and the config makes no difference between them."""
    there, kinds = set(modules), {_kind(module) for module in modules}
    lacking = [module for module in weights if _kind(module) in kinds and module not in there]
    if lacking:
        text = f"{len(lacking)} modules of the model have no factors, but others of their kind do: {few(lacking, 3)}"
        text = text if len(lacking) > 1 else f"a module of the model has no factors, but others of its kind do: {few(lacking)}"
        remedy = "name the modules that were trained in target_modules"
        yield Lacking(f"{text}{_layers_text(modules, lacking)}", state.would_be(lacking[0]), sure, remedy)


def _lacking_of_others(modules: Sequence[str], facts: AdapterFacts, config: Config) -> Iterator[Lacking]:
    """Layers in which one kind of module is adapted and a sibling is not, and last layers of the model without any."""
    if any(facts.config.get(key) for key in ("layers_to_transform", "layers_pattern")) or facts.config.get("layers_to_transform") == 0:
        return
    said = facts.config.get("target_modules")
    if isinstance(said, str) and said != "all-linear":
        return  # an expression may choose layers
    layers: dict[str, set[str]] = {}
    for module in modules:
        if NUMBER.search(module):
            layers.setdefault(_kind(module), set()).add(_number(module))
    for kind, own in layers.items():
        siblings = set().union(*(found for other, found in layers.items() if other.rpartition(".")[0] == kind.rpartition(".")[0]))
        others = [name for name in _names(said) if name.count(".") and NUMBER.search(f".{name}.")]
        if siblings - own and not others:
            text = f"{kind.rpartition('.')[2]} has factors in {_listed(own)}, modules beside it also in {_listed(siblings - own)}"
            yield Lacking(f"{text}: a part of the adapter may be missing", None, False)
    count = layer_count(config)
    numbers = {int(number) for found in layers.values() for number in found if number.isdigit()}
    if count is not None and numbers and max(numbers) < count - 1 and "layer_types" not in config:
        where, counted = _listed(map(str, numbers)), plural(count, "layer")
        text = f"there are factors in {where}, but the model has {counted}: a part of the adapter may be missing"
        yield Lacking(text, None, False)


def _is_beyond(module: str, count: int | None) -> bool:
    """Whether a module lies in a layer beyond the model's, which are others' business."""
    first = NUMBER.search(module)
    return count is not None and first is not None and int(first[0]) >= count


def _matrices(base: Mapping[str, Tensor]) -> Iterator[str]:
    """Modules whose weight could be adapted."""
    for name, tensor in base.items():
        if name.endswith(".weight") and len(tensor.shape) > 1:
            yield name.removesuffix(".weight")


def _layers_text(modules: Sequence[str], lacking: Sequence[str]) -> str:
    kinds = {_kind(module) for module in lacking}
    own, none = ({_number(module) for module in group if _kind(module) in kinds} for group in (modules, lacking))
    return f"; there are factors in {_listed(own)}, none in {_listed(none)}" if own - none and none - own else ""


def _kind(module: str) -> str:
    """The name with the numbers of layers and experts left open."""
    return NUMBER.sub("*", module)


def _number(module: str) -> str:
    found = NUMBER.search(module)
    return found[0] if found else module


def _listed(numbers: Iterable[str]) -> str:
    ordered = sorted(numbers, key=lambda number: (len(number), number))
    return f"{'layer' if len(ordered) == 1 else 'layers'} {few(ordered, 12)}"


def _names(said: Any) -> list[str]:
    return [name for name in said if isinstance(name, str) and name] if isinstance(said, list) else []


def _owners(names: Iterable[str]) -> set[str]:
    """The modules that tensors lie in, and those around them."""
    owners: set[str] = set()
    for name in names:
        parts = name.split(".")
        owners |= {".".join(parts[:count]) for count in range(1, len(parts))}
    return owners


def _is_saved(entry: str, owners: set[str]) -> bool:
    return any(owner.endswith(entry) for owner in owners)
