"""Pipelines: the tensors of the layers under their full names, and what several stages share.

A layer's file has names of its own (``up.weight`` of ``layer_01-model_states.pt`` is ``1.up.weight``). Source: DeepSpeed 0.19,
``runtime/pipe/module.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from ckpt_cli.boxes import Shape
from ckpt_cli.errors import Inconsistent, Undecidable
from ckpt_cli.files.torch_file import StoredTensor
from ckpt_cli.formats.assembly import tiled
from ckpt_cli.formats.deepspeed.agreement import agrees
from ckpt_cli.formats.deepspeed.flat_tensors import flat_tensor, tensor_of
from ckpt_cli.formats.deepspeed.optimizer_states import FP32, listed_beside
from ckpt_cli.formats.deepspeed.partitions import MIXED, Parameter
from ckpt_cli.formats.deepspeed.save import Save
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import same_values
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


def unlisted_notes(save: Save) -> list[Note]:
    """What is said about tensors of layers that no list of the save has, as frozen ones: if the layer is shared, its name is another.

    And about layers without a file: functions have none, and one that was lost is only missed if something lists what it held.
    """
    parameters = trained_parameters(save)
    if not parameters or not save.layers:
        return []
    tied = _tied_names(save)
    left = {key: stored for key, stored in _unlisted(save, parameters).items() if key not in tied}
    gaps = _numbers_left_out(save)
    if not left:
        return _gap_notes(gaps, "info")
    notes = _gap_notes(gaps, "warning")
    like = {(local, stored.shape) for (number, local), stored in _unlisted(save, parameters).items() if (number, local) in tied}
    for (number, local), stored in left.items():
        if any(local == other[1] and number != other[0] and _equal(stored, held) for other, held in left.items()):
            like.add((local, stored.shape))
    names = [f"{number}.{local}" for number, local in left]
    doubtful = [f"{number}.{local}" for (number, local), stored in left.items() if (local, stored.shape) in like]
    if doubtful:
        text = (
            f"{few(doubtful, 3)}: no list of this save has these, and other layers hold the like. If a frozen layer is used more than once"
        )
        return [*notes, Note("warning", "unlisted", f"{text}, DeepSpeed calls its parameters {TIED}<key>.<name>, and no file says the key")]
    text = f"{few(names, 3)}: in no list of this save, as frozen parameters, and named after the layers whose files hold them"
    return [*notes, Note("info", "unlisted", text)]


def _numbers_left_out(save: Save) -> list[str]:
    """The layers before the last one that have no file, as numbers and ranges."""
    numbers = [-1, *sorted(save.layers)]
    return [
        str(before + 1) if after - before == 2 else f"{before + 1} to {after - 1}"
        for before, after in itertools.pairwise(numbers)
        if after - before > 1
    ]


def _gap_notes(gaps: Sequence[str], level: Literal["info", "warning"]) -> list[Note]:
    if not gaps:
        return []
    text = f"layers without a file: {few(gaps, 4)}. Layers without tensors of their own have none; nothing would tell of a frozen one whose"
    return [Note(level, "layers-without-file", f"{text} file was lost")]


def _tied_names(save: Save) -> dict[tuple[int, str], str]:
    """Shared parameters: no file says which layers hold them, so it is those whose tensor has their name, size and values.

    Every use of the layer itself has a file, with the same values. None has one where each use is a function with the layer's weights, or
    in a universal save: the optimizer has such parameters all the same.
    """
    parameters = trained_parameters(save)
    left = _unlisted(save, parameters)
    found: dict[tuple[int, str], str] = {}
    for name, parameter in parameters.items():
        if not name.startswith(TIED):
            continue
        alike = [key for key in left if name.endswith(f".{key[1]}") and left[key].numel == parameter.numel and key not in found]
        fits = [key for key in alike if parameter.shape in (None, left[key].shape)]
        if len(fits) > 1 and parameter.ranges:
            fits = [key for key in fits if agrees(flat_tensor(parameter, FP32, left[key].shape), tensor_of(name, left[key]))]
        if not all(_equal(left[fits[0]], left[key]) for key in fits[1:]):
            raise Undecidable(f"layers share this parameter, and {len(fits)} layers hold a tensor like it", path=save.root, tensor=name)
        if not fits and (alike or parameter.shape is None):
            raise Undecidable("layers share this parameter, and no layer holds a tensor like it", path=save.root, tensor=name)
        found |= dict.fromkeys(fits, name)
    return found


def trained_parameters(save: Save) -> dict[str, Parameter]:
    """What was trained, as the partitions hold it, or as the model states list it. Empty if they do not list all."""
    parameters = {p.name: p for groups in save.groups.values() for group in groups for p in group.parameters}
    if parameters:
        return parameters
    for mp in save.models:
        model = save.model_of(mp)
        beside = listed_beside(model) if model.groups is None else {}
        if beside is None:
            return {}
        parameters |= {name: Parameter(name, elements, None, {}, 0, {}, {}) for name, elements in beside.items()}
        shapes = {name: shape for group in model.groups or () for name, shape in group.items()}
        parameters |= {name: Parameter(name, math.prod(shape), shape, {}, 0, {}, {}) for name, shape in shapes.items()}
    return parameters


def _unlisted(save: Save, parameters: Mapping[str, Parameter]) -> dict[tuple[int, str], StoredTensor]:
    """The tensors of layers that nothing lists under a name of the layer: those of shared layers, and frozen ones."""
    known = {*parameters, *(name for ranks in save.models.values() for states in ranks.values() for name in states.buffers)}
    return {
        (number, local): stored
        for number, held in save.layers.items()
        for local, stored in held.items()
        if f"{number}.{local}" not in known
    }


def _equal(first: StoredTensor, second: StoredTensor) -> bool:
    return same_values(tensor_of("first", first), tensor_of("second", second))


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
