"""The options of `verify` and `diff`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from ckpt_cli.given import PathLike
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
