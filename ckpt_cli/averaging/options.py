"""The options of `average`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from ckpt_cli.averaging.coefficients import DecayShape, Method
from ckpt_cli.formats.base import ShardOrder
from ckpt_cli.given import DtypeLike, PathLike
from ckpt_cli.names import Naming


@dataclass(frozen=True, slots=True)
class AverageOptions:
    """The options of `average`, with the meaning that ``ckpt average --help`` gives them.

    ``begin`` and ``end`` are ``--from`` and ``--to``; ``max_shard_size`` is in bytes; see `coefficients.formula` for which options
    belongs to which ``method`` (None: uniform, or what the other options imply).
    """

    everything: bool = False
    last: int | None = None
    begin: int | None = None
    end: int | None = None
    every: int | None = None
    steps: tuple[int, ...] = ()
    method: Method | None = None
    weights: tuple[float, ...] | None = None
    normalize: bool = True
    decay: float | None = None
    half_life: float | None = None
    decay_shape: DecayShape | None = None
    sigma_rel: float | None = None
    source_sigma_rel: float | None = None
    dtype: str = "keep"
    names: Naming = "hub"
    intersect: bool = False
    strict: bool = False
    carry_from_base: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    key_map: str | os.PathLike[str] | None = None
    max_shard_size: int | None = None
    weights_name: str | None = None
    overwrite: bool = False
    jobs: int | None = None
    dry_run: bool = False
    checksum: bool = False
    allow_overflow: bool = False
    allow_non_finite: bool = False
    allow_unequal_replicas: bool = False
    shard_order: ShardOrder = "auto"

    @property
    def implied_method(self) -> Method:
        """The requested method, by name or by an option that only one method has."""
        if self.method is not None:
            return self.method
        if self.weights is not None:
            return "weighted"
        if self.decay is not None or self.half_life is not None:
            return "ema"
        if self.decay_shape is not None:
            return "wsm"
        return "uniform" if self.sigma_rel is None else "posthoc-ema"


class AverageKeywords(TypedDict, total=False):
    """The keyword arguments of `average` besides paths: `AverageOptions` as callers may give them."""

    everything: bool
    last: int | None
    begin: int | None
    end: int | None
    every: int | None
    steps: int | str | Sequence[int]
    method: Method | None
    weights: float | str | Sequence[float] | None
    normalize: bool
    decay: float | None
    half_life: float | None
    decay_shape: DecayShape | None
    sigma_rel: float | None
    source_sigma_rel: float | None
    dtype: DtypeLike
    names: Naming
    intersect: bool
    strict: bool
    carry_from_base: str | Sequence[str]
    allow_missing: str | Sequence[str]
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    key_map: PathLike | None
    max_shard_size: int | str | None
    weights_name: str | None
    overwrite: bool
    jobs: int | None
    dry_run: bool
    checksum: bool
    allow_overflow: bool
    allow_non_finite: bool
    allow_unequal_replicas: bool
    shard_order: ShardOrder
