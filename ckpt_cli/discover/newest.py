"""Going through the checkpoints of a run from the newest to the oldest, past those that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ckpt_cli.discover.found import Found, Target
from ckpt_cli.errors import CkptError, CorruptFile, IncompleteError, IsOptimizer, NoComponent, NotFound
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

PASSED = (IncompleteError, CorruptFile, IsOptimizer, NotFound)
"""Errors that another step of a run may not have."""

Made = TypeVar("Made")


@dataclass(slots=True)
class Passed:
    """The checkpoints that were passed over, newest first, each with its error."""

    errors: list[tuple[Found, CkptError]] = field(default_factory=list)

    @property
    def reasons(self) -> dict[Path, str]:
        return {found.path: short_reason(error, found.path) for found, error in self.errors}

    def notes(self, target: Target, what: str) -> list[Note]:
        """Warnings about them: that they ``what``, such as "skipped"."""
        return skipped_notes(target, self.reasons, what)


def skipped_notes(target: Target, reasons: Mapping[Path, str], what: str = "skipped") -> list[Note]:
    """A warning for every reason why steps are ``what``."""
    notes = []
    for reason in dict.fromkeys(reasons.values()):
        labels = [target.label(path) for path, why in reasons.items() if why == reason]
        notes.append(Note("warning", "step-skipped", f"{few(labels, 5)} {'is' if len(labels) == 1 else 'are'} {what}: {reason}"))
    return notes


def newest_first(
    candidates: Iterable[Found], attempt: Callable[[Found], Made], passed: Passed, may_pass: Callable[[Found, CkptError], bool]
) -> Iterator[tuple[Found, Made]]:
    """What ``attempt`` makes of checkpoints, which come newest first and are only looked at when it is their turn.

    An error that ``may_pass`` goes to ``passed``, any other one is raised; `may_pass` may complete its hint.
    """
    for found in candidates:
        try:
            made = attempt(found)
        except CkptError as error:
            if not may_pass(found, error):
                raise
            passed.errors.append((found, error))
        else:
            yield found, made


def short_reason(error: CkptError, folder: Path | None = None) -> str:
    """An error in one line, with the name of its file, unless that is the ``folder`` whose name is said anyway."""
    if isinstance(error, NoComponent):
        return error.message.partition(" has ")[2]
    where = Path(error.path).name if error.path and Path(error.path) != folder else None
    return f"{error.message} ({where})" if where and where not in error.message else error.message
