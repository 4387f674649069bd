"""What `diff` returns."""

from __future__ import annotations

from ckpt_cli.results.checkpoint import Frozen, NoteInfo, Place
from ckpt_cli.results.drift import BaseComparison


class DiffSide(Frozen):
    """One of the two that were compared."""

    path: Place
    step: int | None
    component: str
    format: str
    tensors: int
    elements: int
    bytes: int


class DiffResult(Frozen):
    """How far tensors moved from ``before`` (the base of ``comparison``) to ``after``.

    ``identical``: both have the same names, shapes, dtypes and bits (of a sample: in what was compared), and adapters the same scales:
    ``rescaled`` modules have another in the second. ``compared`` tensors have the same name and shape in both; with 0 nothing is known of
    any value. ``written`` are the files that hold the picture and the page.
    """

    before: DiffSide
    after: DiffSide
    naming: str
    identical: bool
    compared: int
    comparison: BaseComparison
    rescaled: int = 0
    written: tuple[str, ...] = ()
    notes: tuple[NoteInfo, ...] = ()
    seconds: float
