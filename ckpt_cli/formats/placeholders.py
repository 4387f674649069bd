"""Empty tensors in place of weights that are elsewhere, as DeepSpeed's ZeRO stage 3 leaves them in a module, and files without any.

The Trainer of transformers removes such a file where it is that of a model (``remove_dummy_checkpoint``), and leaves that of an adapter.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from ckpt_cli.boxes import Shape
from ckpt_cli.errors import CkptError, CorruptFile, Gap
from ckpt_cli.files.folders import status_of
from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.files.safetensors_file import read_header
from ckpt_cli.files.source import Files, Source, Window
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.files.zip_archive import ZipMap
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Component

WEIGHT = re.compile(r"(?!.*lora_[AB])(.*\.)?(weight|\w+_proj|in_proj_weight)", re.DOTALL)
"""Names of tensors that are never empty in a model: matrices of layers, norms, experts. Factors of LoRA are judged by their ranks."""

NOTHING = (0,)
"""The shape of ``torch.empty(0)``; a genuine empty tensor mostly keeps its other dimensions."""


def placeholders(shapes: Mapping[str, Shape]) -> list[str]:
    """The names of tensors that are placeholders for weights; empty for a model whose few empty tensors are its own.

    Those are all tensors where none has an element, otherwise vectors of no elements that have the names of weights, or that are most.
    """
    if shapes and all(0 in shape for shape in shapes.values()):
        return list(shapes)
    vectors = [name for name, shape in shapes.items() if shape == NOTHING]
    if len(vectors) > 1 and len(vectors) * 2 > len(shapes):
        return vectors
    return [name for name in vectors if WEIGHT.fullmatch(name)]


MOST = 1 << 20
"""Bytes. A larger file is not looked into: the names of even a hundred thousand placeholders take no more."""


def holds_nothing(path: Path) -> CkptError | None:
    """The error of a file of weights that holds none, only names of them or nothing; None for others, and what cannot be read."""
    shapes = small_shapes(path, empty=True)
    return _error_of(shapes, path) if shapes is not None and all(0 in shape for shape in shapes.values()) else None


def small_shapes(path: Path, *, empty: bool = False) -> dict[str, Shape] | None:
    """The shapes of all that is in a small file by name; None of others, if some of it is no tensor, or it cannot be read.

    ``empty``: only those of a file without bytes of tensors are wanted.
    """
    status = status_of(path)
    if status is None or not 0 < status.st_size <= MOST:
        return None
    with contextlib.suppress(CkptError), Files() as files:
        return _shapes_in(path, files, empty=empty)
    return None


def _shapes_in(path: Path, files: Files, *, empty: bool) -> dict[str, Shape] | None:
    if path.suffix == ".safetensors":
        return {entry.name: entry.shape for entry in read_header(files.source(path)).entries}
    source = files.source(path)
    if empty and source.read(0, min(source.size, 2)) == b"PK" and _has_data(source):
        return None
    file = TorchFile(source)
    entries = as_dict(file.root)
    held = {str(name): file.tensor(node) for name, node in (entries or {}).items()}
    shapes = {name: tensor.shape for name, tensor in held.items() if tensor is not None}
    return shapes if entries is not None and len(shapes) == len(held) else None


def _has_data(source: Source) -> bool:
    """Whether an archive of torch has bytes of tensors, which its directory tells: most files are not parsed for that."""
    members = ZipMap(Window(source, 0, source.size)).members
    return any("/data/" in name and member.size for name, member in members.items())


def refuse_placeholders(component: Component) -> None:
    """Raise Gap for a component whose weights are placeholders, CorruptFile for one that has no tensor at all."""
    if (error := _error_of({name: tensor.shape for name, tensor in component.tensors.items()}, component.root)) is not None:
        raise error


def _error_of(shapes: Mapping[str, Shape], path: Path) -> CkptError | None:
    if not shapes:
        return CorruptFile(
            "the checkpoint holds no tensor",
            path=path,
            expected="weights; a trainer leaves an empty file where it did not gather them, or asked a wrapped model for its state",
            hint="pass a step or a save of the same training that has them, such as the folder global_step* of DeepSpeed",
        )
    empty = placeholders(shapes)
    if not empty:
        return None
    return Gap(
        f"{len(empty)} of {len(shapes)} tensors have no elements: {few(empty, 3)}",
        tensor=empty[0],
        path=path,
        expected="weights; such empty placeholders are what a model under DeepSpeed ZeRO stage 3 has outside of its forward pass",
        hint="save with stage3_gather_16bit_weights_on_model_save, or use the ZeRO checkpoint (zero_pp_rank_* files) of the same step",
    )
