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
=================================  ======================================================================================
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_cli.errors import Inconsistent
from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.formats.torch_files.matrices import is_tensor
from ckpt_cli.formats.torch_files.state_dict import holds_storage
from ckpt_cli.formats.training_state_names import is_state_key
from ckpt_cli.names import stripped_names

MODEL_KEYS = ("state_dict", "model", "module", "model_state_dict")
EMA_KEYS = ("ema", "ema_model", "model_ema", "ema_state_dict", "state_dict_ema")
"""Keys tried first; other keys that name an EMA follow in the order of the file."""

AVERAGE = re.compile(
    r"(\w+_)?ema(_[\w.]+|[0-9.]+)?|(\w+_)?swa(_\w+)?|(model_)?(avg|averaged?)(_model|_weights)?(_state(_dict)?)?", re.IGNORECASE
)
INSIDE = (*MODEL_KEYS, "ema_model", "shadow", "params", "ema")
"""Keys of an average's own dict below which its tensors are."""

COUNTERS = frozenset({"n_averaged", "num_updates", "updates", "steps", "step", "initted", "decay", "optimization_step"})
"""Numbers that an average keeps about itself."""

COUNTER = "n_averaged"
"""That of torch's ``AveragedModel``: how many updates the average had."""

TELLING = (COUNTER, "initted")
"""What is 0, or False, until an average begins; the second one is that of ema-pytorch."""

NAMELESS = ("shadow_params", "ema_weights", "collected_params")
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
        inner = next((key for key in INSIDE if as_dict(entries.get(key)) is not None), None)
        if inner is None:
            return (None if any(isinstance(entries.get(key), (list, tuple)) for key in NAMELESS) else entries), around
        around |= {key: value for key, value in entries.items() if key != inner}
        node = entries[inner]
    return None, {}


def averaged_alone(entries: Mapping[Any, Any]) -> dict[Any, Any]:
    """The averaged tensors alone: without counters, and of ema-pytorch's pair of models the averaged one."""
    held = {key: node for key, node in entries.items() if key not in COUNTERS}
    pair = {key.removeprefix("ema_model."): node for key, node in held.items() if isinstance(key, str) and key.startswith("ema_model.")}
    return pair if pair and any(isinstance(key, str) and key.startswith("online_model.") for key in held) else held


@dataclass(frozen=True, slots=True)
class Split:
    """An average in the state dict of a model, under a ``prefix``: the ``model``, and the ``average`` under the model's names.

    ``alone`` are tensors of the model without a partner, where nothing but names shows that it is an average: a class may have a module
    and its twin. The model then has all tensors.
    """

    prefix: str
    model: dict[Any, Any]
    average: dict[Any, Any]
    alone: tuple[str, ...] = ()


def split_average(entries: Mapping[Any, Any]) -> Split | None:
    """The average in the state dict of a model. Names are compared without the parts of wrappers, which often only the model has.

    Only if every tensor of the average has a partner in the model; LitEma leaves the dots out of its names, and buffers out of its tensors.
    """
    bare = _bare_names([name for name in entries if isinstance(name, str)])
    firsts = dict.fromkeys(name.partition(".")[0] for name in bare.values() if "." in name)
    averages = list(itertools.islice((first for first in firsts if AVERAGE.fullmatch(first)), MAX_STARTS))
    for prefix in (f"{first}.{module}" for first in averages for module in ("", "module.")):
        inside = {name: short.removeprefix(prefix) for name, short in bare.items() if short.startswith(prefix)}
        averaged = {name: short for name, short in inside.items() if short not in COUNTERS}
        others = {short: name for name, short in bare.items() if name not in inside}
        partners = _partners(list(averaged.values()), list(others)) if averaged else None
        if partners is not None:
            average = {others[partners[short]]: entries[name] for name, short in averaged.items()}
            paired = {*partners.values()}
            alone = [name for short, name in others.items() if short not in paired and short.rpartition(".")[2] in LEARNED]
            if alone and len(averaged) == len(inside):
                return Split(prefix, dict(entries), average, tuple(alone))
            return Split(prefix, {name: node for name, node in entries.items() if name not in inside}, average)
    return None


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


def is_averaged_model(entries: Mapping[Any, Any]) -> bool:
    """Whether this is the state dict of torch's ``AveragedModel``: a counter, and the model under ``module``."""
    return COUNTER in entries and all(isinstance(key, str) and key.startswith("module.") for key in entries if key != COUNTER)
