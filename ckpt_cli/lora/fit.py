"""LoRA in a component: the model with its adapters fused in, or the adapters alone. Values are only read of adapters for one tensor."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt_cli.dtypes import BY_CODE, Dtype
from ckpt_cli.errors import Inconsistent, Undecidable, Unsupported
from ckpt_cli.hub.classes.computed.coded_floats import coded_floats
from ckpt_cli.hub.classes.dtypes import what_codes
from ckpt_cli.hub.peft_names import Adapter, PeftState
from ckpt_cli.hub.tied_names import EMBEDDINGS, HEADS, SHARED, last_two
from ckpt_cli.lora.config import BY_EXPERT, CONFIG, LAYOUT, RANK_MAJOR, AdapterFacts
from ckpt_cli.lora.fused_source import Kept, Update, fused, matrix
from ckpt_cli.lora.on_base.adapted import EXPORT, adapted_name, candidates, expert_layout, only_adapted_name, parametrized_weight
from ckpt_cli.lora.on_base.turned import turned_modules
from ckpt_cli.lora.targets import Targets, is_end
from ckpt_cli.names import plural
from ckpt_cli.tensors.tensor import Tensor

if TYPE_CHECKING:
    from ckpt_cli.tensors.reading import Array


@dataclass(frozen=True, slots=True)
class Fused:
    """A model whose adapters are fused in; ``scales`` maps modules to the scale of their update.

    Of modules whose weights are one tensor: ``once`` are those whose update is that of another one, ``summed`` those with their own.
    """

    tensors: dict[str, Tensor]
    ranks: dict[str, int]
    scales: dict[str, float]
    dora: bool
    transposed: bool
    once: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()


def fuse_adapters(
    state: PeftState, facts: AdapterFacts, *, wide: bool, allow_overflow: bool = False, turned: Container[str] | None = None
) -> Fused:
    """The tensors of a model with every adapter in its weight; ``turned`` are the modules that `turned_modules` finds, if it was asked.

    ``wide``: they will be cast, so the sum is kept in float32 (or float64) until then; otherwise it has the dtype of the weight.
    Raises Undecidable for adapters without the weights that they are for, or without alpha; Inconsistent for factors that do not
    fit; Unsupported for weights that are no numbers.
    """
    tensors, kept = dict(state.tensors), Kept(allow_overflow=allow_overflow)
    owners = {name: tensor.alias_of or tensor.name for name, tensor in tensors.items()}
    shared: dict[str, list[str]] = {}
    for name, owner in owners.items():
        shared.setdefault(owner, []).append(name)
    updates: dict[str, list[Update]] = {}
    once: list[str] = []
    summed: list[str] = []
    differing: list[str] = []
    ranks: dict[str, int] = {}
    scales: dict[str, float] = {}
    transposed: set[bool] = set()
    places = {adapter.path: only_adapted_name(adapter, tensors) for adapter in state.adapters}
    if turned is None:
        turned = turned_modules({adapter.path: (adapter, tensors[places[adapter.path]]) for adapter in state.adapters}, facts)
    coded = coded_floats(tensors)
    for adapter in state.adapters:
        name = places[adapter.path]
        weight = tensors[name]
        what = what_codes(name, tensors, adapter.b.shape[0], math.prod(adapter.a.shape[1:]), coded)
        if what is not None:
            raise Unsupported(f"the base weight is {what}: LoRA cannot be fused into it", tensor=weight.name, hint=EXPORT)
        update = _update(adapter, name, weight, facts, is_turned=adapter.path in turned)
        transposed.add(update.layout.startswith("in x out"))
        ranks[adapter.path] = rank_of(adapter, update.groups)
        scales[adapter.path] = update.scale
        dtype = BY_CODE["F64"] if wide else weight.dtype
        others = updates.setdefault(owners[name], [])
        # Training had the update of tied modules that share their factors once in each, so once in their weight.
        again = any(_is_same(update, other) for other in others)
        if others and not again and any(each.magnitude is not None for each in (update, *others)):
            raise Unsupported(
                "two DoRA adapters change one tensor, each by its own magnitudes: no merged model is what was trained",
                tensor=name,
                hint="pass --lora export, and load it with PEFT without merging",
            )
        if others:
            (once if again else summed).append(name)
        if others and not any(_has_same_factors(update, other) for other in others):
            differing.append(name)
        for other in () if again else shared[owners[name]]:
            tensors[other] = fused(update, other, dtype, kept)
        others.append(update)
        if adapter.bias is not None:
            _add_bias(adapter, tensors, update.scale, dtype if wide else None, kept)
    dora = any(adapter.magnitude is not None for adapter in state.adapters)
    return Fused(tensors, ranks, scales, dora, transposed == {True}, tuple(once), tuple(summed), tuple(differing))


def _is_same(first: Update, second: Update) -> bool:
    """Whether two updates of one weight add the same: a head's factors are its embedding's, turned, where PEFT ties them."""
    if first.magnitude is not None or second.magnitude is not None or first.scale != second.scale:
        return False
    return _has_same_factors(first, second)


def _has_same_factors(first: Update, second: Update) -> bool:
    import numpy

    return all(numpy.array_equal(one(), other()) for one, other in ((first.left, second.left), (first.right, second.right)))


def rank_of(adapter: Adapter, groups: int = 1) -> int:
    """The rank r of an adapter, of each of its groups."""
    return adapter.a.shape[0] // groups if adapter.a.shape else 0


def expert_groups(adapter: Adapter, tensors: Mapping[str, Tensor]) -> int:
    """The number of experts that an adapter of fused experts is for, 1 for all others."""
    found = candidates(adapter, tensors)
    return tensors[found[0]].shape[0] if found and found[0] != f"{adapter.module}.weight" else 1


def adapter_rank(adapter: Adapter, tensors: Mapping[str, Tensor], facts: AdapterFacts) -> int:
    """The rank r of an adapter. Of fused experts without their weights, how many there are is told by the config's r alone."""
    rank = rank_of(adapter, expert_groups(adapter, tensors))
    if facts.rank is not None and is_of_experts(adapter, tensors, facts) and adapted_name(adapter, tensors) is None:
        return facts.rank if rank % facts.rank == 0 else rank
    return rank


