"""The tensors of a DeepSpeed save: fp32 weights out of the partitions, and those that the module holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ckpt_cli.errors import CorruptFile, Inconsistent, MissingShard, Undecidable, Unsupported, reading
from ckpt_cli.files.torch_file import StoredTensor
from ckpt_cli.formats.assembly import RankState, assemble
from ckpt_cli.formats.base import WEIGHTS_16, ReadOptions
from ckpt_cli.formats.deepspeed.agreement import agrees
from ckpt_cli.formats.deepspeed.flat_tensors import bytes_of, flat_of, flat_tensor, tensor_of
from ckpt_cli.formats.deepspeed.model_states import ModelStates
from ckpt_cli.formats.deepspeed.optimizer_states import FP32
from ckpt_cli.formats.deepspeed.partitions import EXPERT_NAME, MIXED
from ckpt_cli.formats.deepspeed.pipeline import layer_shapes, layer_tensors, trained_parameters, union_of_stages
from ckpt_cli.formats.deepspeed.save import Save
from ckpt_cli.formats.deepspeed.tensor_parallel import whole_tensors
from ckpt_cli.formats.flat import FlatRange
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.tensor import Tensor

ADAPTED = "lora_"
"""In the names of adapters."""


def stored_weights(save: Save) -> dict[str, Tensor]:
    """The tensors as the module has them, in the dtype of the training. At stage 3 these are only buffers."""
    if save.is_pipeline:
        return {name: tensor_of(name, stored) for name, stored in layer_tensors(save).items()}
    shards = {mp: {name: tensor_of(name, stored) for name, stored in (save.model_of(mp).module or {}).items()} for mp in save.models}
    if save.is_stage_3:
        shards = {mp: {**held, **_buffers(save.models[mp])} for mp, held in shards.items()}
    tensors = shards[min(shards)] if len(shards) == 1 else whole_tensors(shards, save.first)
    for name, stored in save.experts.items():
        if name in tensors:
            raise Inconsistent("a file of experts and the model states both hold this tensor", path=save.root, tensor=name, hint=MIXED)
        tensors[name] = tensor_of(name, stored)
    return tensors


def _buffers(ranks: Mapping[int, ModelStates]) -> dict[str, Tensor]:
    """The buffers, of which every rank has the whole: that of the first, and the others as its replicas. Raises Inconsistent."""
    own = {rank: {name: held for name, held in (states.module or {}).items() if name in states.buffers} for rank, states in ranks.items()}
    return assemble([RankState(rank, ranks[rank].path, held) for rank, held in own.items()], len(ranks), (), ReadOptions()).tensors


def slot_tensors(save: Save, slot: str = FP32) -> dict[str, Tensor]:
    """One slot of all parameters that the partitions hold: the fp32 weights, or a moment. Parameters without it are left out."""
    shapes = layer_shapes(save) if save.is_pipeline else {}
    shards: dict[int, dict[str, Tensor]] = {}
    for mp, groups in save.groups.items():
        held = [parameter for group in groups for parameter in group.parameters if slot in parameter.ranges]
        shards[mp] = {parameter.name: flat_tensor(parameter, slot, parameter.shape or shapes.get(parameter.name)) for parameter in held}
    if save.is_pipeline:
        return union_of_stages(shards)
    return shards[min(shards)] if len(shards) == 1 else whole_tensors(shards, save.first)


def fp32_weights(save: Save, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole model: what was trained, out of ``masters``, and frozen parameters and buffers as they are stored.

    Raises Inconsistent if the two halves of a save are not of one model, Unsupported for frozen weights that only codes are left of.
    """
    stored = stored_weights(save)
    if not masters:
        check_named(stored, save)
    frozen = _frozen(save) if save.is_stage_3 else {}
    shared = save.shared
    # A name that shares its bytes with a trained parameter is another name of that one; others are frozen parameters or buffers.
    twins = {bytes_of(own): name for name in masters if (own := stored.get(name)) is not None and own.numel}
    tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys((*stored, *masters, *frozen, *shared)):
        own = stored.get(name)
        if own is not None and not own.numel and not save.is_stage_3:
            tensors[name] = own  # DeepSpeed takes all parameters without elements for one that is shared
            continue
        held = masters.get(name) or frozen.get(name) or masters.get(shared.get(name, "")) or frozen.get(shared.get(name, ""))
        if held is not None:
            tensors[name] = replace(held, name=name)
        elif own is not None:
            if _is_placeholder(own, save):
                if name in shared or save.lacks_frozen:
                    continue  # another name of a frozen parameter that was left out of the save
                text = "an empty placeholder, and neither partitions nor frozen parameters hold its values"
                raise Unsupported(text, path=save.first.path, tensor=name, hint="load the save with DeepSpeed, and save one state dict")
            twin = twins.get(bytes_of(own))
            tensors[name] = own if twin is None else replace(masters[twin], name=name)
    for alias, kept in shared.items():
        if kept not in tensors and alias in tensors:
            tensors[kept] = replace(tensors[alias], name=kept)
    lost = next(
        (name for ranks in save.models.values() for states in ranks.values() for name in states.buffers if name not in tensors), None
    )
    instead = next(
        (leaf for ranks in save.models.values() for states in ranks.values() for leaf in states.leaves if leaf.name == lost), None
    )
    if instead is not None:
        raise CorruptFile(f"this buffer is no tensor but {instead.text}", path=instead.file, tensor=lost, expected="a tensor")
    if lost is not None:
        text, hint = "no file holds this buffer", None
        if save.names.parameters and save.is_pipeline:
            text = "a universal save of a pipeline has no files of layers, and they alone hold this buffer"
            hint = "merge the save that it was made from, or copy its layer_NN-model_states.pt into this folder"
        raise MissingShard(text, path=save.root, tensor=lost, expected="layer_NN-model_states.pt of the original save", hint=hint)
    check_agreement(masters, stored, save)
    if not save.is_stage_3:
        _check_frozen(stored, save)
    return tensors


