"""Averages of a model's weights that trainers keep: their places, names and tensors.

=================================  ======================================================================================
who                                where the average is
=================================  ======================================================================================
DiT, SiT, diffusion trainers       ``ema``
torchvision, k-diffusion           ``model_ema``: a state dict, or one of torch's ``AveragedModel``
timm                               ``state_dict_ema``
RT-DETR, YOLO-like                 ``ema``: a dict with ``module`` and ``updates``
ema-pytorch                        ``ema``: ``ema_model.*`` beside ``online_model.*``
Lightning callbacks                ``callbacks``: a dict per callback, with one of these keys
Lightning 2.6, WeightAveraging     ``state_dict`` itself; the weights of the training are ``current_model_state``
mmengine, EMAHook                  ``state_dict`` itself; the weights of the training are ``ema_state_dict``
latent diffusion, LitEma           in the state dict itself: ``model_ema.*``, names without dots
stable-audio-tools                 in the state dict itself: ``diffusion_ema.ema_model.*``, of the part ``diffusion.model.*``
fairseq                            ``extra_state``: ``ema``
Boltz                              ``ema``: a dict with ``cur_step`` and ``ema_weights``; the same in ``callbacks``
Self-Forcing, CausVid              ``generator_ema`` beside ``generator`` and ``critic``
=================================  ======================================================================================
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_cli.errors import Inconsistent
from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.formats.torch_files.average_states import AVERAGED, BEGUN, COUNTER, COUNTERS, AverageState, state_of
from ckpt_cli.formats.torch_files.matrices import is_optimizer, is_single, is_tensor
from ckpt_cli.formats.torch_files.state_dict import holds_storage
from ckpt_cli.formats.training_state_names import is_state_key
from ckpt_cli.names import DDP, stripped_names

MODEL_KEYS = ("state_dict", "model", "module", "model_state_dict", "model_state")
"""Keys of a model in a trainer's file; the last one is that of JoeyNMT."""

EMA_KEYS = ("ema", "ema_model", "model_ema", "ema_state_dict", "state_dict_ema")
"""Keys tried first; other keys that name an EMA follow in the order of the file."""

AVERAGE = re.compile(
    r"(\w+_)?ema(_[\w.]+|[0-9.]+)?|(\w+_)?swa(_\w+)?|(model_)?(avg|averaged?)(_model|_weights)?(_state(_dict)?)?", re.IGNORECASE
)
PARTS = re.compile(r"([^.]+)\.")
NUMBERED = re.compile(r"(?:^|\.)\d+\.")
CALLED = re.compile(r"^(?:ema|swa|avg|averaged?)_|_(?:ema|swa|avg|averaged?)$", re.IGNORECASE)
"""What an average is called besides the name of the part that it is one of."""

INSIDE = (*MODEL_KEYS, "ema_model", "shadow", "params", "ema", "state")
"""Keys of an average's own dict below which its tensors are; ``state`` is that of dora, if it is not an optimizer's."""

TELLING = (COUNTER, BEGUN, "num_updates", "updates", "swa_n")
"""What is 0, or False, until an average begins: a tensor, or a plain number beside it. ``num_updates`` is that of LitEma and torch_ema,
``updates`` of YOLO-like trainers, ``swa_n`` of the authors of SWA."""

NAMELESS = ("shadow_params", "ema_weights", "ema_parameters", "collected_params")
"""Keys of lists of tensors in an average's own dict; what some (Boltz) have there by name is read."""

LEARNED = ("weight", "bias")
"""How modules call what they learn; buffers and counters have names of all kinds."""

MAX_DEPTH = 4
MAX_STARTS = 16
"""Beginnings of names that are tried as the prefix of the model beside its average."""


def is_average_name(name: object) -> bool:
    """Whether a key or the name of a component is one of an average.

    >>> is_average_name("model_ema"), is_average_name("schema")
    (True, False)
    """
    return isinstance(name, str) and AVERAGE.fullmatch(name) is not None


def is_average(key: object, node: Any) -> bool:
    """Whether a node is an average by its key: a parameter, or something without tensors, may have such a key too."""
    return is_average_name(key) and not is_state_key(key) and not is_tensor(node) and holds_storage(node)


def named_tensors(node: Any) -> tuple[Mapping[Any, Any] | None, dict[Any, Any]]:
    """The named tensors of an average, and what is beside them; None if there are no names."""
    around: dict[Any, Any] = {}
    for _ in range(MAX_DEPTH):
        entries = as_dict(node)
        if entries is None:
            return None, {}
        if is_optimizer(entries):
            return entries, around
        inner = next((key for key in (*INSIDE, *NAMELESS) if as_dict(entries.get(key)) is not None), None)
        if inner is None:
            return (None if any(isinstance(entries.get(key), (list, tuple)) for key in NAMELESS) else entries), around
        around |= {key: value for key, value in entries.items() if key != inner}
        node = entries[inner]
    return None, {}


