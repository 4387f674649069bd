"""One state dict of a checkpoint, with notes about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckpt_cli.boxes import Shape
from ckpt_cli.files.source import Watched
from ckpt_cli.tensors.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Leaf:
    """An entry of a state dict that is not a tensor; never interpreted, only shown.

    ``holds_data``: it is more than a setting; ``is_number``: a number of Python, which may be either. ``file`` is where it is, if known.
    ``stands_for_a_parameter``: it has the name of a module's weight or bias, and is None, a number or a list.
    """

    name: str
    text: str
    holds_data: bool = False
    is_number: bool = False
    file: Path | None = field(default=None, compare=False)
    stands_for_a_parameter: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the user should know: ``level`` "info" (in verbose output) or "warning" (always shown).

    ``others`` are components of the same files that it tells of: it is left out where all of these are opened too.
    """

    level: Literal["info", "warning"]
    code: str
    text: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh: names and sizes of its dimensions."""

    names: tuple[str, ...]
    shape: Shape

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in zip(self.names, self.shape, strict=True))

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Component:
    """One state dict of a checkpoint, whole: every tensor tiles exactly.

    ``ordered``: the tensors stand in the order of the model, if their format keeps it. ``arguments`` are those of the training, as
    plain values, where the files hold them (Megatron's ``args``); ``step`` is the one that the files record, in the count of their trainer.
    ``watched`` are all files that were opened to describe it: what they say of the weights must still be so at the end.
    ``metadata`` is what the headers of its safetensors files say besides tensors, an entry that differs between them left out.
    """

    name: str
    format: str
    root: Path
    tensors: Mapping[str, Tensor]
    files: tuple[Path, ...]
    world_size: int | None = None
    missing_ranks: tuple[int, ...] = ()
    mesh: Mesh | None = None
    leaves: tuple[Leaf, ...] = ()
    notes: tuple[Note, ...] = ()
    writer: str = ""
    ordered: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    watched: tuple[Watched, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return sum(tensor.numel for tensor in self.tensors.values() if tensor.alias_of is None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values() if tensor.alias_of is None)
