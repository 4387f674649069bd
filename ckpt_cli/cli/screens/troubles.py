"""What must always be shown of a result: its warnings, and findings of error level. They are shown with ``-q`` too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_cli.results.checkpoint import NoteInfo
    from ckpt_cli.results.diff import DiffResult
    from ckpt_cli.results.envelope import ErrorInfo
    from ckpt_cli.results.environment import EnvResult
    from ckpt_cli.results.inspect import DetectResult, InspectResult, ReportResult
    from ckpt_cli.results.scan import ScanResult
    from ckpt_cli.results.statistics import ShowResult
    from ckpt_cli.results.verify import Finding, VerifyPart, VerifyResult
    from ckpt_cli.results.watch import WatchResult
    from ckpt_cli.results.written import AverageResult, ExtractResult, MergeResult, PublishResult

    Written = AverageResult | ExtractResult | MergeResult | PublishResult
    Result = (
        Written
        | DetectResult
        | DiffResult
        | EnvResult
        | InspectResult
        | ReportResult
        | ScanResult
        | ShowResult
        | VerifyPart
        | VerifyResult
        | WatchResult
    )

ROWS = 8
"""How many of one code are shown."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A warning, or an error that a check found; ``text`` says where as well."""

    level: str
    code: str
    text: str


def troubles_of(result: Result) -> tuple[Trouble, ...]:
    """The warnings and the errors of a result, each once."""
    return tuple(dict.fromkeys(_all(result)))


def lines(troubles: Sequence[Trouble]) -> Iterator[tuple[str, str]]:
    """A label and a text each, for stderr; if many have the same code, only the first ones."""
    for code in dict.fromkeys(trouble.code for trouble in troubles):
        alike = [trouble for trouble in troubles if trouble.code == code]
        for trouble in alike[:ROWS]:
            yield f"error[{code}]" if trouble.level == "error" else "warning", trouble.text
        if len(alike) > ROWS:
            yield "  ", f"... and {len(alike) - ROWS} more (--json lists all)"


def as_errors(troubles: Iterable[Trouble]) -> list[ErrorInfo]:
    """Warnings as the errors that ``--strict`` makes of them."""
    from ckpt_cli.results.envelope import ErrorInfo

    return [ErrorInfo(code=trouble.code, message=trouble.text) for trouble in troubles if trouble.level == "warning"]


def _all(result: Result) -> Iterator[Trouble]:
    from ckpt_cli.results.diff import DiffResult
    from ckpt_cli.results.environment import EnvResult
    from ckpt_cli.results.inspect import ReportResult
    from ckpt_cli.results.scan import ScanResult
    from ckpt_cli.results.statistics import ShowResult
    from ckpt_cli.results.verify import VerifyPart, VerifyResult
    from ckpt_cli.results.watch import WatchResult
    from ckpt_cli.results.written import AverageResult, ExtractResult, MergeResult, PublishResult

    if isinstance(result, VerifyPart):
        return  # what is wrong is for those to say who gather all parts
    if isinstance(result, VerifyResult):
        yield from _of_notes(result.notes)
        yield from _of_findings(result.findings)
        return
    if isinstance(result, ScanResult):
        yield from _of_scan(result)
        return
    if isinstance(result, (AverageResult, MergeResult, PublishResult)):
        for output in result.outputs:
            for verified in output.verified:
                yield from _of_findings(verified.findings)
        if result.error is not None:
            hint = f"; {result.error.hint}" if result.error.hint else ""
            yield Trouble("error", result.error.code, f"{result.error.message}{hint}")
    if isinstance(result, (DiffResult, EnvResult, ExtractResult, PublishResult, ReportResult, ShowResult, WatchResult)):
        yield from _of_notes(result.notes)
        return
    if isinstance(result, AverageResult):
        yield from _of_notes(result.notes)
    yield from _of_notes(result.checkpoint.notes)
    if isinstance(result, (AverageResult, MergeResult)):
        for output in result.outputs:
            yield from _of_notes(output.notes)


def _of_scan(result: ScanResult) -> Iterator[Trouble]:
    for finding in result.findings:
        where = f"{finding.file}: {finding.entry}" if finding.entry else finding.file
        level = "error" if finding.severity == "dangerous" else "warning"
        verb = "calls" if finding.called else "names"
        yield Trouble(level, f"{finding.severity}-call", f"{where}, byte {finding.offset}: {verb} {finding.name}")
    for item in result.not_scanned:
        yield Trouble("warning", "not-scanned", f"{item.file}{f': {item.entry}' if item.entry else ''}: {item.why}")


def _of_notes(notes: Iterable[NoteInfo]) -> Iterator[Trouble]:
    return (Trouble("warning", note.code, note.text) for note in notes if note.level == "warning")


def _of_findings(findings: Iterable[Finding]) -> Iterator[Trouble]:
    for item in findings:
        if item.severity in ("error", "warning"):
            where = " in ".join(filter(None, (item.tensor, item.file)))
            yield Trouble(item.severity, item.code, f"{where}: {item.message}" if where else item.message)
