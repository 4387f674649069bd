"""What the content of a ``torch.save`` file says of the set that it is part of, whatever its name: Megatron, DeepSpeed, fairseq, Meta, smp.

Facts: Megatron-LM ``save_checkpoint`` (``args`` in every file), DeepSpeed ``_save_checkpoint`` (``ds_version``, ``param_shapes``,
``mp_world_size``, ``num_experts``), FSDP of fairscale and of torch_xla (``shard_metadata``), ``local_state_dict`` of SageMaker's model
parallelism, which its ``load_state_dict`` and the Trainer of transformers ask for ``_smp_is_partial``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ckpt_cli.boxes import Shape
from ckpt_cli.errors import CkptError, PartOfSet, Unsupported
from ckpt_cli.files.folders import is_file
from ckpt_cli.files.pickle_nodes import Call, as_dict, attributes
from ckpt_cli.files.safetensors_file import parse_json, read_header
from ckpt_cli.files.source import Files, read_small
from ckpt_cli.files.torch_file import TorchFile, dimensions
from ckpt_cli.formats.sets.kinds import ITEM, SHARED
from ckpt_cli.tensors.tensor import Tensor

DEEPSPEED = "put it back into the folder of its save, under the name that DeepSpeed gave it, and pass that folder"
MEGATRON = "pass the folder of its step, with the files of all ranks where Megatron wrote them (mp_rank_*/model_optim_rng.pt)"
PARALLEL = {
    "TP": ("tensor_model_parallel_size", "model_parallel_size"),
    "PP": ("pipeline_model_parallel_size",),
    "EP": ("expert_model_parallel_size",),
}
"""What Megatron's args call the numbers of ranks among which a model is cut."""

ROUTER = re.compile(r"(^|\.)(gate|router|gating|wg)\.(.+\.)?weight\Z")
"""The matrix that chooses among experts."""

MODULE = "module"
SMP_PART = "_smp_is_partial"
SHARDING = "DCP_SHARDING_INFO"
"""The metadata with which torch's HuggingFaceStorageWriter marks its files."""


def refuse_part(file: TorchFile, path: Path) -> None:
    """Raise PartOfSet, or Unsupported, if the content of a file says that it is not a whole model."""
    entries = as_dict(file.root)
    if entries is None:
        return
    _refuse_megatron(entries, path)
    if "ds_version" in entries or "ds_config" in entries or ("param_shapes" in entries and MODULE in entries):
        _refuse_deepspeed(file, entries, path)
    _refuse_smp(entries, path)
    _refuse_shard_metadata(entries.get("shard_metadata"), path)


def _refuse_shard_metadata(metadata: object, path: Path) -> None:
    fields = as_dict(metadata)
    if not fields and not isinstance(metadata, (list, Call)):
        return
    if fields and "shard_info" in fields:
        writer, program = "torch_xla's FSDP", "python3 -m torch_xla.distributed.fsdp.consolidate_sharded_ckpts"
    elif fields and "param_metadata" in fields:
        writer, program = "fairscale's FSDP", "consolidate_shard_weights of fairscale"
    else:
        writer, program = "a model in shards", "the program that wrote them"
    text = f"{path.name} is one shard of {writer} (shard_metadata)"
    raise PartOfSet(text, path=path, expected="all shards", hint=f"put them together with {program}")


def _refuse_megatron(entries: Mapping[Any, Any], path: Path) -> None:
    args = entries.get("args")
    fields: Mapping[str, Any] = {}
    if isinstance(args, Call):
        try:
            fields = attributes(args.state) if args.state is not None else {}
        except CkptError:
            fields = {}
    elif (plain := as_dict(args)) is not None:
        fields = plain
    sizes = {label: _first_int(fields, names) for label, names in PARALLEL.items()}
    if sizes["TP"] is None and sizes["PP"] is None and "checkpoint_version" not in entries:
        return
    cut = {label: size for label, size in sizes.items() if size is not None and size > 1}
    if cut:
        what = ", ".join(f"{label} {size}" for label, size in cut.items())
        count = math.prod(cut.values())
        raise PartOfSet(
            f"this is one rank's file of a Megatron checkpoint ({what}), one of {str(count)[:20]}",
            path=path,
            expected="the files of all ranks (mp_rank_*)",
            hint=MEGATRON,
        )
    raise Unsupported("this is the file of a Megatron checkpoint, away from its folder", path=path, hint=MEGATRON)


def _refuse_smp(entries: Mapping[Any, Any], path: Path) -> None:
    held = (entries, *filter(None, map(as_dict, entries.values())))
    if any(each.get(SMP_PART) is True for each in held):
        raise PartOfSet(
            f"{path.name} is one rank's part of a model of SageMaker's model parallelism ({SMP_PART})",
            path=path,
            expected="the whole model, which smp saves with partial=False",
            hint="load all parts with smp, and save model.state_dict() with smp.save(..., partial=False)",
        )


