"""What `verify` found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from ckpt_cli.files.descriptors import MadeFrom
from ckpt_cli.results.checkpoint import Frozen, LoraInfo, NoteInfo, Place
from ckpt_cli.results.drift import BaseComparison


class Finding(Frozen):
    """One result of a check: a stable ``code``, "error", "warning" or "info", and where; ``numbers`` are what was measured."""

    code: str
    severity: str
    message: Place
    tensor: str | None = None
    file: Place | None = None
    numbers: dict[str, float | int | str] = Field(default_factory=dict)


SEVERITIES = ("error", "warning", "info")
"""From the gravest on."""

Count = Annotated[int, Field(ge=0, lt=2**63)]


class Question(Frozen):
    """What a verification was asked, as its options say; paths are whole. `VerifyOptions` and the arguments of `verify`."""

    path: str
    type: str | None = None
    step: int | None = None
    also: tuple[str, ...] = ()
    against: str | None = None
    full: bool = False
    sample: float | None = None
    names: str | None = None
    key_map: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    lora_alpha: float | None = None
    shard_order: str = "auto"


class CheckedShare(Frozen):
    """What a part found in one check: in its items, from number ``first`` to ``last`` (excluded) of all ``items``.

    ``digest`` is that of all items: names, where their bytes lie, and what they are compared with.
    """

    items: Count
    first: Count
    last: Count
    digest: str
    findings: tuple[Finding, ...] = ()
    bytes_read: Count = 0
    compared: Count = 0


class VerifyPart(Frozen):
    """What part ``part`` (from 0) of ``parts`` of a verification read and found. It is no verdict, which comes from all parts.

    ``digest`` is equal for all parts of one verification: it covers the version, what was asked, size, mtime (ns) and tag of all
    ``files``, and the tensors in them. ``seen`` has device, inode and ctime (ns) of each file as ``machine`` (a digest of its name)
    saw it. ``shares`` are by check; ``against`` is the source as it was given, which a result shows.
    """

    part: Count
    parts: Count
    version: str
    digest: str
    question: Question
    files: dict[str, tuple[Count, int, str]]
    machine: str
    seen: dict[str, tuple[int, int, int]]
    shares: dict[str, CheckedShare]
    against: Place | None = None
    seconds: float = 0.0

    @property
    def made_from(self) -> MadeFrom:
        """The files that it read."""
        return MadeFrom(self.machine, self.files, self.seen)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found in this part of the weights."""
        return tuple(item for share in self.shares.values() for item in share.findings)

    @property
    def exit_code(self) -> int:
        """0: the part is done, whatever it found."""
        return 0


class SourceComparison(Frozen):
    """Output tensors against those of a source: how many were compared, how many of them after a cast, and how many differ.

    ``from_base`` more tensors were taken from the base and compared with it. ``lora``: adapters were fused before.
    """

    source: Place
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
    """What `verify` found. ``levels`` are the checks that ran; ``naming`` says with which names the tensors were compared.

    ``names`` is what came of that, in a line; ``wrapped``: TRL's prefix stands in front of
    the names. ``notes`` are what opening the checkpoint, its source and the base said: a step that was
    skipped, say.
    ``made_from`` is the checkpoint that the manifest names, if it is still there, ``made_of`` the component of it, ``made_at`` its
    step, ``made_by`` the command that would merge it again; ``expected`` counts the tensors that the model class has, None if that is not
    known; ``bytes_read`` of ``bytes`` were read for ``full``.
    """

    path: Place
    component: str
    format: str
    files: int
    tensors: int
    elements: int
    bytes: int
    dtypes: dict[str, int]
    architecture: str | None
    levels: tuple[str, ...]
    made_from: Place | None = None
    made_of: str | None = None
    made_at: int | None = None
    made_by: tuple[Place, ...] = ()
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

    @classmethod
    def of_parts(cls, path: str, parts: Mapping[str, VerifyResult]) -> VerifyResult:
        """Of a model in several parts, each verified by itself: what was found names the files by their paths in the folder ``path``."""
        results = list(parts.values())
        found = {repr(item): item for name, result in parts.items() for item in (_in_folder(name, each) for each in result.findings)}
        dtypes: Counter[str] = Counter()
        for result in results:
            dtypes.update(result.dtypes)
        return cls(
            path=path,
            component="+".join(parts),
            format="+".join(dict.fromkeys(result.format for result in results)),
            files=sum(result.files for result in results),
            tensors=sum(result.tensors for result in results),
            elements=sum(result.elements for result in results),
            bytes=sum(result.bytes for result in results),
            dtypes=dict(dtypes),
            architecture=None,
            levels=results[0].levels,
            checksums=sum(result.checksums for result in results),
            bytes_read=sum(result.bytes_read for result in results),
            findings=tuple(sorted(found.values(), key=lambda item: SEVERITIES.index(item.severity))),
            against=tuple(one for result in results for one in result.against),
            seconds=sum(result.seconds for result in results),
            notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
        )

    @property
    def loads(self) -> bool:
        """Whether the class that config.json names was compared, and nothing that it needs is missing."""
        lacking = {"missing-tensor", "left-out", "missing-layers", "not-proved", "cut-tensor", "wrong-shape"}
        lacking |= {"unknown-names", "prefixed-names"}
        return self.expected is not None and self.wrapped is False and not lacking & {item.code for item in self.findings}

    def of_severity(self, severity: str) -> list[Finding]:
        """The findings of one severity."""
        return [finding for finding in self.findings if finding.severity == severity]

    @property
    def ok(self) -> bool:
        """Whether no error was found."""
        return not self.of_severity("error")

    def __bool__(self) -> bool:
        """The same: ``assert verify(path)`` says what it seems to say."""
        return self.ok

    @property
    def exit_code(self) -> int:
        """1 if anything is wrong."""
        return 0 if self.ok else 1


def _in_folder(part: str, item: Finding) -> Finding:
    """What was found of a part, as it is told of the folder around it."""
    file = item.file or ""
    beside = file.startswith(("/", "../"))
    return item.model_copy(update={"file": file.removeprefix("../") if beside else f"{part}/{file}".rstrip("/")})