def is_of_experts(adapter: Adapter, tensors: Mapping[str, Tensor], facts: AdapterFacts) -> bool:
    """Whether an adapter is for a parameter of fused experts: by its weight, or by what the config targets."""
    name = adapted_name(adapter, tensors)
    if name is not None:
        return name != f"{adapter.module}.weight"
    targets = Targets(facts.config) if facts.config.get("target_parameters") else None
    if targets is None or not targets.names_parameter(adapter.module, None):
        return False
    # A parameter without the name of its module may be one of any module, but not of one that is adapted itself.
    owned = any("." in target and is_end(adapter.module, target.rpartition(".")[0]) for target in targets.parameters)
    return owned or targets.leaves_out(adapter.module) == "target_modules"


def layout_doubt(state: PeftState, facts: AdapterFacts) -> str | None:
    """A warning about fused-expert adapters that Unsloth may have trained: the layout of lora_B, which shapes do not show."""
    doubtful = [adapter for adapter in state.adapters if is_of_experts(adapter, state.tensors, facts)]
    doubtful = [adapter for adapter in doubtful if facts.expert_layout(adapted_name(adapter, state.tensors)) is None]
    if not facts.names_unsloth or not doubtful:
        return None
    return (
        f"{plural(len(doubtful), 'adapter')} of fused experts, and a config that names Unsloth without {LAYOUT}: read as PEFT packs them "
        f"({RANK_MAJOR}); versions of Unsloth before September 2026 trained {BY_EXPERT}, in the same shapes"
    )


def pattern_key(adapter: Adapter, name: str | None, facts: AdapterFacts) -> str:
    """What patterns of the config are matched with: the module that PEFT knows, or of a targeted parameter (``name``) its name."""
    targets = facts.config.get("target_parameters")
    for target in targets if isinstance(targets, list) else ():
        if name is not None and isinstance(target, str) and (name == target or name.endswith(f".{target}")):
            return name
    return adapter.inner


