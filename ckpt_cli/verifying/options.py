"""The options of `verify` and `diff`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from ckpt_cli.errors import UsageError
from ckpt_cli.given import PathLike, int_of, optional_path, options_of, path_of, paths_of, text_of
from ckpt_cli.names import Naming, ShardOrder
from ckpt_cli.output.part import Engine, Part, check_engine
from ckpt_cli.progress import Progress


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of `verify`, with the meaning that ``ckpt verify --help`` gives them.

    ``sample`` is a share of the values (0 to 1), which is then read instead of all; ``names``, ``key_map``, ``include`` and
    ``exclude`` say how tensors of ``against`` were named and chosen, where the manifest of the output does not. ``engine`` is who
    reads: without ``ray_address``, Ray looks for a cluster itself; without ``ray_parts``, there are as many parts as run at once.
    """

    full: bool = False
    sample: float | None = None
    names: Naming | None = None
    key_map: tuple[str | os.PathLike[str], ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    lora_alpha: float | None = None
    shard_order: ShardOrder = "auto"
    jobs: int | None = None
    engine: Engine = "local"
    ray_address: str | None = None
    ray_parts: int | None = None

    @property
    def reads_weights(self) -> bool:
        """Whether values are read, by these options alone."""
        return self.full or self.sample is not None

    @property
    def said(self) -> dict[str, Any]:
        """The user's options about how the output was made."""
        names = ("names", "key_map", "include", "exclude", "lora_alpha")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


@dataclass(frozen=True, slots=True)
class Asked:
    """A verification as it was asked for: what is checked, against what, and how."""

    path: Path
    options: VerifyOptions
    type: str | None = None
    step: int | None = None
    also: tuple[Path, ...] = ()
    against: Path | None = None

    @classmethod
    def of(
        cls,
        path: object,
        options: Mapping[str, Any],
        *,
        type: object = None,
        step: object = None,
        also: object = (),
        against: object = None,
        part: Part | None = None,
    ) -> Asked:
        """Of the arguments of a caller, who may ask for a part. Raises UsageError."""
        chosen, source = options_of(VerifyOptions, options), optional_path(against, "--against")
        if chosen.sample is not None and not 0 < chosen.sample <= 1:
            raise UsageError("--sample is out of range", expected="more than 0% and at most 100%", hint="5% is 0.05")
        if chosen.jobs is not None and not 1 <= chosen.jobs <= 256:
            raise UsageError("--jobs is out of range", expected="1 to 256", hint="leave --jobs out, and ckpt chooses")
        check_engine(chosen.engine, chosen.ray_address, chosen.ray_parts, part)
        asked = cls(path_of(path), chosen, text_of(type, "--type"), int_of(step, "--step"), paths_of(also, "--also"), source)
        shares = "--part" if part is not None else "--engine ray" if chosen.engine == "ray" else None
        if shares is not None and not (chosen.reads_weights or asked.against is not None):
            what = "shares out what is read, and without --full or --against that is headers alone"
            raise UsageError(f"{shares} {what}", hint=f"leave out {shares}")
        return asked


class Reading(TypedDict):
    """How values are read: by so many threads, with this display."""

    jobs: int | None
    progress: Progress | None


class VerifyKeywords(TypedDict, total=False):
    """The keyword arguments of `verify` besides paths: `VerifyOptions` as callers may give them."""

    full: bool
    sample: float | str | None
    names: Naming | None
    key_map: PathLike | Sequence[PathLike]
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    lora_alpha: float | None
    shard_order: ShardOrder
    jobs: int | None
    engine: Engine
    ray_address: str | None
    ray_parts: int | None


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """The options of `diff`. ``names`` None takes those (of the hub, or as trained) of which both have most in common.

    ``sample``: compare about this share of the elements (0 to 1); ``include`` and ``exclude`` are globs for whole names.
    """

    names: Naming | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    sample: float | None = None
    shard_order: ShardOrder = "auto"
    jobs: int | None = None


class DiffKeywords(TypedDict, total=False):
    """The keyword arguments of `diff` besides paths: `DiffOptions` as callers may give them."""

    names: Naming | None
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    sample: float | str | None
    shard_order: ShardOrder
    jobs: int | None
