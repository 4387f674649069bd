"""What `merge`, `average` and `extract-state` wrote, or would write."""

from __future__ import annotations

from typing import Any

from ckpt_cli.results.checkpoint import Checkpoint, Frozen, LoraInfo, NoteInfo, Place
from ckpt_cli.results.drift import BaseComparison
from ckpt_cli.results.verify import VerifyResult


class FileInfo(Frozen):
    """A file that was, or would be, written; of a training state that would be, ``bytes`` is about its size."""

    name: str
    bytes: int


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


class PartDone(Frozen):
    """One part of an output, of ``count``; ``done`` are those that were written by then (parts are counted from 0).

    ``launched``: a launcher started all parts, and the one that is done last gives the output its name (``published``).
    """

    number: int
    count: int
    done: tuple[int, ...]
    launched: bool = False
    published: bool = False


class WrittenFolder(Frozen):
    """One folder that was, or would be, written. Sizes are in bytes, ``dtypes`` counts elements, ``naming`` says whose names these are.

    ``compared`` is what the names were compared with, None where nothing is known to compare them with (``naming`` says why).
    ``carried`` are tensors that were taken from the base. ``part``: only this part of it was written.
    """

    component: str
    output: Place
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
    part: PartDone | None = None
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

    path: Place
    step: int | None
    component: str
    format: str
    weight: float
    coefficient: float
    bytes: int


class AveragedComponent(WrittenFolder):
    """An averaged component: ``averaged`` tensors are weighted sums, ``copied`` ones (``copied_names``) are those of the last source."""

    sources: tuple[AverageSource, ...]
    averaged: int
    copied: int
    copied_names: tuple[str, ...] = ()


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


class PublishedFolder(Frozen):
    """An output that was published; ``parts`` is 0 if that was done before."""

    output: Place
    parts: int
    files: tuple[FileInfo, ...]
    tensors: int


class PublishResult(Frozen):
    """What `publish` did."""

    outputs: tuple[PublishedFolder, ...]
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

    path: Place
    step: int | None
    component: str
    framework: str
    output: Place
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
