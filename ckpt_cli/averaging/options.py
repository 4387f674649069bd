"""The options of `average`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt_cli.output.options import WritingKeywords, WritingOptions

Method = Literal["uniform", "weighted", "linear", "ema", "wsm", "posthoc-ema"]
DecayShape = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True, slots=True)
class AverageOptions(WritingOptions):
    """The options of `average`, with the meaning that ``ckpt average --help`` gives them.

    ``begin`` and ``end`` are ``--from`` and ``--to``; see `coefficients.formula` for which options belong to which
    ``method`` (None: uniform, or what the other options imply).
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
    intersect: bool = False
    allow_non_finite: bool = False

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


class AverageKeywords(WritingKeywords, total=False):
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
    intersect: bool
    allow_non_finite: bool
