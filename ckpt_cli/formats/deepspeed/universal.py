"""DeepSpeed's universal checkpoints: ``zero/<parameter>/fp32.pt`` and a file per slot (``exp_avg``, ``step``), one whole parameter each.

From stages 1 and 2 a file is ``{"param": tensor, ...}``, from stage 3 a vector whose shape the model states tell. What
``--inject_missing_state`` adds (frozen parameters and buffers, cast to fp32) is taken from the model states, which hold it as it is.
Source: DeepSpeed ``checkpoint/ds_to_universal.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt_cli.boxes import Shape
from ckpt_cli.errors import CorruptFile, Inconsistent, MissingShard, Undecidable, reading
from ckpt_cli.files.folders import files_in, is_file
from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import StoredTensor, TorchFile
from ckpt_cli.formats.deepspeed.flat_tensors import flat_of, tensor_of
from ckpt_cli.formats.deepspeed.names import UNIVERSAL
from ckpt_cli.formats.deepspeed.optimizer_states import FP32
from ckpt_cli.formats.deepspeed.save import Save
from ckpt_cli.formats.deepspeed.tensor_parallel import whole_shapes
from ckpt_cli.formats.flat import FlatRange
from ckpt_cli.formats.optimizer_state import Group, NamedState
from ckpt_cli.names import check_name
from ckpt_cli.tensors.plain_values import ValueReader
from ckpt_cli.tensors.tensor import Tensor


def universal_tensors(save: Save, files: Files, slot: str = FP32) -> dict[str, Tensor]:
    """One slot of every trained parameter. Raises MissingShard for a parameter of the model states without fp32 weights."""
    shapes = _shapes(save)
    tensors = {}
    for folder in save.names.parameters:
        name = check_name(folder.name)
        path = folder / f"{slot}.pt"
        if (shapes and name not in shapes) or not is_file(path):
            continue
        with reading(path, tensor=name):
            stored, flat = _stored(path, files)
            shape = shapes.get(name)
            if shape is None and flat and len(stored.shape) == 1:
                raise Undecidable(
                    "its values are a vector, as those of stage 3 are, and the model states do not tell its shape",
                    expected="param_shapes in the model states",
                    hint="merge the save that it was made from",
                )
            if shape is None or stored.shape in (shape, ()):
                tensors[name] = tensor_of(name, stored)
            elif len(stored.shape) == 1 and stored.numel == math.prod(shape):
                tensors[name] = flat_of(name, shape, [FlatRange(stored, 0, 0, stored.numel, 0)], 1)
            else:
                raise Inconsistent(f"the file holds shape {list(stored.shape)}", expected=f"{list(shape)}, as the model states say")
    lacking = next((name for name in shapes if name not in tensors), None)
    if slot == FP32 and lacking is not None:
        wanted = save.root / UNIVERSAL / lacking / f"{slot}.pt"
        raise MissingShard("the fp32 weights of this parameter are missing", path=save.root, tensor=lacking, expected=str(wanted))
    return tensors


def _shapes(save: Save) -> dict[str, Shape]:
    """The shapes of whole parameters. Raises Undecidable for a pipeline whose model states do not list what it has."""
    models = [save.model_of(mp) for mp in save.models]
    shapes = {name: shape for model in models for group in model.groups or () for name, shape in group.items()}
    if save.is_pipeline and any(model.groups is None for model in models):
        raise Undecidable(
            "nothing tells which parameters this pipeline has: its model states do not list them",
            path=save.root,
            expected="param_shapes, which ZeRO stage 1 writes",
            hint="merge the save that it was made from",
        )
    # The ranks of tensor parallelism list what they hold; the folders have the whole of it.
    return shapes if save.is_pipeline or len(models) == 1 else whole_shapes(shapes, save.first)


def universal_optimizer(save: Save, files: Files) -> NamedState:
    """The slots of every parameter, whatever the optimizer calls them, and the options of the groups."""
    trained = universal_tensors(save, files)
    tensors: dict[tuple[str, str], Tensor] = {}
    listed = (path.stem for folder in save.names.parameters for path in files_in(folder, lambda name: name.endswith(".pt")))
    for slot in sorted({*listed} - {FP32}):
        held = universal_tensors(save, files, slot)
        lacking = next((name for name, tensor in trained.items() if tensor.numel and name not in held), None)
        if held and lacking is not None:
            wanted = save.root / UNIVERSAL / lacking / f"{slot}.pt"
            raise MissingShard(f"{slot} of this parameter is missing, others have it", path=save.root, tensor=lacking, expected=str(wanted))
        tensors |= {(name, slot): tensor for name, tensor in held.items()}
    return NamedState(tensors, {}, _groups(save, files, list(dict.fromkeys(name for name, _ in tensors))))


def universal_files(save: Save) -> list[Path]:
    """The files of the weights."""
    return [path for folder in save.names.parameters if is_file(path := folder / f"{FP32}.pt")]


def _stored(path: Path, files: Files) -> tuple[StoredTensor, bool]:
    """What a file holds, and whether it is a tensor alone: that of stage 3 is flat."""
    file = files.parsed(path, TorchFile)
    entries = as_dict(file.root)
    stored = file.tensor(entries.get("param") if entries is not None else file.root)
    if stored is None:
        raise CorruptFile("the file holds no parameter", expected='a tensor, or a dict with "param"')
    return stored, entries is None


def _groups(save: Save, files: Files, names: Sequence[str]) -> list[Group]:
    path = save.root / UNIVERSAL / "optimizer_state.pt"
    options: list[Any] = []
    if is_file(path):
        file = files.parsed(path, TorchFile)
        with reading(path):
            listed = (as_dict(file.root) or {}).get("param_groups")
            options = ValueReader(file).read(listed) if isinstance(listed, list) else []
    listed_by = [save.model_of(mp).groups or () for mp in save.models]
    if {len(groups) for groups in listed_by} == {len(options)} and all(isinstance(group, dict) for group in options):
        members = [dict.fromkeys(name for groups in listed_by for name in groups[index]) for index in range(len(options))]
        return [{**group, "params": [name for name in own if name in names]} for group, own in zip(options, members, strict=True)]
    return [{"params": list(names)}]
