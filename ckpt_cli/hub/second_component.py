"""A second component of a checkpoint, compared with the model beside it: the only comparison where no class is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ckpt_cli.boxes import shape_text
from ckpt_cli.errors import CkptError, Undecidable
from ckpt_cli.hub.classes.tying import ties_embeddings
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.peft_names import BASE, has_adapters
from ckpt_cli.hub.tied_names import tied_pair
from ckpt_cli.hub.ties import Live
from ckpt_cli.name_patterns import grouped, pattern_of
from ckpt_cli.names import few, stripped_names
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import same_samples
from ckpt_cli.tensors.reading import element_bytes
from ckpt_cli.tensors.tensor import Tensor

STATISTICS = ("running_mean", "running_var")
"""Buffers of torch's norms that follow the activations of a training, beside ``num_batches_tracked``, which is an integer."""

MEAN, VARIANCE = STATISTICS
TRACKED = "num_batches_tracked"
RECOMPUTED = "recompute them with a pass over training data (torch.optim.swa_utils.update_bn)"
PROBED = 8
"""Of so many tensors samples are compared with those of the model beside an average."""


def model_of_average(name: str, mine: Mapping[str, Tensor], models: Mapping[str, Live]) -> Live | None:
    """The first of the models beside an average, by name, that it can be of; None if there is none.

    Raises Undecidable if all can be read and it is of none of them.
    """
    refused: Undecidable | None = None
    unread: Live | None = None
    for model, live in models.items():
        if (tensors := live()) is None:
            unread = unread or live
            continue
        try:
            check_average(name, mine, model, tensors)
        except Undecidable as error:
            refused = refused or error
            continue
        return live
    if refused is not None and unread is None:
        raise refused
    return unread


def check_average(name: str, mine: Mapping[str, Tensor], model_name: str, model: Mapping[str, Tensor]) -> None:
    """Raise Undecidable unless an average can be one of the model: whole tensors under its names, or those of a module of it.

    Trainers put into a file whatever a rank holds: slices of tensor parallelism, flat shards of ZeRO-3, the layers of one pipeline stage
    by local numbers. Nothing in the file says how these are put together.
    """
    own, others, modules = _aligned(mine, model)
    common = [each for each in own if each in others]
    hint = f"save the average whole, gathered from all ranks and with the model's names; --type {model_name} reads the model itself"
    if not common and len(own) > len(others):
        return  # more than the model has is no part of it, so that this is not what it is the average of
    if not common:
        raise Undecidable(
            f"no tensor of {name} has a name of {model_name}, the model beside it",
            tensor=next(iter(mine)),
            expected=f"names as in {model_name}: {few(list(model), 3)}",
            hint=hint,
        )
    if len(modules) > len({pattern_of(f".{start}")[0] for start in modules}):
        fitting = few([start.rstrip(".") for start in modules], 3)
        raise Undecidable(
            f"nothing says which layer of {model_name} {name} is of: the names fit several",
            tensor=own[common[0]].name,
            expected=f"names with the layer; these would fit {fitting}",
            hint=hint,
        )
    reshaped = [
        each for each in common if own[each].dtype.kind == others[each].dtype.kind == "float" and own[each].shape != others[each].shape
    ]
    if reshaped:
        shapes = [f"{own[each].name}: {shape_text(own[each].shape)}, in {model_name} {shape_text(others[each].shape)}" for each in reshaped]
        raise Undecidable(
            f"{name} does not hold whole tensors of {model_name}, the model beside it: {len(reshaped)} of {len(common)} have another shape",
            tensor=own[reshaped[0]].name,
            expected=f"the shape {shape_text(others[reshaped[0]].shape)}, not {shape_text(own[reshaped[0]].shape)}",
            details=shapes if len(shapes) > 1 else [],
            hint=hint,
        )


def lacking_of_model(mine: Mapping[str, Tensor], model: Mapping[str, Tensor], config: Config, *, average: bool) -> tuple[str, ...]:
    """Names (without wrappers) of floating tensors that the model has and a second component has not, in the order of the model.

    An ``average`` is of one model, so that it has all of its tensors. Another component may be a model of its own, with another head:
    of that, only what it has elsewhere (the same module of another layer) counts, and only if it has the shapes of the model. Empty if
    fewer than half of the names are alike, as then the two cannot be compared. An average of adapters alone lacks no weights under them.
    """
    own, others, _ = _aligned(mine, model)
    common = own.keys() & others.keys()
    if 2 * len(common) < len(own):
        return ()
    if not average and any(own[name].shape != others[name].shape for name in common):
        return ()
    stored = {others[name].alias_of or others[name].name for name in common}
    pair = tied_pair(list(others)) if ties_embeddings(config) else None
    partners = {pair[0]: pair[1], pair[1]: pair[0]} if pair is not None else {}
    kinds = {pattern_of(name)[0] for name in own}
    factors_alone = average and has_adapters(own) and not any(map(_is_of_base, own)) and any(map(_is_of_base, others))
    return tuple(
        name
        for name, tensor in others.items()
        if name not in own
        and tensor.dtype.kind == "float"
        and (tensor.alias_of or tensor.name) not in stored
        and partners.get(name) not in own
        and (average or pattern_of(name)[0] in kinds)
        and (not factors_alone or (has_adapters({name: tensor}) and not _is_of_base(name)))
    )


