"""Averages among the tensors of a model, under a prefix (latent diffusion: ``model_ema.*``), as a component of their own.

That of one file of ``torch.save`` is a group of the file (`groups`), that of a DCP folder one of the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_cli.errors import Inconsistent
from ckpt_cli.formats.torch_files.averages import split_average
from ckpt_cli.formats.torch_files.counters import begun_notes, renamed, trained_notes
from ckpt_cli.tensors.component import Component, Note

EMA = "ema"


def names_of(component: str, tensors: Mapping[Any, Any]) -> list[str]:
    """The components that the tensors of a model, or anything by their names, are: the model, and its average if there is one."""
    return [component] if split_average(tensors) is None else [component, EMA]


def set_apart(component: Component, where: str, *, average: bool) -> Component:
    """A component as the model in it, or as the ``average``; as it is where there is none. ``where`` is what a note names.

    Raises Inconsistent if an average is asked for that is there by the names of a first file, and not by all.
    """
    split = split_average(component.tensors)
    if split is None and average:
        raise Inconsistent("the tensors of the average and those of the model do not go together", path=component.root)
    if split is None:
        return component
    if average:
        notes = [*begun_notes(split.counters), *trained_notes(split.trained)]
        return replace(component, tensors=renamed(split.average), notes=(*notes, *component.notes))
    also = [] if split.alone else [Note("info", "other-components", f"{where} also holds {EMA} (--type {EMA})", (EMA,))]
    return replace(component, tensors=renamed(split.model), notes=(*also, *component.notes))
