"""What `merge`, `average` and `extract-state` wrote, or would write."""

from __future__ import annotations

from typing import Any, Literal

from ckpt_cli.results.checkpoint import Checkpoint, Frozen, LoraInfo, NoteInfo, Place, StepInfo
from ckpt_cli.results.drift import BaseComparison
from ckpt_cli.results.envelope import ErrorInfo
from ckpt_cli.results.verify import VerifyResult


class FileInfo(Frozen):
    """A file that was, or would be, written; of a training state that would be, ``bytes`` is about its size."""

    name: str
    bytes: int


class ClassComparison(Frozen):
    """Tensors against those of the model class that config.json names; ``shapes``: shapes were compared as well as names.

    ``fitting`` of ``expected`` tensors of the class are there (``expected`` is None where only names by pattern are known). ``extra``
    are tensors without a place in the class, ``optional`` those that are not there and that loaders do without, or make anew.
    """

    architecture: str
    origin: str
    shapes: bool
    expected: int | None
    fitting: int
    missing: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


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
    ``side_checksums`` are the CRC-32 of the files beside the weights.
    ``kept_in_fp32`` are tensors that ``--dtype`` leaves, or makes, fp32, since transformers loads them so.
    ``carried`` are tensors that were taken from the base. ``part``: only this part of it was written. ``verified`` is what was found
    when it was verified, one per component. ``replaced``: a folder of this name was, or would be, replaced.
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
    kept_in_fp32: tuple[str, ...] = ()
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
    side_checksums: dict[str, int]
    part: PartDone | None = None
    replaced: bool = False
    verified: tuple[VerifyResult, ...] = ()
    notes: tuple[NoteInfo, ...] = ()


class PublishedFolder(Frozen):
    """An output that was published; ``parts`` is 0 if that was done before. ``verified`` is as in `WrittenFolder`."""

    output: Place
    parts: int
    files: tuple[FileInfo, ...]
    tensors: int
    verified: tuple[VerifyResult, ...] = ()


class MergedComponent(WrittenFolder):
    """A merged component. Shards cover ``covered_elements`` of ``source_elements``; ``elements`` of them were written.

    ``state`` names the files of ``--with-state``.
    """

    covered_elements: int
    source_elements: int
    state: tuple[str, ...] = ()
    lora: LoraInfo | None = None
    comparison: BaseComparison | None = None


class PushInfo(Frozen):
    """An output in a repository of the Hub: how many ``files`` of how many bytes the commit consists of.

    ``asked`` is the repository as it was given, ``repo`` the same with its namespace. ``commit`` is None if nothing was pushed: in a dry
    run, or because of ``error``. ``card``: README.md was "written", or the one of the repository was "kept", since people wrote it.
    ``removed`` are files there that ckpt wrote before and this output does not have, and parts of weights that it replaces.
    """

    asked: str
    repo: str
    branch: str
    url: str
    commit: str | None = None
    files: int = 0
    bytes: int = 0
    card: Literal["written", "kept"] | None = None
    removed: tuple[str, ...] = ()
    notes: tuple[NoteInfo, ...] = ()
    seconds: float = 0.0
    error: ErrorInfo | None = None

    @property
    def exit_code(self) -> int:
        """5 if the output was not pushed although it should be."""
        return 5 if self.error is not None else 0


class Delivered(Frozen):
    """What a command did that writes outputs and may push one of them to the Hub."""

    outputs: tuple[WrittenFolder | PublishedFolder, ...]
    push: PushInfo | None = None

    @property
    def error(self) -> ErrorInfo | None:
        """Why nothing was pushed although it should be; the output stands."""
        return self.push.error if self.push is not None else None

    @property
    def exit_code(self) -> int:
        """1 if an output was verified and is not what it should be, else 5 if it was not pushed."""
        wrong = any(verified.exit_code for output in self.outputs for verified in output.verified)
        return 1 if wrong else self.push.exit_code if self.push is not None else 0


class MergeResult(Delivered):
    """What `merge` did (or, with ``dry_run``, would do)."""

    checkpoint: Checkpoint
    outputs: tuple[MergedComponent, ...]
    dry_run: bool
    seconds: float


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


class AverageResult(Delivered):
    """What `average` did (or would do): every averaged element is sum(weight * value) / ``divisor``, rounded once.

    ``checkpoint`` is the newest one; assets are those of the newest one with a config.json. ``passed_over`` are newer steps of the
    run, and why they were not taken.
    """

    checkpoint: Checkpoint
    method: str
    divisor: float
    outputs: tuple[AveragedComponent, ...]
    dry_run: bool
    seconds: float
    passed_over: tuple[StepInfo, ...] = ()
    notes: tuple[NoteInfo, ...] = ()


class PublishResult(Delivered):
    """What `publish` did."""

    outputs: tuple[PublishedFolder, ...]
    notes: tuple[NoteInfo, ...] = ()


class OptimizerInfo(Frozen):
    """An optimizer's state, merged per parameter: how it was laid out, and how much there is of it.

    ``assumed`` parameters have the name that the order of the model gives them: others have their shape, and no file proves it.
    """

    layout: str
    assumed: int = 0
    parameters: int
    tensors: int
    elements: int
    bytes: int
    groups: int


class ExtractResult(Frozen):
    """What `extract_state` wrote (or would write).

    ``random`` names the random states (``cuda`` and other devices: lists over ``ranks``); ``copied`` files were not read;
    ``not_represented`` lists objects that only their own classes could rebuild. ``passed_over`` is as in `AverageResult`.
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
    replaced: bool = False
    passed_over: tuple[StepInfo, ...] = ()
    notes: tuple[NoteInfo, ...] = ()
