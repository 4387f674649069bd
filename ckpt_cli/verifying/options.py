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


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of `verify`, with the meaning that ``ckpt verify --help`` gives them.

    ``sample`` is a share of the values (0 to 1), which is then read instead of all; ``names``, ``key_map``, ``include`` and
    ``exclude`` say how tensors of ``against`` were named and chosen, where the manifest of the output does not.
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
    ) -> Asked:
        """Of the arguments of a caller. Raises UsageError."""
        chosen, source = options_of(VerifyOptions, options), optional_path(against, "--against")
        if chosen.sample is not None and not 0 < chosen.sample <= 1:
            raise UsageError("--sample is out of range", expected="more than 0% and at most 100%")
        if chosen.jobs is not None and not 1 <= chosen.jobs <= 256:
            raise UsageError("--jobs is out of range", expected="1 to 256")
        return cls(path_of(path), chosen, text_of(type, "--type"), int_of(step, "--step"), paths_of(also, "--also"), source)


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