def lacks_base(state: PeftState) -> bool:
    """Whether adapters were saved without the weights that they are for.

    With an adapted embedding or output head, PEFT saves a copy of its weight beside the factors (``save_embedding_layers="auto"``).
    """
    without = [
        adapter for adapter in state.adapters if not candidates(adapter, state.tensors) and not parametrized_weight(adapter, state.tensors)
    ]
    copies = {name for name in state.wrapped if last_two(name) in (*EMBEDDINGS, SHARED, *HEADS)}
    if len(without) == len(state.adapters):
        return bool(without)
    others = [name for name in state.tensors if name not in copies and name not in state.saved and not name.endswith(".bias")]
    # Trained modules have no mark in PEFT's files, but none of these holds a weight under its factors other than those copies.
    own = {name for adapter in state.adapters for name in candidates(adapter, state.tensors)}
    return not others or (not state.adapter_in_names and own <= copies)


def check_variant(state: PeftState, facts: AdapterFacts) -> None:
    """Raise Inconsistent if the config says another kind of LoRA than the files hold: PEFT would leave out what it does not expect."""
    plain = [adapter for adapter in state.adapters if not is_of_experts(adapter, state.tensors, facts)]
    linear = [adapter for adapter in plain if not adapter.embedding]
    for key, what, own, having in (
        ("use_dora", "magnitudes", plain, {adapter.path for adapter in plain if adapter.magnitude is not None}),
        ("lora_bias", "biases of lora_B", linear, {adapter.path for adapter in linear if adapter.bias is not None}),
    ):
        said = facts.config.get(key)
        lacking = [adapter for adapter in own if adapter.path not in having] if said is True else []
        wrong = lacking or [adapter for adapter in own if adapter.path in having and said is False]
        if wrong:
            raise Inconsistent(
                f"{CONFIG} says {key} {str(said).lower()}, but {f'there are no {what} here' if lacking else f'there are {what}'}",
                tensor=wrong[0].stored,
                hint="the adapter's files may be from two runs",
            )


def _update(adapter: Adapter, name: str, weight: Tensor, facts: AdapterFacts, *, is_turned: bool) -> Update:
    """What is added to a weight, after its shapes were proved to fit."""
    parts = (adapter.a, adapter.b, *([adapter.magnitude] if adapter.magnitude is not None else []))
    for tensor in (weight, *parts):
        if tensor.dtype.kind != "float":
            what = f"{tensor.dtype} weights are quantised: LoRA cannot be fused into them"
            raise Unsupported(what, tensor=tensor.name, hint=EXPORT)
    if name != f"{adapter.module}.weight":
        return _experts_update(adapter, name, weight, facts)
    rank = rank_of(adapter)
    out, inner = adapter.b.shape[0], math.prod(adapter.a.shape[1:])
    flat = math.prod(weight.shape[1:])
    fits = adapter.b.shape == (out, rank, *(1,) * (len(weight.shape) - 2)) and len(adapter.a.shape) == len(weight.shape) >= 2
    straight = fits and not adapter.embedding and (weight.shape[0], flat) == (out, inner)
    turned = fits and len(weight.shape) == 2 and weight.shape == (inner, out)
    if len(weight.shape) == 2 and straight and turned:
        straight, turned = not is_turned, is_turned
    if not straight and not turned:
        cut = cut_factor(adapter, weight)
        hint = "the adapters may belong to another model"
        if cut is not None:
            hint = f"{cut[1]}: it may have been cut, or be what one process held of it, if the adapters do not belong to another model"
        raise Inconsistent(
            f"factors {_shape(adapter.a)} and {_shape(adapter.b)} do not fit a weight {_shape(weight)}",
            tensor=cut[0].name if cut is not None else adapter.stored,
            expected="the factors of the same module (grouped convolutions are not supported)",
            hint=hint,
        )
    key = pattern_key(adapter, name, facts)
    facts.check_rank(key, rank)
    rows, columns = (out, inner) if straight else (inner, out)
    a, b = adapter.a, adapter.b
    return Update(
        weight,
        (a, b),
        (lambda: matrix(b, out, rank)) if straight else (lambda: _turned(a, rank, inner)),
        (lambda: matrix(a, rank, inner)) if straight else (lambda: _turned(b, out, rank)),
        facts.scale(key, rank),
        rows,
        columns,
        magnitude=_checked_magnitude(adapter, columns if turned else rows),
        by_column=turned,
        layout="in x out" if turned and not adapter.embedding else "out x in",
    )