def _is_of_base(name: str) -> bool:
    """Whether PEFT calls a tensor so that it keeps beside adapters, and does not train."""
    return BASE in name.split(".")


def lacking_notes(component: str, lacking: Sequence[str], total: int) -> list[Note]:
    """A warning about tensors that a second component lacks, of the ``total`` that the model beside it has."""
    if not lacking:
        return []
    text = f"{component} lacks {len(lacking)} of the {total} tensors of the model beside it: {few(grouped(lacking))}"
    return [Note("warning", "lacks-tensors", text)]


def statistics_notes(component: str, mine: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> list[Note]:
    """A warning if running statistics of activations in an average are not its own.

    They may be those of the model beside it, which has other weights, by samples of some tensors. Or they are those that norms are made
    with, while the model's have counted batches: Lightning's ``StochasticWeightAveraging`` averages parameters alone. A counter of 0 is no
    sign of that, as an average of counters is rounded down. Norms that never counted a batch (frozen ones have no counter) keep what they
    were made with.
    """
    own, others, _ = _aligned(mine, model)
    common = [name for name in own if name in others and own[name].dtype.kind == "float"]
    weights = [name for name in common if _leaf(name) not in STATISTICS]
    try:
        statistics = [name for name in common if _leaf(name) in STATISTICS and _has_counted(name, own) and _has_counted(name, others)]
        made = [name for name in common if _leaf(name) == MEAN and _is_as_made(name, own) and _has_counted(name, others)]
        alike = [all(same_samples(own[name], others[name]) for name in _some(names)) for names in (statistics, weights)]
    except CkptError:
        return []  # what cannot be read is refused when it is written
    if made:
        text = f"{few(made, 4)}: statistics of activations in {component} are those that norms begin with, not those of its weights"
        return [Note("warning", "batch-statistics", f"{text}; {RECOMPUTED}")]
    if not statistics or alike != [True, False]:
        return []
    text = f"{few(statistics, 4)}: statistics of activations in {component} are those of the model beside it"
    text += ", whose weights are others, and not those of the average (unless these norms were frozen)"
    return [Note("warning", "batch-statistics", f"{text}; {RECOMPUTED}")]


def _is_as_made(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the mean of a norm that counted no batch is zero everywhere."""
    return not _has_counted(name, tensors) and not any(element_bytes(tensors[name]))


def _has_counted(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the norm of a statistic has seen a batch since it was made."""
    counter = tensors.get(f"{name.removesuffix(_leaf(name))}{TRACKED}")
    return counter is not None and any(element_bytes(counter))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _some(names: Sequence[str]) -> Sequence[str]:
    """A few of some names, from all over."""
    return names[:: -(-len(names) // PROBED)] if names else names


def _aligned(mine: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """The tensors of both under the names by which most are alike, and the modules of the model that fit if it is one of these.

    An average may be of a module that holds the model, of one module of it, or leave the dots out of its names (LitEma).
    """
    own, others = _named(mine), _named(model)
    if 2 * len(own.keys() & others.keys()) >= len(own):
        return own, others, []
    starts = _modules(own, others)
    ways = [
        (own, others, []),
        (_without_prefix(own), _without_prefix(others), []),
        *((own, {other.removeprefix(start): others[other] for other in others if other.startswith(start)}, starts) for start in starts[:1]),
        (own, {other.replace(".", ""): tensor for other, tensor in others.items()}, []),
    ]
    return max(ways, key=lambda way: len(way[0].keys() & way[1].keys()))


def _modules(own: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[str]:
    """The beginnings of names, each with its dot, after which most names (and shapes) are those of ``own``: several if they fit alike."""
    alike, shaped = Counter[str](), Counter[str]()
    for other, tensor in others.items():
        for place in [place for place, char in enumerate(other, 1) if char == "."]:
            if (same := own.get(other[place:])) is not None:
                alike[other[:place]] += 1
                shaped[other[:place]] += same.shape == tensor.shape
    best = max(((alike[start], shaped[start]) for start in alike), default=None)
    return [start for start in alike if (alike[start], shaped[start]) == best]


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {new: tensors[old] for old, new in stripped_names(tensors).items()}


def _without_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the part, ending in a dot, with which all names begin: a module that holds the model (``model.``, ``module.``)."""
    named = dict(tensors)
    while len(starts := {name.partition(".")[0] for name in named}) == 1 and all("." in name for name in named):
        start = f"{starts.pop()}."
        named = {name.removeprefix(start): tensor for name, tensor in named.items()}
    return named
