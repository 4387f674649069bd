"""What commands return, and the JSON envelope around it."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field, PlainSerializer

from ckpt_cli.errors import CkptError
from ckpt_cli.results.checkpoint import Checkpoint, Frozen, NoteInfo

SCHEMA = 1


def _json_number(value: float | None) -> float | str | None:
    """JSON has no word for infinities and NaN: they are text there."""
    return value if value is None or math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


Number = Annotated[float | None, PlainSerializer(_json_number, when_used="json")]
"""A measured number, None where there is none."""


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


class ErrorInfo(Frozen):
    """An error as ``--json`` tells it."""

    code: str
    message: str
    hint: str | None = None
    path: str | None = None
    tensor: str | None = None
    expected: str | None = None
    details: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: CkptError) -> ErrorInfo:
        return cls(
            code=error.code,
            message=_clean(error.message),
            hint=_clean(error.advice),
            path=_clean(error.path),
            tensor=_clean(error.tensor),
            expected=_clean(error.expected),
            details=tuple(_clean(line) for line in error.details),
        )


def _clean(text: str | None) -> Any:
    """Text that JSON can carry: file names that are no UTF-8 are escaped."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


class DetectResult(Frozen):
    """A checkpoint; ``problem`` says why it cannot be merged, ``exit_code`` is what `merge` would end with, ``error`` the whole error."""

    checkpoint: Checkpoint
    problem: str | None = None
    exit_code: int = 0
    error: ErrorInfo | None = Field(default=None, exclude=True)


class FileInfo(Frozen):
    """A file that was, or would be, written."""

    name: str
    bytes: int


class TensorDrift(Frozen):
    """How far a tensor is from the base, in float64; `ckpt_cli.verifying.drift.distances` says what each number is.

    ``changed`` of ``compared`` elements differ (``compared`` is less than ``elements`` for a sample). ``cosine_distance`` is 1 - cosine
    with all its digits. The numbers are None for packed dtypes, of which only the bytes are compared; the cosine also where a
    norm is 0.
    """

    name: str
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
    """The drift of tensors whose names differ in numbers only.

    ``mean_abs`` is over all elements, ``l2``, ``base_norm`` and ``relative_l2`` are of all tensors as one vector, ``cosine`` is the
    smallest.
    """

    pattern: str
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
    """A stack of layers, such as ``model.layers``: the numbers of its layers, and one row per module."""

    stack: str
    layers: tuple[int, ...]
    rows: tuple[HeatmapRow, ...]