def averaged_alone(entries: Mapping[Any, Any]) -> dict[Any, Any]:
    """The averaged tensors of a dict that is an average: without counters, and without the model of the training."""
    state = state_of(entries)
    if state is not None:
        return dict(state.average)
    # A parameter may be called decay.
    return {key: node for key, node in entries.items() if key not in COUNTERS or (is_tensor(node) and not is_single(node))}


@dataclass(frozen=True, slots=True)
class Split:
    """Averages in the state dict of a model, each under one of the ``prefixes``: the ``model``, and the ``average`` under its names.

    Averages of several parts of the model (``unet_ema`` and ``text_encoder_ema``) are one; another one of the same part stays in the model.
    ``counters`` are numbers of an average about itself, ``trained`` the model that its state has beside it: they are in neither.
    ``alone`` are tensors of the model without a partner, where nothing but names shows that it is an average: a class may have a module
    and its twin. The model then has all tensors.
    """

    prefixes: tuple[str, ...]
    model: dict[Any, Any]
    average: dict[Any, Any]
    alone: tuple[str, ...] = ()
    counters: Mapping[str, Any] = field(default_factory=dict)
    trained: Mapping[str, Any] = field(default_factory=dict)


def split_average(entries: Mapping[Any, Any]) -> Split | None:
    """The average in the state dict of a model. Names are compared without the parts of wrappers, which often only the model has.

    Only if every tensor of the average has a partner in the model; LitEma leaves the dots out of its names, and buffers out of its tensors.
    """
    bare = _bare_names([name for name in entries if isinstance(name, str)])
    whole = state_of({short: name for name, short in bare.items()})
    if whole is not None:
        return _split_pair(whole, entries)
    prefixes = tuple(itertools.islice(_prefixes(bare.values()), MAX_STARTS))
    averages: dict[str, AverageState] = {}
    for prefix in prefixes:
        if prefix.startswith(tuple(averages)):
            continue
        inside = {short.removeprefix(prefix): name for name, short in bare.items() if short.startswith(prefix)}
        # One average is none of another, unless what is called like one is a part of the model.
        for others in (prefixes, (prefix,)):
            state = _average_of(prefix, inside, {short: name for name, short in bare.items() if not short.startswith(others)})
            if state is not None:
                averages[prefix] = state
                break
    return _joined(averages, bare, entries) if averages else None


def _joined(averages: Mapping[str, AverageState], bare: Mapping[str, str], entries: Mapping[Any, Any]) -> Split:
    """The first average, and those of other parts of the model; the model is what is left."""
    joined: dict[str, AverageState] = {}
    average: dict[str, str] = {}
    for prefix, state in averages.items():
        if state.average.keys().isdisjoint(average):
            joined[prefix] = state
            average |= state.average
    counters, trained = dict[str, Any](), dict[str, Any]()
    for state in reversed(joined.values()):
        counters |= {short: entries[name] for short, name in state.counters.items()}
        trained |= {short: entries[name] for short, name in state.trained.items()}
    beside = [name for name, short in bare.items() if not short.startswith(tuple(averages))]
    alone = [name for name in beside if name not in average and bare[name].rpartition(".")[2] in LEARNED]
    values = {name: entries[averaged] for name, averaged in average.items()}
    if alone and not counters and not trained:
        return Split(tuple(joined), dict(entries), values, tuple(alone))
    taken = {name for name, short in bare.items() if short.startswith(tuple(joined))}
    return Split(tuple(joined), {name: node for name, node in entries.items() if name not in taken}, values, (), counters, trained)


def _prefixes(names: Iterable[str]) -> list[str]:
    """Beginnings of names that end with what an average is called, the shortest first; one with a number is that of one layer of many."""
    names = list(names)
    called = {part for part in {part for name in names for part in name.split(".")[:-1]} if AVERAGE.fullmatch(part)}
    found = dict.fromkeys(
        name[: part.end()]
        for name in (names if called else ())
        for part in PARTS.finditer(name)
        if part[1] in called and not NUMBERED.search(name[: part.start()])
    )
    return sorted(found, key=lambda prefix: prefix.count("."))


