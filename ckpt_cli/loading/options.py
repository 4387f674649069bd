"""The options of `open`, `load_state_dict` and `load_into`: what is read, under which names, as which dtype."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from ckpt_cli.formats.base import ShardOrder
from ckpt_cli.given import DtypeLike, PathLike
from ckpt_cli.names import Naming


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """The options of `open` and `load_state_dict`, with the meaning that they have for `merge`.

    ``checksum``: compare every record of a torch file that is read whole with its CRC-32, which takes about a quarter more CPU.
    """

    names: Naming = "hub"
    dtype: str | None = None
    cast_all: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    key_map: tuple[str | os.PathLike[str], ...] = ()
    lora_alpha: float | None = None
    ema_from_model: bool = False
    allow_unequal_replicas: bool = False
    shard_order: ShardOrder = "auto"
    checksum: bool = False


class OpenKeywords(TypedDict, total=False):
    """The keyword arguments of `open` and `load_state_dict` besides paths: `OpenOptions` as callers may give them."""

    names: Naming
    dtype: DtypeLike | None
    cast_all: bool
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    key_map: PathLike | Sequence[PathLike]
    lora_alpha: float | None
    ema_from_model: bool
    allow_unequal_replicas: bool
    shard_order: ShardOrder
    checksum: bool


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of `load_into`. ``names`` None takes those (as trained, or of the hub) that the model has.

    ``strict``: tensors that only one side has are an error, but for those that ``allow_missing`` (globs) expects to be missing in the
    checkpoint; otherwise what both have is loaded. ``checksum``: compare every record that this process reads whole with its CRC-32.
    """

    strict: bool = True
    allow_missing: tuple[str, ...] = ()
    names: Naming | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    key_map: tuple[str | os.PathLike[str], ...] = ()
    lora_alpha: float | None = None
    ema_from_model: bool = False
    allow_unequal_replicas: bool = False
    allow_overflow: bool = False
    shard_order: ShardOrder = "auto"
    checksum: bool = False
    jobs: int | None = None


class LoadKeywords(TypedDict, total=False):
    """The keyword arguments of `load_into` besides paths: `LoadOptions` as callers may give them."""

    strict: bool
    allow_missing: str | Sequence[str]
    names: Naming | None
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    key_map: PathLike | Sequence[PathLike]
    lora_alpha: float | None
    ema_from_model: bool
    allow_unequal_replicas: bool
    allow_overflow: bool
    shard_order: ShardOrder
    checksum: bool
    jobs: int | None
