"""What `detect`, `inspect` and `report` return."""

from __future__ import annotations

from pydantic import Field

from ckpt_cli.results.checkpoint import Checkpoint, Frozen, NoteInfo, Place
from ckpt_cli.results.drift import Coverage, Heatmap
from ckpt_cli.results.envelope import ErrorInfo
from ckpt_cli.results.numbers import Number


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


class StepReport(Frozen):
    """One step of a run: whether all of it is there, whether it can be merged (``problem``: why not), and its bytes by kind.

    ``partly_broken``: which components are complete, and what the others lack, if not all are. ``freeable`` bytes are no longer needed to
    merge a step or to go on from the newest. ``differs``: how its tensors differ from those of the step before, by headers; ``drift``:
    how far their values are from it (relative L2 of all floating-point tensors as one vector), if that was asked for, and ``coverage``:
    how much of both steps that is about. ``label`` is as in `StepInfo`.
    """

    step: int | None
    label: str | None = None
    path: Place
    components: tuple[str, ...]
    complete: bool
    mergeable: bool
    problem: str | None = None
    partly_broken: str | None = None
    weights: int
    optimizer: int
    other: int
    freeable: int
    differs: str | None = None
    drift: Number = None
    coverage: Coverage | None = None

    @property
    def called(self) -> str:
        return self.label or str(self.step)

    @property
    def partly(self) -> str | None:
        """How much of both steps the drift is about, if that is not all of it."""
        found = self.coverage
        if found is None or not found.partial:
            return None
        return f"drift of {found.elements:,} elements only, of {max(found.mine, found.base):,}"


class ReportResult(Frozen):
    """A run, step by step, oldest first; ``newest`` is the path of the newest step that can be merged.

    ``size`` is what all steps take on the disk: a file that is in several of them, by links, counts once. ``drift`` is a map of all steps
    that have one before them; ``written`` is the page, if one was asked for.
    """

    path: Place
    framework: str
    steps: tuple[StepReport, ...]
    size: int
    newest: Place | None = None
    drift: Heatmap | None = None
    sample: float | None = None
    written: Place | None = None
    notes: tuple[NoteInfo, ...] = ()
    seconds: float

    @property
    def freeable(self) -> int:
        return sum(step.freeable for step in self.steps)
