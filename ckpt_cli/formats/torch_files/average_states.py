"""What the state of a library that keeps an average holds: averaged weights, those of the training, and numbers about itself.

===========================  ==============================================================================================
library                      its state dict
===========================  ==============================================================================================
torch's ``AveragedModel``    ``module.*`` and ``n_averaged``
ema-pytorch                  ``ema_model.*``, ``initted`` and ``step``; ``online_model.*`` unless the model is kept elsewhere
===========================  ==============================================================================================

Both are modules, so that their state may also lie under a prefix, of a wrapper or of the module that has the average as a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_cli.names import DDP

COUNTERS = frozenset({"n_averaged", "num_updates", "updates", "steps", "step", "initted", "decay", "optimization_step"})
"""Numbers that an average keeps about itself."""

COUNTER = "n_averaged"
"""That of torch's ``AveragedModel``: how many updates the average had."""

BEGUN = "initted"
"""Whether ema-pytorch's average has begun."""

AVERAGED, TRAINED = "ema_model.", "online_model."
"""Where ema-pytorch has its two models."""


@dataclass(frozen=True, slots=True)
class AverageState:
    """The entries of such a state: the ``average`` and the ``trained`` model under names of the model, ``counters`` under their own."""

    average: Mapping[str, Any]
    trained: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)


def state_of(entries: Mapping[Any, Any]) -> AverageState | None:
    """The parts of a state dict that is the state of an average, by the names alone; None for any other."""
    if not all(isinstance(name, str) for name in entries):
        return None
    start = common_start(entries)
    held = {name.removeprefix(start): entry for name, entry in entries.items()}
    counters = {name: held.pop(name) for name in COUNTERS & held.keys()}
    average, trained = _below(AVERAGED, held), _below(TRAINED, held)
    if not average or len(average) + len(trained) < len(held) or not (trained or BEGUN in counters):
        average, trained = _below(DDP, held), {}
        if not average or len(average) < len(held) or COUNTER not in counters:
            return None
    return AverageState(_put_back(start, average), _put_back(start, trained), counters)


def common_start(names: Iterable[str]) -> str:
    """The parts with which all names begin, up to the last dot before they differ.

    >>> common_start(["model.norm.weight", "model.norm.bias", "model.head.weight"]), common_start(["norm.weight"])
    ('model.', 'norm.')
    """
    names = list(names)
    least, greatest = min(names, default=""), max(names, default="")
    same = next((at for at, (one, other) in enumerate(zip(least, greatest, strict=False)) if one != other), min(len(least), len(greatest)))
    return least[: least.rfind(".", 0, same) + 1]


def _below(start: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(start): entry for name, entry in entries.items() if name.startswith(start)}


def _put_back(start: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{start}{name}": entry for name, entry in entries.items()}
