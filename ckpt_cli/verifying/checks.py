"""The checks of `verify` that read weights: all of them in this process, or those of one part of a verification.

A `Stage` is a list of things that are each read as a whole (tensors, mostly), and what comes of it is an `Outcome`. Whatever else `verify`
says follows from headers and outcomes. A process that checks part K of N reads the K-th N-th of each stage, by bytes, as `merge` cuts its
output, and notes what it read and found; `ckpt_cli.verifying.gathering` puts the notes of all parts in the place of reading.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

from ckpt_cli.files.descriptors import Identity
from ckpt_cli.formats.ages import refuse_unversioned
from ckpt_cli.output.part import Part
from ckpt_cli.progress import Progress
from ckpt_cli.results.verify import CheckedShare, Finding, VerifyPart
from ckpt_cli.tensors.parallel import Advance, with_progress
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.urls import full_name, shown
from ckpt_cli.verifying.findings import KINDS

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What reading found; ``compared`` counts the checksums that were compared."""

    findings: tuple[Finding, ...] = ()
    bytes_read: int = 0
    compared: int = 0

    @classmethod
    def joined(cls, outcomes: Sequence[Outcome]) -> Outcome:
        """Several as one, in this order."""
        found = tuple(item for each in outcomes for item in each.findings)
        return cls(found, sum(each.bytes_read for each in outcomes), sum(each.compared for each in outcomes))


@dataclass(frozen=True, slots=True)
class Stage(Generic[Item]):
    """What one check reads. ``tensors`` of an item, the first of which is read in its own order; ``nbytes`` is how much is read for it.

    ``about`` is what the outcome depends on besides: what the tensors are compared with.
    """

    name: str
    label: str
    items: Sequence[Item]
    tensors: Callable[[Item], tuple[Tensor, ...]]
    nbytes: Callable[[Item], float]
    about: Callable[[Item], object] = lambda _: None

    def digest(self, files: dict[str, Identity]) -> str:
        """SHA-256 of all items: names, where every byte lies, what it is compared with. Adds what each file is.

        Raises Unsupported for a file that nothing tells from others of its size.
        """
        state, seen = hashlib.sha256(), set[int]()
        for item in self.items:
            state.update(repr(self.about(item)).encode())
            for tensor in self.tensors(item):
                state.update(f"{tensor.name!r}:{tensor.dtype}:{tensor.shape}".encode())
                for piece in (*tensor.pieces, *tensor.copies):
                    state.update(piece.text.encode("utf-8", "surrogateescape"))
                    if id(piece.source) not in seen:
                        seen.add(id(piece.source))
                        refuse_unversioned(piece.source.origins)
                        files.update({printed(origin.identity.path): origin.identity for origin in piece.source.origins})
        return state.hexdigest()

    def share(self, part: Part) -> tuple[int, int]:
        """The items of a part, by their numbers (the last excluded): those that begin in the K-th N-th of all bytes."""
        starts = [0, *accumulate(max(1, int(self.nbytes(item))) for item in self.items)]
        places = (-(-number * starts[-1] // part.count) for number in (part.number, part.number + 1))
        first, last = (bisect_left(starts, place, hi=len(self.items)) for place in places)
        return first, last


class Checks:
    """All of them, here. ``whole``: so that what follows from all of them together can be said."""

    whole = True

    def outcome(
        self, stage: Stage[Item], work: Callable[[Item, Advance], Outcome], *, jobs: int | None, progress: Progress | None
    ) -> Outcome:
        """What checking all items of a stage found, in their order."""
        return _read(stage, stage.items, work, jobs, progress)


ALL = Checks()


class ChecksOfPart(Checks):
    """Those of one part. What comes of a stage is then not all that there is, and kept in ``shares``."""

    whole = False

    def __init__(self, part: Part) -> None:
        self.part = part
        self.shares: dict[str, CheckedShare] = {}
        self.files: dict[str, Identity] = {}

    def outcome(
        self, stage: Stage[Item], work: Callable[[Item, Advance], Outcome], *, jobs: int | None, progress: Progress | None
    ) -> Outcome:
        if not stage.items:
            return Outcome()
        first, last = stage.share(self.part)
        digest = stage.digest(self.files)
        found = _read(stage, stage.items[first:last], work, jobs, progress)
        self.shares[stage.name] = CheckedShare(
            items=len(stage.items),
            first=first,
            last=last,
            digest=digest,
            findings=found.findings,
            bytes_read=found.bytes_read,
            compared=found.compared,
        )
        return found


def _read(
    stage: Stage[Item], items: Sequence[Item], work: Callable[[Item, Advance], Outcome], jobs: int | None, progress: Progress | None
) -> Outcome:
    if not items:
        return Outcome()
    read = (stage.tensors(item)[0] for item in items)
    total = int(sum(stage.nbytes(item) for item in items))
    return Outcome.joined(with_progress(work, items, read, jobs=jobs, progress=progress, total=total, label=stage.label))


def digest_of(part: VerifyPart) -> str:
    """SHA-256 of what all parts of a verification agree on: version, what was asked, files, and what is checked of them."""
    checked = {name: (share.items, share.digest) for name, share in part.shares.items()}
    content: list[Any] = [
        part.version,
        part.parts,
        part.question.model_dump(mode="json"),
        sorted(part.files.items()),
        sorted(checked.items()),
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def printed(path: str | os.PathLike[str], *, whole: bool = True) -> str:
    """A path, the whole of it or as it is, as JSON can carry it."""
    return (full_name(path) if whole else shown(os.fspath(path))).encode("utf-8", "backslashreplace").decode()


def by_component(found: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """What was found in components of these names: what is not said of all of them says of which it is."""
    everywhere = set.intersection(*({repr(item) for item in items} for _, items in found))
    return [
        item if repr(item) in everywhere else item.model_copy(update={"message": f"{name}: {item.message}" if item.message else name})
        for name, items in found
        for item in items
    ]


def without_repeats(found: Sequence[Finding]) -> list[Finding]:
    """Drops what is said of a file twice, and "changed" of files that are known to be damaged."""
    damaged = {item.file for item in found if item.severity == "error" and item.tensor is None and KINDS[item.code].level != "against"}
    kept: dict[str, Finding] = {}
    for item in found:
        if item.code not in ("changed-side-file", "other-side-file") or item.file not in damaged:
            kept.setdefault(repr((item.code, item.file, item.tensor, item.message)), item)
    return list(kept.values())
