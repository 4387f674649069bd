"""The parts of a verification, each a document that ``verify --part K/N --json`` printed (or its ``data`` alone), put together.

Gathering verifies again, headers and all, but reads no weights: what each part read and found takes the place of that. So it ends with the
result of one process. The parts are proved to be all there, and to be of one verification: the digest of each covers the version, what was
asked, size and time of all files, where every tensor lies in them, and what it was compared with. What is there now must give the same,
and be the same files by inode and ctime where a part saw the same file system.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ckpt_cli import __version__
from ckpt_cli.errors import CorruptFile, Inconsistent, MissingParts, UsageError, reading
from ckpt_cli.files.descriptors import Identity, MadeFrom
from ckpt_cli.files.source import read_small
from ckpt_cli.files.streams.pipes import is_descriptor, piped
from ckpt_cli.given import URL
from ckpt_cli.names import few
from ckpt_cli.output.key_map import lasting_key_map
from ckpt_cli.output.part import MAX_PARTS, Part
from ckpt_cli.progress import Progress
from ckpt_cli.results.checkpoint import Frozen
from ckpt_cli.results.verify import CheckedShare, Question, VerifyPart
from ckpt_cli.tensors.parallel import Advance
from ckpt_cli.verifying.checks import Checks, ChecksOfPart, Item, Outcome, Stage, digest_of, printed
from ckpt_cli.verifying.findings import KINDS
from ckpt_cli.verifying.options import Asked, VerifyOptions

MAX_DOCUMENT = 1 << 30
AGAIN = "run this part again"
OPTIONS = tuple(field.name for field in fields(VerifyOptions) if field.name in Question.model_fields)


class _Document(Frozen):
    """What ``--json`` prints of a part."""

    format: Literal[1] = Field(alias="schema")
    command: Literal["verify"]
    status: str
    exit_code: int
    data: VerifyPart
    errors: tuple[Any, ...]


def question_of(asked: Asked) -> Question:
    """What is asked, in words that mean the same in another folder."""
    options: dict[str, Any] = {name: getattr(asked.options, name) for name in OPTIONS}
    return Question(
        path=printed(asked.path),
        type=asked.type,
        step=asked.step,
        also=tuple(map(printed, asked.also)),
        against=printed(asked.against) if asked.against is not None else None,
        **{**options, "key_map": tuple(lasting_key_map(asked.options.key_map))},
    )


def result_of(checks: ChecksOfPart, asked: Asked, seconds: float) -> VerifyPart:
    """What a part leaves for those who gather."""
    made_from = MadeFrom.of(checks.files.values())
    part = VerifyPart(
        part=checks.part.number,
        parts=checks.part.count,
        version=__version__,
        digest="",
        question=question_of(asked),
        files=dict(made_from.files),
        machine=made_from.machine,
        seen=dict(made_from.seen),
        shares=checks.shares,
        against=printed(asked.against, whole=False) if asked.against is not None else None,
        seconds=seconds,
    )
    return part.model_copy(update={"digest": digest_of(part)})


# -- the parts that are there ----------------------------------------------------------------------------------------


def read_parts(paths: Sequence[Path]) -> list[VerifyPart]:
    """The parts of one verification, in order. Raises MissingParts, Inconsistent for doubles and for what is not of one, CorruptFile."""
    parts: list[VerifyPart] = []
    files: dict[str, dict[str, tuple[int, int, str]]] = {}
    for path in paths:
        part = _part(path)
        # All list the same files, and parts of one machine see the same: once is enough.
        seen = parts[-1].seen if parts and parts[-1].seen == part.seen else part.seen
        parts.append(part.model_copy(update={"files": files.setdefault(part.digest, part.files), "seen": seen}))
    usual, _ = Counter(part.digest for part in parts).most_common(1)[0]
    first = next(part for part in parts if part.digest == usual)
    for path, part in zip(paths, parts, strict=True):
        if part.digest != usual:
            raise Inconsistent(
                f"this is a part of another verification: {unlike(part, first)}", path=path, hint="leave it out, or run this part again"
            )
    places: dict[int, Path] = {}
    for path, part in zip(paths, parts, strict=True):
        if part.part in places:
            raise Inconsistent(
                f"part {part.part} of {part.parts} is there twice",
                path=path,
                expected=f"once, as in {places[part.part]}",
                hint="leave one out",
            )
        places[part.part] = path
    missing = [number for number in range(first.parts) if number not in places]
    if missing:
        raise MissingParts(
            f"{len(missing)} of {first.parts} parts are missing: {few([str(number) for number in missing], 12)}",
            hint="pass the documents of all parts; run those that have none",
        )
    return sorted(parts, key=lambda part: part.part)


def _part(path: Path) -> VerifyPart:
    """A part as its document says. Raises CorruptFile, Inconsistent for another version, and what reading raises."""
    with reading(path):
        if path.is_symlink() and not is_descriptor(path):
            raise CorruptFile("this is a link, not a document", hint="pass the file that it leads to")
        through = piped(path, MAX_DOCUMENT)
        raw = read_small(path, MAX_DOCUMENT) if through is None else through
        try:
            read = TypeAdapter[_Document | VerifyPart](_Document | VerifyPart).validate_json(raw)
        except ValidationError:
            hint = f"{AGAIN}: ckpt verify ... --part K/N --json"
            raise CorruptFile("this is not what verify --part prints: cut short, damaged, or something else", hint=hint) from None
        part = read.data if isinstance(read, _Document) else read
        if part.version != __version__:
            raise Inconsistent(f"this part was checked by ckpt {part.version}", expected=__version__, hint=AGAIN)
        known = all(item.code in KINDS and item.severity == KINDS[item.code].severity for item in part.findings)
        if not (known and part.part < part.parts <= MAX_PARTS and part.digest == digest_of(part)):
            raise CorruptFile("this document was changed: its content does not fit together", hint=AGAIN)
        return part


def unlike(part: VerifyPart, other: VerifyPart) -> str:
    """The first thing in which a part differs from others."""
    if part.parts != other.parts:
        return f"one of {part.parts} parts, not of {other.parts}"
    for name in Question.model_fields:
        mine, theirs = getattr(part.question, name), getattr(other.question, name)
        if mine != theirs:
            return f"{_flag(name)} is {_said(mine)}, not {_said(theirs)}"
    for path in (*other.made_from.differences(part.made_from, copies=True), *part.made_from.differences(other.made_from, copies=True)):
        return f"{path} was another file then"
    return "the tensors in the files were others"


def _flag(name: str) -> str:
    return "PATH" if name == "path" else f"--{name.replace('_', '-')}"


def _said(value: object) -> str:
    return (
        "not given"
        if value in (None, False, ())
        else "given"
        if value is True
        else ", ".join(value)
        if isinstance(value, tuple)
        else str(value)
    )


def answered(asked: Asked, part: VerifyPart) -> Asked:
    """The verification that the parts belong to, for the same path; what is said besides must be what they were asked.

    Raises Inconsistent, and UsageError where the parts name an address: which host is asked is not for a file to decide.
    """
    said, known, nothing = question_of(asked), part.question, Question(path=part.question.path)
    for name in Question.model_fields:
        mine, theirs = getattr(said, name), getattr(known, name)
        if mine not in (theirs, getattr(nothing, name)):
            hint = "run all parts again, or leave the option out" if name != "path" else "pass the documents of this folder's parts"
            raise Inconsistent(f"these parts are of another verification: {_flag(name)} is {_said(theirs)}, not {_said(mine)}", hint=hint)
    given = part.against if part.against is not None and printed(part.against) == known.against else known.against
    sources: dict[str, Any] = {"also": asked.also or known.also, "against": asked.against or given}
    for name, place in (("against", known.against), *(("also", place) for place in known.also)):
        if place is not None and URL.fullmatch(place) and not getattr(asked, name):
            raise UsageError(f"the parts read {place}, which is not on this machine", hint=f"pass --{name} {place} as well")
    options = {name: getattr(known, name) for name in OPTIONS}
    return Asked.of(asked.path, {**options, "jobs": asked.options.jobs}, type=known.type, step=known.step, **sources)


class GatheredChecks(Checks):
    """What all parts found, in the place of reading. Raises Inconsistent where they did not check what is there now."""

    def __init__(self, parts: Sequence[VerifyPart]) -> None:
        self._parts, self._asked = parts, set[str]()

    def outcome(
        self, stage: Stage[Item], work: Callable[[Item, Advance], Outcome], *, jobs: int | None, progress: Progress | None
    ) -> Outcome:
        if not stage.items:
            return Outcome()
        files: dict[str, Identity] = {}
        digest = stage.digest(files)
        shares = list(self._shares(stage.name, files))
        for number, share in enumerate(shares):
            if share.digest != digest:
                raise self._stale(files)
            if (share.items, share.first, share.last) != (len(stage.items), *stage.share(Part(number, len(shares)))):
                raise CorruptFile(f"part {number} did not check the tensors of part {number}", hint=AGAIN)
        now = MadeFrom.of(files.values())
        for part in self._parts:
            changed = part.made_from.differences(now, copies=True)
            if changed:
                raise Inconsistent(
                    f"part {part.part} is out of date: {few(changed, 3)} changed since, although size and mtime are the same",
                    path=changed[0],
                    details=changed,
                    expected="the files that the part read, untouched",
                    hint="run all parts again",
                )
        self._asked.add(stage.name)
        return Outcome.joined([Outcome(share.findings, share.bytes_read, share.compared) for share in shares])

    def finish(self) -> None:
        """All that the parts checked was asked for. Raises Inconsistent."""
        if self._asked != set(self._parts[0].shares):
            raise self._stale({})

    def _shares(self, name: str, files: dict[str, Identity]) -> Iterator[CheckedShare]:
        for part in self._parts:
            if name not in part.shares:
                raise self._stale(files)
            yield part.shares[name]

    def _stale(self, files: dict[str, Identity]) -> Inconsistent:
        """The error for parts that checked something else; ``files`` are those of now."""
        changed = self._parts[0].made_from.differences(MadeFrom.of(files.values()), copies=True)
        what = f"{few(changed, 3)} changed" if changed else "the tensors that are checked changed"
        count = len(self._parts)
        subject = "the part is" if count == 1 else f"all {count} parts are"
        return Inconsistent(
            f"{subject} out of date: {what} since", path=changed[0] if changed else None, details=changed, hint="run all parts again"
        )