class Heatmap(Frozen):
    """Relative L2 per layer and module; rows of ``outside`` (embeddings, head) have one value."""

    blocks: tuple[HeatmapBlock, ...] = ()
    outside: tuple[HeatmapRow, ...] = ()


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
    ``drifts`` lists those that changed, ``groups`` all of them, both with the biggest drift first. ``sample`` is the share of the
    elements that was to be compared, None for all.
    """

    base: str
    common: int
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    reshaped: tuple[str, ...]
    other_dtype: tuple[str, ...]
    changes: tuple[FormChange, ...] = ()
    formats: tuple[FormatFact, ...] = ()
    sample: float | None = None
    unchanged: int | None = None
    drifts: tuple[TensorDrift, ...] = ()
    groups: tuple[DriftGroup, ...] = ()
    frozen: tuple[FrozenPart, ...] = ()
    heatmap: Heatmap | None = None


class Finding(Frozen):
    """One result of a check: a stable ``code``, "error", "warning" or "info", and where; ``numbers`` are what was measured."""

    code: str
    severity: str
    message: str
    tensor: str | None = None
    file: str | None = None
    numbers: dict[str, float | int | str] = Field(default_factory=dict)


class LoraInfo(Frozen):
    """What became of LoRA adapters: "fused", "exported" or "kept"; ranks and scales that occur, and where alpha comes from."""

    outcome: str
    modules: int
    ranks: tuple[int, ...]
    scales: tuple[float, ...]
    alpha: float | None
    origin: str
    dora: bool = False


class SourceComparison(Frozen):
    """Output tensors against those of a source: how many were compared, how many of them after a cast, and how many differ.

    ``from_base`` more tensors were taken from the base and compared with it. ``lora``: adapters were fused before.
    """

    source: str
    component: str
    tensors: int
    bytes: int
    from_base: int = 0
    cast: int
    different: int
    lora: LoraInfo | None = None

    @property
    def identical(self) -> bool:
        return self.different == 0


class VerifyResult(Frozen):
    """What `verify` found. ``levels`` are the checks that ran; ``naming`` says with whose names the tensors were compared.

    ``names`` is what came of that, in a line; ``wrapped``: TRL's prefix stands in front of
    the names. ``notes`` are what opening the checkpoint, its source and the base said: a step that was
    skipped, say.
    ``made_from`` is the checkpoint that the manifest names, if it is still there, ``made_of`` the component of it, ``made_by`` the
    command that would merge it again; ``expected`` counts the tensors that the model
    class has, None if that is not known; ``bytes_read`` of ``bytes`` were read for ``full``.
    """

    path: str
    component: str
    format: str
    files: int
    tensors: int
    elements: int
    bytes: int
    dtypes: dict[str, int]
    architecture: str | None
    levels: tuple[str, ...]
    made_from: str | None = None
    made_of: str | None = None
    made_by: tuple[str, ...] = ()
    expected: int | None = None
    naming: str | None = None
    names: str | None = None
    wrapped: bool = False
    checksums: int = 0
    bytes_read: int = 0
    findings: tuple[Finding, ...] = ()
    against: tuple[SourceComparison, ...] = ()
    comparison: BaseComparison | None = None
    seconds: float = 0.0
    notes: tuple[NoteInfo, ...] = ()

    @property
    def loads(self) -> bool:
        """Whether the class that config.json names was compared, and nothing that it needs is missing."""
        lacking = {"missing-tensor", "left-out", "missing-layers", "not-proved", "wrong-shape", "unknown-names", "prefixed-names"}
        return self.expected is not None and self.wrapped is False and not lacking & {item.code for item in self.findings}

    def of_severity(self, severity: str) -> list[Finding]:
        """The findings of one severity."""
        return [finding for finding in self.findings if finding.severity == severity]

    @property
    def exit_code(self) -> int:
        """1 if anything is wrong."""
        return 1 if self.of_severity("error") else 0


class ClassComparison(Frozen):
    """Tensors against those of the model class that config.json names; ``shapes``: shapes were compared as well as names.

    ``fitting`` of ``expected`` tensors of the class are there (``expected`` is None where only names by pattern are known). ``extra``
    are tensors without a place in the class.
    """

    architecture: str
    origin: str
    shapes: bool
    expected: int | None
    fitting: int
    missing: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


class WrittenFolder(Frozen):
    """One folder that was, or would be, written. Sizes are in bytes, ``dtypes`` counts elements, ``naming`` says whose names these are.

    ``compared`` is what the names were compared with, None where nothing is known to compare them with (``naming`` says why).
    ``carried`` are tensors that were taken from the base.
    """

    component: str
    output: str
    files: tuple[FileInfo, ...]
    tensors: int
    elements: int
    bytes_read: int
    bytes_written: int
    dtypes: dict[str, int]
    cast: int
    renamed: int
    naming: str
    compared: ClassComparison | None = None
    carried: tuple[str, ...] = ()
    dropped: dict[str, str]
    left_out: int
    assets: tuple[str, ...]
    lacking: tuple[str, ...]
    overflows: dict[str, int]
    disk_free: int | None
    peak_memory: int
    plan_digest: str
    notes: tuple[NoteInfo, ...] = ()


class MergedComponent(WrittenFolder):
    """A merged component. Shards cover ``covered_elements`` of ``source_elements``; ``elements`` of them were written.

    ``state`` names the files of ``--with-state``; ``verified`` is what ``--verify`` found, one per component.
    """

    covered_elements: int
    source_elements: int
    state: tuple[str, ...] = ()
    lora: LoraInfo | None = None
    comparison: BaseComparison | None = None
    verified: tuple[VerifyResult, ...] = ()


class MergeResult(Frozen):
    """What `merge` did (or, with ``dry_run``, would do)."""

    checkpoint: Checkpoint
    outputs: tuple[MergedComponent, ...]
    dry_run: bool
    seconds: float

    @property
    def exit_code(self) -> int:
        """1 if an output was verified and is not what it should be."""
        return max((verified.exit_code for output in self.outputs for verified in output.verified), default=0)


class AverageSource(Frozen):
    """One checkpoint of an average. It enters as ``weight`` times its value; ``coefficient`` is the weight over the divisor."""

    path: str
    step: int | None
    component: str
    format: str
    weight: float
    coefficient: float
    bytes: int


class AveragedComponent(WrittenFolder):
    """An averaged component: ``averaged`` tensors are weighted sums, ``copied`` ones are equal everywhere or the newest's."""

    sources: tuple[AverageSource, ...]
    averaged: int
    copied: int


class AverageResult(Frozen):
    """What `average` did (or would do): every averaged element is sum(weight * value) / ``divisor``, rounded once.

    ``checkpoint`` is the newest one; assets are those of the newest one with a config.json.
    """

    checkpoint: Checkpoint
    method: str
    divisor: float
    outputs: tuple[AveragedComponent, ...]
    dry_run: bool
    seconds: float
    notes: tuple[NoteInfo, ...] = ()


class OptimizerInfo(Frozen):
    """An optimizer's state, merged per parameter: how it was laid out, and how much there is of it."""

    layout: str
    parameters: int
    tensors: int
    elements: int
    bytes: int
    groups: int


class ExtractResult(Frozen):
    """What `extract_state` wrote (or would write).

    ``random`` names the random states (``cuda`` and other devices: lists over ``ranks``); ``copied`` files were not read;
    ``not_represented`` lists objects that only their own classes could rebuild.
    """

    path: str
    step: int | None
    component: str
    framework: str
    output: str
    files: tuple[FileInfo, ...]
    ranks: int
    scheduler: dict[str, Any] | None
    training: dict[str, Any]
    random: tuple[str, ...]
    copied: tuple[str, ...]
    not_represented: tuple[str, ...]
    optimizer: OptimizerInfo | None
    dry_run: bool
    seconds: float
    notes: tuple[NoteInfo, ...] = ()


class Envelope(Frozen):
    """The one document that ``--json`` prints, on success and on failure."""

    schema_version: int
    command: str
    status: str
    exit_code: int
    data: dict[str, Any] | None
    errors: tuple[ErrorInfo, ...]

    def to_json(self) -> str:
        """The document as text, ASCII only, with the key "schema" for the version."""
        import json

        content = self.model_dump(mode="json")
        return json.dumps({"schema": content.pop("schema_version"), **content}, indent=2)
