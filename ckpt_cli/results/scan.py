"""What `scan` found: what the pickles below a path would have a loader look up and call."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ckpt_cli.results.checkpoint import Frozen, NoteInfo


class ScanFinding(Frozen):
    """A name in a pickle that is not expected in a checkpoint, at its first place in that pickle.

    ``severity`` is "dangerous" (it runs code, or opens files or connections) or "unknown". ``entry`` is where in the file the pickle
    is (None: the file itself is one), ``offset`` the byte in that entry, ``position`` the byte in the file, None if it is compressed
    there. ``count``: how many times the pickle names it; ``called``: whether it would also call it.
    """

    severity: Literal["dangerous", "unknown"]
    name: str
    file: str
    entry: str | None
    offset: int
    position: int | None
    count: int
    called: bool


class NotScanned(Frozen):
    """Something that was not looked at, and why."""

    file: str
    entry: str | None
    why: str


class ScanResult(Frozen):
    """What a stock loader (``torch.load``, ``pickle.load``) would have run of all pickles below a path; nothing of it was run.

    ``names`` counts all names that the ``pickles`` refer to; ``incomplete`` are pickles that break off, as file or "file: entry".
    ``custom_code`` are the Python files that ``trust_remote_code=True`` would run.
    """

    path: str
    files: int
    bytes: int
    pickles: int
    names: dict[str, int] = Field(default_factory=dict)
    findings: tuple[ScanFinding, ...] = ()
    not_scanned: tuple[NotScanned, ...] = ()
    incomplete: tuple[str, ...] = ()
    custom_code: tuple[str, ...] = ()
    seconds: float = 0.0
    notes: tuple[NoteInfo, ...] = ()

    def of_severity(self, severity: str) -> list[ScanFinding]:
        """The findings of one severity."""
        return [finding for finding in self.findings if finding.severity == severity]

    @property
    def exit_code(self) -> int:
        """1 if anything is dangerous."""
        return 1 if self.of_severity("dangerous") else 0
