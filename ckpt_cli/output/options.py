"""The options of every command that writes a model folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from ckpt_cli.dtypes import BASE, HALVES
from ckpt_cli.errors import UsageError
from ckpt_cli.given import DtypeLike, PathLike
from ckpt_cli.names import Naming, ShardOrder, Write
from ckpt_cli.output.part import Engine, Part, check_engine
from ckpt_cli.urls import is_remote

PUSHING = frozenset({"push_to_hub", "private", "branch"})
"""Options that say where an output is pushed to."""

TAKEN = re.compile(
    r"(.*-[0-9]+-of-[0-9]+|adapter_model|adapters?|consolidated([.-].*)?|ae|optimizer)\.safetensors", re.ASCII | re.IGNORECASE
)
"""Names by which loaders tell parts of sets, adapters (PEFT), Mistral's own names, BAGEL's image decoder, and states of optimizers."""


@dataclass(frozen=True, slots=True)
class WritingOptions:
    """The options that `merge` and `average` share, with the meaning that their ``--help`` gives them.

    ``dtype``, ``max_shard_size`` (bytes) and ``weights_name`` may be None: then the base (with ``match_base``) or the kind
    of folder decides, otherwise "keep", 5 GB and "model.safetensors". ``part`` is "K/N", or "auto" for what a launcher says.
    Without ``ray_address``, Ray looks for a cluster itself; without ``ray_parts``, each output file is one part.
    ``write`` is how files are filled: "positioned", "sequential" (front to back), or "auto" for what the file system takes.
    ``push_to_hub`` is a repository of the Hub, ``private`` and ``branch`` (in which {step} and {run} are replaced) belong to it.
    """

    dtype: str | None = None
    cast_all: bool = False
    names: Naming = "hub"
    key_map: tuple[str | os.PathLike[str], ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_shard_size: int | None = None
    weights_name: str | None = None
    carry_from_base: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()
    overwrite: bool = False
    dry_run: bool = False
    jobs: int | None = None
    checksum: bool = False
    allow_overflow: bool = False
    allow_unequal_replicas: bool = False
    shard_order: ShardOrder = "auto"
    strict: bool = False
    part: str | None = None
    engine: Engine = "local"
    ray_address: str | None = None
    ray_parts: int | None = None
    write: Write = "auto"
    push_to_hub: str | None = None
    private: bool = False
    branch: str | None = None

    @property
    def chosen_part(self) -> Part | None:
        """The part of the output that this process writes; None for all of it. Raises UsageError."""
        return None if self.part is None else Part.chosen(self.part)

    @property
    def in_parts(self) -> str | None:
        """The option by which the output is written in parts; None if it is not."""
        return "--part" if self.part is not None else "--engine ray" if self.engine == "ray" else None

    @property
    def fills_from_base(self) -> bool:
        """Whether the output may get tensors of the base."""
        return bool(self.carry_from_base)

    @property
    def takes_from_base(self) -> bool:
        """Whether the output may get anything of the base, by name."""
        return self.fills_from_base or self.dtype == BASE

    def check(self, base: object, needing: Sequence[str] = ("carry_from_base",)) -> None:
        """Raise UsageError for options out of range, and for those ``needing`` a base without one."""
        check_writing(self.weights_name, self.jobs, self.max_shard_size)
        check_engine(self.engine, self.ray_address, self.ray_parts, self.chosen_part)
        if self.in_parts and self.checksum:
            raise UsageError(f"--checksum reads the whole output again, so {self.in_parts} does not apply", hint="leave out --checksum")
        if self.part is not None and self.push_to_hub is not None:
            hint = f"leave it out, and when all parts are written: ckpt publish OUTPUT --push-to-hub {self.push_to_hub}"
            raise UsageError("--push-to-hub needs the whole output, so --part does not apply", hint=hint)
        if self.in_parts and self.write == "sequential":
            hint = f"leave out {self.in_parts}, or --write sequential"
            raise UsageError("parts are written to their positions in the files", hint=hint)
        check_cast_all(self.cast_all, self.dtype)
        wanting = ["--dtype base"] if self.dtype == BASE else []
        wanting += [f"--{name.replace('_', '-')}" for name in needing if getattr(self, name)]
        if wanting and base is None:
            raise UsageError(f"{wanting[0]} needs a base", hint="pass --base with the folder of the base model")

    def check_place(self, output: Path | None) -> None:
        """Raise UsageError for options that an output in a store does not have."""
        if output is None or not is_remote(output):
            return
        if self.in_parts:
            hint = f"leave out {self.in_parts}: one process sends several parts of the files at once"
            raise UsageError(f"{self.in_parts} writes to positions in files, which only disks have", path=output, hint=hint)
        check_way(self.write, output)


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """The options of `publish`, with the meaning that ``ckpt publish --help`` gives them."""

    overwrite: bool = False
    push_to_hub: str | None = None
    private: bool = False
    branch: str | None = None


class PublishKeywords(TypedDict, total=False):
    """`PublishOptions` as callers may give them."""

    overwrite: bool
    push_to_hub: str | None
    private: bool
    branch: str | None


class WritingKeywords(TypedDict, total=False):
    """`WritingOptions` as callers may give them."""

    dtype: DtypeLike | None
    cast_all: bool
    names: Naming
    key_map: PathLike | Sequence[PathLike]
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    max_shard_size: int | str | None
    weights_name: str | None
    carry_from_base: str | Sequence[str]
    allow_missing: str | Sequence[str]
    overwrite: bool
    dry_run: bool
    jobs: int | None
    checksum: bool
    allow_overflow: bool
    allow_unequal_replicas: bool
    shard_order: ShardOrder
    strict: bool
    part: str | None
    engine: Engine
    ray_address: str | None
    ray_parts: int | None
    write: Write
    push_to_hub: str | None
    private: bool
    branch: str | None


def check_cast_all(cast_all: bool, dtype: str | None) -> None:
    """Raise UsageError if ``cast_all`` has nothing to say about a dtype."""
    if cast_all and dtype not in HALVES:
        raise UsageError("--cast-all is for --dtype bf16 and fp16: otherwise nothing is kept in fp32", hint="leave it out")


def check_way(write: Write, output: Path | None) -> None:
    """Raise UsageError for a way of filling files that an output in a store does not have."""
    if write == "positioned" and output is not None and is_remote(output):
        hint = "leave out --write"
        raise UsageError("--write positioned writes to positions in files, which only disks have", path=output, hint=hint)


def check_writing(weights_name: str | None, jobs: int | None, max_shard_size: int | None) -> None:
    """Raise UsageError for invalid options of writing."""
    if weights_name is not None and not re.fullmatch(r"[\w-][\w.-]*\.safetensors", weights_name):
        raise UsageError("the weights name is not a plain name of a safetensors file", expected="a name such as model.safetensors")
    if weights_name is not None and TAKEN.fullmatch(weights_name):
        what = f"{weights_name} means something else to what loads models: a part of a set, an adapter, or weights under other names"
        raise UsageError(what, expected="a name such as model.safetensors")
    if jobs is not None and not 1 <= jobs <= 256:
        raise UsageError("--jobs is out of range", expected="1 to 256", hint="leave --jobs out, and ckpt chooses")
    if max_shard_size is not None and max_shard_size < 1:
        raise UsageError("--max-shard-size is out of range", expected="a size such as 5GB")
