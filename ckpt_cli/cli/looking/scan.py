"""`ckpt scan`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.words.declare import command
from ckpt_cli.errors import UsageError
from ckpt_cli.progress import Progress

if TYPE_CHECKING:
    from ckpt_cli.results.scan import ScanResult


@command()
def scan(session: Session, path: options.Scanned, sarif: options.Sarif = False) -> int:
    from ckpt_cli.cli.screens.scan import print_sarif, scan_result
    from ckpt_cli.commands import scan as scanning

    def work(shown: Progress) -> ScanResult:
        if sarif and session.json:
            raise UsageError("--json and --sarif are two documents", hint="choose one of them")
        return scanning.scan(path, progress=shown)

    session = replace(session, path=path)
    return session.run(work, print_sarif if sarif else scan_result, lambda result: result.exit_code)
