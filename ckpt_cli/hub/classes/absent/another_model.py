"""Weights that are those of another model than their config names: draft models have the config of what they draft for."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_cli.boxes import Shape
from ckpt_cli.hub.classes.fit import Fit
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few, printable

AS_THEY_ARE = "--names native --allow-missing '*' writes them so"
"""What keeps every name: otherwise those that lack the prefix of the class are given it."""


def another_model(fit: Fit | None, names: Mapping[str, Shape]) -> str:
    """The hint that matrices without a place in a class that lacks others may be of another model, such as EAGLE's draft models."""
    there = [] if fit is None else [fit.name_in(names, name) for name in fit.extra]
    extra = [name for name in there if name in names]
    if fit is None or not any(len(names[name]) > 1 for name in extra):
        return ""
    text = f"{few(grouped(extra), 3)} {'has' if len(extra) == 1 else 'have'} no place in {printable(fit.kind)}, so that the weights may be"
    text = f"{text} those of another model than config.json names, such as a draft model, which its own program loads as they are"
    return f"{text}: {AS_THEY_ARE}"


def named_otherwise(fit: Fit, count: int) -> str:
    """How few of ``count`` tensors have a name of the class that a config names."""
    placed = fit.fitting + len(fit.reshaped) + len(fit.stand_ins) + len(fit.tied)
    kind = printable(fit.kind)
    if fit.is_foreign:
        return f"none of them is one of {kind}"
    return f"only {placed} of {count} tensors {'has' if placed == 1 else 'have'} a name of {kind}"
