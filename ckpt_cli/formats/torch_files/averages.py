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
fairseq                            ``extra_state``: ``ema``
Boltz                              ``ema``: a dict with ``cur_step`` and ``ema_weights``; the same in ``callbacks``
Self-Forcing, CausVid              ``generator_ema`` beside ``generator`` and ``critic``
=================================  ======================================================================================
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_cli.errors import Inconsistent
from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.formats.torch_files.average_states import AVERAGED, BEGUN, COUNTER, COUNTERS, AverageState, common_start, state_of
from ckpt_cli.formats.torch_files.matrices import is_optimizer, is_single, is_tensor
from ckpt_cli.formats.torch_files.state_dict import holds_storage
from ckpt_cli.formats.training_state_names import is_state_key
from ckpt_cli.names import DDP, stripped_names

MODEL_KEYS = ("state_dict", "model", "module", "model_state_dict")
EMA_KEYS = ("ema", "ema_model", "model_ema", "ema_state_dict", "state_dict_ema")
"""Keys tried first; other keys that name an EMA follow in the order of the file."""

AVERAGE = re.compile(
    r"(\w+_)?ema(_[\w.]+|[0-9.]+)?|(\w+_)?swa(_\w+)?|(model_)?(avg|averaged?)(_model|_weights)?(_state(_dict)?)?", re.IGNORECASE
)
INSIDE = (*MODEL_KEYS, "ema_model", "shadow", "params", "ema", "state")
"""Keys of an average's own dict below which its tensors are; ``state`` is that of dora, if it is not an optimizer's."""

TELLING = (COUNTER, BEGUN, "num_updates")
"""What is 0, or False, until an average begins; the last one is that of LitEma."""

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
    """An average in the state dict of a model, under a ``prefix``: the ``model``, and the ``average`` under the model's names.

    ``counters`` are numbers of the average about itself, ``trained`` the model that its state has beside it: they are in neither.
    ``alone`` are tensors of the model without a partner, where nothing but names shows that it is an average: a class may have a module
    and its twin. The model then has all tensors.
    """

    prefix: str
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
    for start in dict.fromkeys(("", common_start(bare.values()))):
        below = {name: short.removeprefix(start) for name, short in bare.items()}
        firsts = dict.fromkeys(name.partition(".")[0] for name in below.values() if "." in name)
        for first in itertools.islice((first for first in firsts if AVERAGE.fullmatch(first)), MAX_STARTS):
            inside = {short.removeprefix(f"{first}."): name for name, short in below.items() if short.startswith(f"{first}.")}
            others = {short: name for name, short in below.items() if not short.startswith(f"{first}.")}
            split = _split_below(f"{start}{first}.", inside, others, entries)
            if split is not None:
                return split
    return None


def _split_pair(state: AverageState, entries: Mapping[Any, Any]) -> Split | None:
    """The two models of ema-pytorch's state; None if it holds the average alone, or one that is not of the model beside it."""
    if not state.trained or not state.average.keys() <= state.trained.keys():
        return None
    parts = (state.trained, state.average, state.counters)
    model, average, counters = ({short: entries[name] for short, name in part.items()} for part in parts)
    return Split(AVERAGED, model, average, counters=counters)


def _split_below(prefix: str, inside: Mapping[str, str], others: Mapping[str, str], entries: Mapping[Any, Any]) -> Split | None:
    """What lies under a prefix as an average of the ``others``, which are names by what is left of them; None if it is none."""
    state = state_of(inside)
    if state is None:
        counters = {short: name for short, name in inside.items() if short in COUNTERS}
        state = AverageState({short: name for short, name in inside.items() if short not in COUNTERS}, counters=counters)
    average = state.average
    partners = _partners(list(average), list(others)) if average else None
    if partners is None and all(short.startswith(DDP) for short in average):
        average = {short.removeprefix(DDP): name for short, name in average.items()}
        partners = _partners(list(average), list(others)) if average else None
    if partners is None:
        return None
    averaged = {others[partners[short]]: entries[name] for short, name in average.items()}
    counters, trained = ({short: entries[name] for short, name in part.items()} for part in (state.counters, state.trained))
    paired = {*partners.values()}
    alone = [name for short, name in others.items() if short not in paired and short.rpartition(".")[2] in LEARNED]
    if alone and not counters and not trained:
        return Split(prefix, dict(entries), averaged, tuple(alone))
    taken = set(inside.values())
    return Split(prefix, {name: node for name, node in entries.items() if name not in taken}, averaged, counters=counters, trained=trained)


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


def _partners(shorts: list[str], others: list[str]) -> dict[str, str] | None:
    """The model's name for each name of an average, None unless all have one of their own."""
    for written in (str, lambda name: name.replace(".", "")):
        starts = dict.fromkeys(f"{name.split('.')[0]}." for name in others)
        for start in ("", *itertools.islice(starts, MAX_STARTS)):
            known = {written(name.removeprefix(start)): name for name in others if name.startswith(start)}
            if len(known) == sum(name.startswith(start) for name in others) and all(short in known for short in shorts):
                return {short: known[short] for short in shorts}
    return None


def telling(entries: Mapping[Any, Any]) -> dict[str, Any]:
    """Those of the entries of an average that tell whether it has begun."""
    return {name: entries[name] for name in TELLING if is_tensor(entries.get(name))}