def _refuse_deepspeed(file: TorchFile, entries: Mapping[Any, Any], path: Path) -> None:
    hint = DEEPSPEED
    module = as_dict(entries.get(MODULE))
    if MODULE not in entries:
        raise PartOfSet(
            "this is one rank's optimizer state of DeepSpeed, no model", path=path, expected="the files of all ranks", hint=hint
        )
    if module is None:
        text = "this file of a DeepSpeed pipeline holds no weights: they are in the files of the layers"
        raise PartOfSet(text, path=path, expected="the files of all layers and stages", hint=hint)
    ranks = _first_int(entries, ("mp_world_size",)) or 1
    degrees = [size for size in (as_dict(entries.get("checkpoint_parallel_dimensions")) or {}).values() if type(size) is int]
    if max(ranks, *degrees, 1) > 1:
        text = f"this is one of {max(ranks, math.prod(degrees))} parts of a DeepSpeed checkpoint with model parallelism"
        raise PartOfSet(text, path=path, expected="the files of all ranks (mp_rank_*)", hint=hint)
    experts = entries.get("num_experts")
    if isinstance(experts, (list, tuple)) and any(type(count) is int and count > 1 for count in experts):
        text = "this file of a DeepSpeed MoE checkpoint holds no experts: they are in files of their own"
        raise PartOfSet(text, path=path, expected="the files of all experts", hint=hint)
    shapes = {name: stored.shape for name, node in module.items() if (stored := file.tensor(node)) is not None}
    empty = [name for name, shape in shapes.items() if 0 in shape]
    declared = dict(_declared(entries))
    for name in (*declared, *(empty if len(empty) > len(shapes) // 2 else ())):
        if name in empty or shapes.get(name) != declared[name]:
            text = "this file holds only placeholders of the weights: ZeRO-3 spreads these over the files of all ranks"
            raise PartOfSet(text, path=path, tensor=name, expected="the files of all ranks", hint=hint)


def _declared(entries: Mapping[Any, Any]) -> Iterable[tuple[str, Shape]]:
    """The parameters of the model listed in a DeepSpeed file, with their shapes."""
    listed = entries.get("param_shapes")
    groups = list(listed) if isinstance(listed, (list, tuple)) else [listed]
    for group in (*groups, entries.get("frozen_param_shapes")):
        for name, shape in (as_dict(group) or {}).items():
            yield name, dimensions(shape)


def refuse_shard(metadata: Mapping[str, str]) -> None:
    """Raise PartOfSet if the header of a safetensors file says that a tensor in it does not begin at the tensor's beginning."""
    text = metadata.get(SHARDING)
    if text is None:
        return
    info = parse_json(text.encode(), SHARDING)
    for name, place in info.items() if isinstance(info, dict) else ():
        corner = place.get("saved_offsets") if isinstance(place, dict) else None
        if isinstance(corner, list) and any(corner):
            raise PartOfSet(
                f"this is one shard of a DCP save in safetensors ({SHARDING}), under another name",
                tensor=name,
                expected="all files, under their original names (shard-*-model-*-of-*.safetensors)",
                hint="get them again from where they were saved",
            )


def share_error(tensors: Mapping[str, Tensor], path: Path, files: Files) -> PartOfSet | None:
    """The error for a file that is, or may be, one of several of the same model; None for others.

    One rank's file of torch_checkpointing has no metadata, where transformers, accelerate and diffusers write some. Of Nanotron a file is
    one parameter. In Meta's format the output projection has fewer columns than all heads together; ``params.json`` beside it says how
    many these are, and without it they are taken to make up the width of the model.
    """
    if tensors.keys() == {"data"} and path.name.startswith("model_"):
        text = "this is one parameter of a Nanotron checkpoint"
        return PartOfSet(text, path=path, expected="the whole folder", hint="convert it with Nanotron's own tools")
    router = next(filter(ROUTER.search, tensors), None) if SHARED.regex.fullmatch(path.name) else None
    if router is not None and not any("expert" in name for name in tensors):
        text = f"{path.name} is called like what all ranks share, and has a router, but no experts: they are in files of the ranks"
        hint = "get the files of all ranks, and put them together with the program that wrote them"
        return PartOfSet(text, path=path, tensor=router, expected="the whole set", hint=hint)
    if ITEM.fullmatch(path.name) and path.suffix == ".safetensors" and tensors and not _has_metadata(tensors):
        return PartOfSet(
            f"{path.name} is called like one rank's file of torch_checkpointing, which may hold parts of the tensors",
            path=path,
            expected=f"the files of all ranks, and {path.with_name('metadata.pkl')}, which says what parts they hold",
            hint="copy metadata.pkl from where the save was written; if the file is a whole model, rename it without the number",
        )
    wo = tensors.get("layers.0.attention.wo.weight")
    if wo is None or len(wo.shape) != 2 or not all(wo.shape):
        return None
    rows, columns = wo.shape
    heads = _meta_columns(path.parent / "params.json", rows, files)
    if heads != columns and heads % columns == 0:
        text = f"this is one of {heads // columns} files of a model in Meta's format: wo has {columns} of {heads} columns"
        hint = "get the other files (consolidated.*.pth); one model in one file is read"
        return PartOfSet(text, path=path, tensor=wo.name, expected="the whole set", hint=hint)
    return None


def _has_metadata(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the header of the file of these tensors has metadata."""
    return any(read_header(piece.source).metadata for tensor in islice(tensors.values(), 1) for piece in tensor.pieces)


def _meta_columns(params: Path, width: int, files: Files) -> int:
    if not is_file(params):
        return width
    try:
        files.watch(params)
        content = parse_json(read_small(params), "params.json")
    except CkptError:
        return width
    if not isinstance(content, dict):
        return width
    heads, size = _first_int(content, ("n_heads",)), _first_int(content, ("head_dim",))
    return heads * size if heads and size else width


def _first_int(fields: Mapping[Any, Any], names: tuple[str, ...]) -> int | None:
    return next((fields[name] for name in names if type(fields.get(name)) is int and fields[name] > 0), None)