def _split_pair(state: AverageState, entries: Mapping[Any, Any]) -> Split | None:
    """The two models of ema-pytorch's state; None if it holds the average alone, or one that is not of the model beside it."""
    if not state.trained or not state.average.keys() <= state.trained.keys():
        return None
    parts = (state.trained, state.average, state.counters)
    model, average, counters = ({short: entries[name] for short, name in part.items()} for part in parts)
    return Split((AVERAGED,), model, average, counters=counters)


def _average_of(prefix: str, inside: Mapping[str, str], others: Mapping[str, str]) -> AverageState | None:
    """What lies ``inside`` of a prefix as an average of the ``others``, by their names, None if it is none. Both map names to full ones."""
    state = state_of(inside)
    if state is None:
        counters = {short: name for short, name in inside.items() if short in COUNTERS}
        state = AverageState({short: name for short, name in inside.items() if short not in COUNTERS}, counters=counters)
    average = state.average
    partners = _partners(list(average), list(others), prefix)
    for wrapper in (DDP, AVERAGED):
        if partners is None and all(short.startswith(wrapper) for short in average):
            average = {short.removeprefix(wrapper): name for short, name in average.items()}
            partners = _partners(list(average), list(others), prefix)
    if partners is None:
        return None
    return AverageState({others[partners[short]]: name for short, name in average.items()}, state.trained, state.counters)


def named_as(average: Mapping[Any, Any], model: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """An average under the names of the model beside it, where it leaves the dots out of them (LitEma); any other as it is."""
    names = [name for name in average if name not in COUNTERS]
    if not all(isinstance(name, str) and "." not in name for name in names) or not names:
        return average
    others = {short: name for name, short in _bare_names([name for name in model if isinstance(name, str)]).items()}
    partners = _partners(names, list(others))
    return average if partners is None else {others[partners[name]] if name in partners else name: node for name, node in average.items()}


def _bare_names(names: list[str]) -> dict[str, str]:
    """Names without the parts of wrappers; as they are where two would become one, which is refused elsewhere."""
    try:
        return stripped_names(names)
    except Inconsistent:
        return {name: name for name in names}


def _partners(shorts: list[str], others: list[str], prefix: str = "") -> dict[str, str] | None:
    """The model's name for each name of an average, None unless all have one of their own.

    The average may be one of a part of the model, at any depth: the start of that part is what its names leave out. Of several parts with
    these names, that after which the average under ``prefix`` is called (``net_ema`` after ``net``).
    """
    if not shorts:
        return None
    there, probe = frozenset(others), max(shorts, key=len)
    for start in _likely(((name[: -len(probe)], probe) for name in others if name.endswith(probe)), prefix):
        if all(start + short in there for short in shorts):
            return {short: start + short for short in shorts}
    if any("." in short for short in shorts):
        return None
    for start in _likely(_without_dots(probe, others), prefix):
        inside = [name for name in others if name.startswith(start)]
        known = {name.removeprefix(start).replace(".", ""): name for name in inside}
        if len(known) == len(inside) and all(short in known for short in shorts):
            return {short: known[short] for short in shorts}
    return None


def _without_dots(short: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """What names have before a part of them that is a name of an average, written without its dots; and this part."""
    for name in names:
        if name.replace(".", "").endswith(short):
            cuts = (0, *(dot.end() for dot in re.finditer(r"\.", name)))
            yield from ((name[:cut], name[cut:]) for cut in cuts if name[cut:].replace(".", "") == short)


def _likely(starts: Iterable[tuple[str, str]], prefix: str) -> list[str]:
    """The starts of parts of a model, each with the rest of a name, those after which the average is called and the shortest first.

    A rest of one word, ``weight``, is in any module: deep in a model it is no sign of an average.
    """
    found = {start for start, rest in starts if (start.count(".") < 2 or "." in rest) and (start.endswith(".") or not start)}
    own = prefix.split(".")[:-1]
    likely = [start for start in found if not NUMBERED.search(start)]
    return sorted(likely, key=lambda start: (not _is_called_after(own, start), start.count("."), start))[:MAX_STARTS]


def _is_called_after(average: Sequence[str], start: str) -> bool:
    """Whether an average, by the parts of its prefix, is called after the part of a model with this ``start``."""
    *above, last = average or [""]
    parts = start.split(".")[:-1]
    stem = CALLED.sub("", last)
    return bool(stem) and parts[: len(above) + 1] == [*above, stem]


def telling(entries: Mapping[Any, Any]) -> dict[str, Any]:
    """Those of the entries of an average, or of what is beside it, that tell whether it has begun."""
    return {name: entries[name] for name in TELLING if is_tensor(entries.get(name)) or isinstance(entries.get(name), int)}