def check_named(stored: Mapping[str, Tensor], save: Save) -> None:
    """That the module holds every parameter that the model states or the optimizer's files list, and every buffer. Raises MissingShard.

    Raises Undecidable for a pipeline of which nothing lists the parameters: a layer's file that was lost would not be missed.
    """
    models = [save.model_of(mp) for mp in save.models]
    trained = trained_parameters(save)
    if save.is_pipeline and not trained:
        raise Undecidable(
            "nothing tells which parameters this pipeline has: its model states do not list all of them, and no optimizer file is there",
            path=save.root,
            expected="the files of the optimizer (*_optim_states.pt), which list them",
            hint="copy them into this folder, from where the run was saved",
        )
    held = [*(name for model in models for name in (*model.frozen, *(model.buffers if save.is_pipeline else ()))), *trained]
    for name in dict.fromkeys(held):
        if name not in stored and EXPERT_NAME.fullmatch(name) is None:
            number = name.split(".")[0]
            wanted = f"layer_{int(number):02d}-model_states.pt" if save.is_pipeline and number.isdecimal() else None
            expected = str(save.root / wanted) if wanted else None
            raise MissingShard("the module lacks this tensor, which the save lists", path=save.root, tensor=name, expected=expected)


def _check_frozen(stored: Mapping[str, Tensor], save: Save) -> None:
    """That the module has the frozen parameters that stage 2 lists beside it, with their shapes and values.

    Frozen experts are in files of their own, under other numbers.
    """
    for mp in save.models:
        states = save.model_of(mp)
        for name, shape in states.frozen.items():
            if EXPERT_NAME.fullmatch(name) is not None:
                continue
            own, beside = (states.module or {}).get(name), states.fragments.get(name)
            if own is None and (states.module is not None or name not in stored):
                instead = next((f": {leaf.text} is in its place" for leaf in states.leaves if leaf.name == name), "")
                raise MissingShard(f"the module lacks this frozen parameter, which the save lists{instead}", path=states.path, tensor=name)
            if own is None:
                continue  # in the file of a layer
            if own.shape != shape:
                text = f"the shape of this frozen parameter is {list(own.shape)} in the module, {list(shape)} in the list of them"
                raise Inconsistent(text, path=states.path, tensor=name, hint=MIXED)
            held, listed = tensor_of(name, own), None if beside is None or beside.shape != shape else tensor_of(name, beside)
            if listed is not None and bytes_of(listed) != bytes_of(held) and not agrees(listed, held):
                text = "this frozen parameter has other values in the module than in the list of them"
                raise Inconsistent(text, path=states.path, tensor=name, hint=MIXED)