def cut_factor(adapter: Adapter, weight: Tensor) -> tuple[Tensor, str] | None:
    """The factor that has a whole part of what its weight asks for where the other has all, and how much of it; None otherwise."""
    a, b = adapter.a.shape, adapter.b.shape
    if not len(a) == len(b) == len(weight.shape) == 2:
        return None
    sides = weight.shape if weight.shape[1] == a[1] or weight.shape[0] == b[0] else weight.shape[::-1]
    for factor, had, other, side, word in (
        (adapter.b, b[0], a[1] == sides[1], sides[0], "rows"),
        (adapter.a, a[1], b[0] == sides[0], sides[1], "columns"),
    ):
        if other and had < side and side % had == 0:
            return factor, f"the factor has {had} of {side} {word}"
    return None


def _experts_update(adapter: Adapter, name: str, weight: Tensor, facts: AdapterFacts) -> Update:
    """An adapter of fused experts: rank r of each, factors A [E r, in] and B [out, r E], where B's columns go over the experts first.

    The product is that of peft's ``ParamWrapper.get_delta_weight``: "o r e, e r i -> e o i", or "e i o" for weights stored that way. Where
    the config says that Unsloth packed B by expert, its columns go over the ranks first.
    """
    experts, rows, columns = weight.shape
    total = adapter.a.shape[0]
    rank = total // experts
    layout = expert_layout(adapter, weight)
    by_expert = facts.expert_layout(name) == BY_EXPERT
    if layout == "out x in" and rows == columns:
        raise Undecidable("these experts are square: nothing tells rows from columns", tensor=adapter.stored)
    if adapter.magnitude is not None:
        raise Unsupported("DoRA of fused experts is not supported", tensor=adapter.stored, hint="pass --lora export")
    key = pattern_key(adapter, name, facts)
    facts.check_rank(key, rank)
    a, b = adapter.a, adapter.b

    def of_b() -> Array:
        whole = matrix(b, b.shape[0], total)
        if by_expert:
            return whole.reshape(b.shape[0], experts, rank).transpose(1, 0, 2)
        return whole.reshape(b.shape[0], rank, experts).transpose(2, 0, 1)

    def of_a() -> Array:
        return matrix(a, total, a.shape[1]).reshape(experts, rank, a.shape[1])

    def left() -> Array:
        return (of_b() if layout == "out x in" else of_a().transpose(0, 2, 1)).reshape(experts * rows, rank)

    def right() -> Array:
        return (of_a() if layout == "out x in" else of_b().transpose(0, 2, 1)).reshape(experts * rank, columns)

    described = f"{layout}, columns by expert" if by_expert else layout or ""
    return Update(weight, (a, b), left, right, facts.scale(key, rank), rows, columns, groups=experts, layout=described)


def _checked_magnitude(adapter: Adapter, length: int) -> Tensor | None:
    magnitude = adapter.magnitude
    if magnitude is not None and magnitude.numel != length:
        raise Inconsistent(f"there are {magnitude.numel} magnitudes, but the module has {length} outputs", tensor=magnitude.name)
    return magnitude


def _add_bias(adapter: Adapter, tensors: dict[str, Tensor], scale: float, dtype: Dtype | None, kept: Kept) -> None:
    """``lora_bias``: the bias of B, scaled, goes into the bias of the module."""
    name, added = f"{adapter.module}.bias", adapter.bias
    if added is None:
        return
    if name not in tensors or tensors[name].shape != added.shape:
        raise Inconsistent("the adapter has a bias, but its module has no matching one", tensor=added.name)
    bias = tensors[name]
    update = Update(bias, (added,), lambda: matrix(added, added.numel, 1), _one, scale, bias.numel, 1, layout="bias")
    tensors[name] = fused(update, name, dtype or bias.dtype, kept)


def _turned(tensor: Tensor, rows: int, columns: int) -> Array:
    import numpy

    return numpy.ascontiguousarray(matrix(tensor, rows, columns).T)


def _one() -> Array:
    import numpy

    return numpy.ones((1, 1))


def _shape(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"


def on_base(state: PeftState, tensors: Mapping[str, Tensor]) -> PeftState:
    """The adapters of ``state`` on the weights of another model; tensors that were trained as a whole replace those of the model."""
    return replace(state, tensors={**tensors, **state.tensors})
