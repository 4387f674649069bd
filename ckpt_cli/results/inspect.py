"""What `detect` and `inspect` return."""

from __future__ import annotations

from pydantic import Field

from ckpt_cli.results.checkpoint import Checkpoint, Frozen
from ckpt_cli.results.envelope import ErrorInfo


class TensorGroup(Frozen):
    """One row of `inspect`: tensors whose names differ in layer numbers only and that are alike in everything else.

    ``pattern`` is the name with ranges such as ``{0..27}``; ``odd`` marks a group that differs from the others of its
    pattern; ``elements`` counts all tensors of the group, once where they share a storage.
    """

    pattern: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    layout: str
    elements: int
    odd: bool = False


class InspectResult(Frozen):
    """A checkpoint and, per component that was read, its tensors in groups."""

    checkpoint: Checkpoint
    groups: dict[str, tuple[TensorGroup, ...]]


class DetectResult(Frozen):
    """A checkpoint; ``problem`` says why it cannot be merged, ``exit_code`` is what `merge` would end with, ``error`` the whole error."""

    checkpoint: Checkpoint
    problem: str | None = None
    exit_code: int = 0
    error: ErrorInfo | None = Field(default=None, exclude=True)