def frozen_notes(tensors: Mapping[str, Tensor], save: Save) -> list[Note]:
    """A warning if frozen parameters were left out when saving: the names that others still point to, or that there may be some.

    The names of the others are in no file. Of adapters the model that they belong to is always left out: that is no news.
    """
    empty = [name for name, own in stored_weights(save).items() if name not in save.shared and _is_placeholder(own, save)]
    named = sorted(name for name in {*save.shared.values(), *empty} if name not in tensors)
    if named:
        text = f"{few(named, 3)}: named but not stored, since frozen parameters were left out when this was saved"
    elif save.is_pipeline and not save.layers:
        text = "frozen parameters, if the model has any, are not in a universal save of a pipeline: only the files of its layers hold them"
    elif save.lacks_frozen and not any(ADAPTED in name for name in tensors):
        text = "saved with exclude_frozen_parameters: frozen parameters, if the model has any, are not in these files"
    else:
        return []
    return [Note("warning", "frozen-left-out", text)]


def _is_placeholder(own: Tensor, save: Save) -> bool:
    """Whether stage 3 left this in the module in place of a parameter."""
    return save.is_stage_3 and own.shape == (0,) and own.name not in save.first.buffers


def check_agreement(masters: Mapping[str, Tensor], stored: Mapping[str, Tensor], save: Save) -> None:
    """The module's weights are the fp32 ones in another dtype: samples of both are compared, as far as both are stored."""
    for name, master in masters.items():
        own = stored.get(name)
        if own is None or (own.shape == (0,) and save.is_stage_3):
            continue
        if own.shape != master.shape:
            text = f"its shape is {list(own.shape)} in the model states, {list(master.shape)} in the optimizer states"
            raise Inconsistent(text, path=save.root, tensor=name, hint=MIXED)
        if not agrees(master, own):
            raise Inconsistent(
                "the weights of the module are not the fp32 weights of the optimizer in another dtype",
                path=save.root,
                tensor=name,
                expected="files of one save, of which none was exchanged with another",
                hint=f"--type {WEIGHTS_16} takes those of the module" if own.dtype.bits == 16 < master.dtype.bits else None,
            )


def _frozen(save: Save) -> dict[str, Tensor]:
    """Frozen parameters at stage 3: every rank holds a part of each, the last ones with padding."""
    shards: dict[int, dict[str, Tensor]] = {}
    for mp, ranks in save.models.items():
        first = save.model_of(mp)
        shards[mp] = {}
        for name, shape in first.frozen.items():
            count, world = math.prod(shape), len(ranks)
            part = -(-count // world)
            ranges = []
            for place, (rank, states) in enumerate(sorted(ranks.items())):
                with reading(states.path, tensor=name):
                    stored = states.fragments.get(name)
                    if stored is None or stored.numel != part or len(stored.shape) != 1:
                        has = "nothing" if stored is None else f"{stored.numel} elements"
                        raise Inconsistent(f"the part of this frozen parameter is {has}", expected=f"{part} elements", hint=MIXED)
                    _refuse_codes(stored, states, name)
                if place * part < count or not place:
                    ranges.append(FlatRange(stored, 0, place * part, min(part, count - place * part), rank))
            shards[mp][name] = flat_of(name, shape, ranges, world)
    return shards[min(shards)] if len(shards) == 1 else whole_tensors(shards, save.first)


def _refuse_codes(stored: StoredTensor, states: ModelStates, name: str) -> None:
    placeholder = (states.module or {}).get(name)
    if placeholder is not None and placeholder.dtype != stored.dtype:
        raise Unsupported(
            f"ZeRO++ stored this frozen parameter as {stored.dtype} codes without their scales: its weights are not in the files",
            expected="weights (zero_quantized_nontrainable_weights: false)",
            hint="take the frozen weights from the base model: load the save with DeepSpeed, or train without that setting",
        )
