"""What `ckpt scan` prints: a verdict, what was looked at, and the names that no checkpoint needs, with their places."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.widgets import BAD, GOOD, ROWS, WARNING, good, here, new_table, next_line, plain, print_facts
from ckpt_cli.discover.locate import locate
from ckpt_cli.errors import CkptError
from ckpt_cli.names import printable
from ckpt_cli.results.scan import ScanFinding, ScanResult
from ckpt_cli.scanning.sarif import as_sarif

if TYPE_CHECKING:
    from rich.console import Console

    from ckpt_cli.cli.session import Session


def print_sarif(result: ScanResult, _: Session) -> None:
    """The SARIF document, and nothing else."""
    sys.stdout.write(as_sarif(result) + "\n")


def scan_result(result: ScanResult, session: Session) -> None:
    """The whole screen of `ckpt scan`; with -q the verdict alone."""
    console = session.out()
    if session.quiet:
        console.print(plain(_verdict(result)))
        return
    style = BAD if result.exit_code else WARNING if result.findings or result.not_scanned else GOOD
    print_facts(console, [("result", good(_verdict(result), style)), ("scanned", here(result.path, _looked_at(result)))])
    for label, severity in (("dangerous", BAD), ("unknown", WARNING)):
        found = result.of_severity(label)
        if found:
            console.print()
            _print_findings(console, label, severity, found, everything=session.verbose)
    _print_lists(console, result, everything=session.verbose)
    console.print()
    if _is_recognised(result.path):
        next_line(session, f"ckpt detect {text.argument(result.path)}")
    elif not session.verbose:
        next_line(session, f"ckpt scan {text.argument(result.path)} -v")


def _is_recognised(path: str) -> bool:
    """Whether `ckpt detect` has anything to say of a path: any folder can be scanned."""
    try:
        return bool(locate(path).checkpoints)
    except CkptError:
        return False


def _verdict(result: ScanResult) -> str:
    dangerous, unknown = (len({item.name for item in result.of_severity(name)}) for name in ("dangerous", "unknown"))
    said = [f"{text.plural(dangerous, 'dangerous name')}"] if dangerous else []
    said += [f"{text.plural(unknown, 'unknown name')}"] if unknown else []
    said += [f"{text.plural(len(result.not_scanned), 'part')} not looked at"] if result.not_scanned else []
    if said:
        return f"{'dangerous' if dangerous else 'clean as far as known'}: {', '.join(said)}"
    kinds = text.plural(len(result.names), "kind")
    return f"clean: {text.plural(result.pickles, 'pickle')} in {text.plural(result.files, 'file')}, {kinds} of calls, all expected"


def _looked_at(result: ScanResult) -> str:
    found = f"{text.plural(result.files, 'file')}, {text.size(result.bytes)}, {text.plural(result.pickles, 'pickle')}"
    return f"{found}; nothing in them was run"


def _print_findings(console: Console, label: str, style: str, found: list[ScanFinding], *, everything: bool) -> None:
    """A row per pickle and name: what a loader would look up, and where it says so."""
    meaning = "runs code, or opens files or connections" if label == "dangerous" else "not known from checkpoints of torch and trainers"
    console.print(good(f"{label}: {meaning}", style))
    listed = found if everything else found[:ROWS]
    table = new_table(("name", "", "byte", "in"), right=(2,))
    for item in listed:
        where = f"{item.file}: {item.entry}" if item.entry else item.file
        times = f"{'called' if item.called else 'named'}{f' {item.count} times' if item.count > 1 else ''}"
        table.add_row(*(plain(cell) for cell in (item.name, times, str(item.offset), where)))
    console.print(table)
    if len(listed) < len(found):
        console.print(plain(f"... and {len(found) - len(listed)} more (-v or --json lists all)"))


def _print_lists(console: Console, result: ScanResult, *, everything: bool) -> None:
    missed = [f"{item.file}{f': {item.entry}' if item.entry else ''}: {item.why}" for item in result.not_scanned]
    lists = [("not looked at", missed, WARNING)]
    lists += [("runs only with trust_remote_code=True", list(result.custom_code), "")]
    lists += [("pickles that break off", list(result.incomplete), "")] if everything else []
    for label, lines, style in lists:
        if not lines:
            continue
        console.print()
        console.print(good(f"{label}:", style))
        for line in lines if everything else lines[:ROWS]:
            console.print(plain(f"  {printable(line)}"))
        if not everything and len(lines) > ROWS:
            console.print(plain(f"  ... and {len(lines) - ROWS} more (-v or --json lists all)"))
