"""Pipelines: the tensors of the layers under their full names, and what several stages share.

A layer's file has names of its own (``up.weight`` of ``layer_01-model_states.pt`` is ``1.up.weight``). Source: DeepSpeed 0.19,
``runtime/pipe/module.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ckpt_cli.boxes import Shape
from ckpt_cli.errors import Inconsistent, Undecidable
from ckpt_cli.files.torch_file import StoredTensor
from ckpt_cli.formats.assembly import tiled
from ckpt_cli.formats.deepspeed.agreement import agrees
from ckpt_cli.formats.deepspeed.flat_tensors import flat_tensor, tensor_of
from ckpt_cli.formats.deepspeed.optimizer_states import FP32
from ckpt_cli.formats.deepspeed.partitions import MIXED, Parameter
from ckpt_cli.formats.deepspeed.save import Save
from ckpt_cli.tensors.tensor import Tensor

TIED = "tied_modules."
"""How a pipeline calls the parameters of layers that share them: ``tied_modules.<key>.<name in the layer>``."""


def layer_tensors(save: Save) -> dict[str, StoredTensor]:
    """The tensors of all layers under their full names: ``<layer>.<name>``, or ``tied_modules.<key>.<name>`` for shared ones."""
    tied = _tied_names(save)
    return {
        tied.get((number, local), f"{number}.{local}"): stored for number, held in save.layers.items() for local, stored in held.items()
    }


def layer_shapes(save: Save) -> dict[str, Shape]:
    return {name: stored.shape for name, stored in layer_tensors(save).items()}


def _tied_names(save: Save) -> dict[tuple[int, str], str]:
    """Shared parameters: no file says which layer holds them, so it is the one whose tensor has their name, size and values."""
    parameters = {p.name: p for groups in save.groups.values() for group in groups for p in group.parameters}
    if not parameters:
        listed = ((name, shape) for mp in save.models for group in save.model_of(mp).groups or () for name, shape in group.items())
        parameters = {name: Parameter(name, math.prod(shape), shape, {}, 0, {}, {}) for name, shape in listed}
    known = {*parameters, *(name for ranks in save.models.values() for states in ranks.values() for name in states.buffers)}
    left = {
        (number, local): stored
        for number, held in save.layers.items()
        for local, stored in held.items()
        if f"{number}.{local}" not in known
    }
    found: dict[tuple[int, str], str] = {}
    for name, parameter in parameters.items():
        if not name.startswith(TIED) or name in found.values():
            continue
        alike = [key for key in left if name.endswith(f".{key[1]}") and left[key].numel == parameter.numel and key not in found]
        fits = [key for key in alike if parameter.shape in (None, left[key].shape)]
        if len(fits) > 1 and parameter.ranges:
            fits = [key for key in fits if agrees(flat_tensor(parameter, FP32, left[key].shape), tensor_of(name, left[key]))]
        if len(fits) != 1:
            text = "no layer holds a tensor of this name and size" if not fits else f"{len(fits)} layers hold a tensor like it"
            raise Undecidable(f"layers share this parameter, and {text}", path=save.root, tensor=name)
        found[fits[0]] = name
    return found


def union_of_stages(stages: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all stages of a pipeline. A shared parameter is in every stage that uses it: these are replicas."""
    tensors: dict[str, Tensor] = {}
    for stage, held in sorted(stages.items()):
        for name, tensor in held.items():
            own = replace(tensor, pieces=tuple(replace(piece, rank=stage) for piece in tensor.pieces))
            known = tensors.get(name)
            if known is None:
                tensors[name] = own
            elif (known.dtype, known.shape) != (own.dtype, own.shape):
                raise Inconsistent("the stages of the pipeline disagree about this shared parameter", tensor=name, hint=MIXED)
            else:
                parts = (*known.pieces, *known.copies, *own.pieces)
                tensors[name] = tiled(name, known.dtype, known.shape, parts, known.kind, known.layout)
    order = sorted(tensors, key=lambda name: (0, int(name.split(".")[0])) if name.split(".")[0].isdecimal() else (-1, 0))
    return {name: tensors[name] for name in order}
