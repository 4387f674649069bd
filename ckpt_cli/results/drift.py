"""How far tensors are from those of a base model: per tensor, in groups, and as a map."""

from __future__ import annotations

from typing import Literal

from ckpt_cli.names import plural
from ckpt_cli.results.checkpoint import Frozen, Place
from ckpt_cli.results.numbers import Number

Kind = Literal["floating", "integer", "packed"]
"""Of which tensors distances are measured: those of floating-point (or complex) numbers. Integers and booleans count or select, and packed
elements are no numbers on their own: of these it is only known how many elements differ."""


NOTHING = "nothing could be compared: no tensor has the same name and shape in both"


class TensorDrift(Frozen):
    """How far a tensor is from the base, in float64; `ckpt_cli.verifying.drift.distances` says what each number is.

    ``changed`` of ``compared`` elements differ (``compared`` is less than ``elements`` for a sample). ``cosine_distance`` is 1 - cosine
    with all its digits. The numbers are None where ``kind`` is not "floating"; the cosine also where a norm is 0.
    """

    name: str
    kind: Kind = "floating"
    elements: int
    compared: int
    changed: int
    max_abs: Number = None
    mean_abs: Number = None
    l2: Number = None
    base_norm: Number = None
    relative_l2: Number = None
    cosine: Number = None
    cosine_distance: Number = None


class DriftGroup(Frozen):
    """The drift of tensors of one ``kind`` whose names differ in numbers only.

    ``mean_abs`` is over all elements, ``l2``, ``base_norm`` and ``relative_l2`` are of all tensors as one vector, ``cosine`` is the
    smallest.
    """

    pattern: str
    kind: Kind = "floating"
    tensors: int
    changed_tensors: int
    elements: int
    compared: int
    changed: int
    max_abs: Number = None
    mean_abs: Number = None
    l2: Number = None
    base_norm: Number = None
    relative_l2: Number = None
    cosine: Number = None
    cosine_distance: Number = None


class FrozenPart(Frozen):
    """A part of the model, such as ``visual.*``, in which every tensor is as in the base."""

    part: str
    tensors: int


class HeatmapRow(Frozen):
    """Relative L2 of one module in every layer: None where there is no such module (or no number), 0 where nothing changed."""

    module: str
    values: tuple[Number, ...]


class HeatmapBlock(Frozen):
    """A stack of layers, such as ``model.layers``: the numbers of its layers, and one row per module.

    ``axis`` is what the numbers count: of a run, these are steps, and have ``labels`` where they are counted anew in each epoch.
    """

    stack: str
    layers: tuple[int, ...]
    rows: tuple[HeatmapRow, ...]
    axis: str = "layer"
    labels: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.labels or tuple(map(str, self.layers))


class Heatmap(Frozen):
    """Relative L2 per layer and module; rows of ``outside`` (embeddings, head) have one value."""

    blocks: tuple[HeatmapBlock, ...] = ()
    outside: tuple[HeatmapRow, ...] = ()


class Coverage(Frozen):
    """How much of both sides was compared by value: ``elements`` of the ``mine`` elements here, and of the ``base`` elements there.

    The rest has a name that only one side has, or another shape there.
    """

    elements: int
    mine: int
    base: int

    @property
    def partial(self) -> bool:
        return self.elements < max(self.mine, self.base)


class FormChange(Frozen):
    """A tensor that has another shape or dtype than in the base."""

    name: str
    shape: tuple[int, ...]
    base_shape: tuple[int, ...]
    dtype: str
    base_dtype: str


class FormatFact(Frozen):
    """In which form each side has some part of the model."""

    what: str
    mine: str
    base: str


class BaseComparison(Frozen):
    """Tensors against a base: names that only one has, tensors of other shape or dtype; values if they were compared.

    ``changes`` gives both shapes and dtypes. ``unchanged`` and what follows it is about tensors that both have in one shape:
    ``drifts`` lists those that changed, ``groups`` all of them, both with the biggest drift first, and ``coverage`` says how much of each
    side they are. ``sample`` is the share of their elements that was to be compared, None for all.
    """

    base: Place
    common: int
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    reshaped: tuple[str, ...]
    other_dtype: tuple[str, ...]
    changes: tuple[FormChange, ...] = ()
    formats: tuple[FormatFact, ...] = ()
    sample: float | None = None
    coverage: Coverage | None = None
    unchanged: int | None = None
    drifts: tuple[TensorDrift, ...] = ()
    groups: tuple[DriftGroup, ...] = ()
    frozen: tuple[FrozenPart, ...] = ()
    heatmap: Heatmap | None = None

    @property
    def compared(self) -> int:
        """How many tensors were compared by value."""
        return len(self.drifts) + (self.unchanged or 0)

    @property
    def counted(self) -> str:
        """How many of them differ, in words."""
        return f"{len(self.drifts)} of {plural(self.compared, 'tensor')} differ" if self.compared else NOTHING
