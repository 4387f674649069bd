"""`ckpt detect`: parses its options, calls the command, and hands the result to its screen."""

from __future__ import annotations

import typer

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session
from ckpt_cli.cli.text import options_again
from ckpt_cli.progress import Progress


def detect(
    path: options.Path,
    type: options.Type = None,
    step: options.Step = None,
    also: options.Also = None,
    json: options.Json = False,
    quiet: options.Quiet = 0,
    strict: options.Strict = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    color: options.Color = "auto",
) -> None:
    from ckpt_cli.cli.screens.inspect import detect_result
    from ckpt_cli.commands import inspect as inspection
    from ckpt_cli.results.inspect import DetectResult

    def work(_: Progress) -> DetectResult:
        return inspection.detect(path, type=type, step=step, also=tuple(also or ()))

    again = options_again(type=type, step=step, also=also)
    session = Session("detect", json=json, quiet=quiet, strict=strict, verbose=verbose, debug=debug, color=color, path=path, again=again)
    code = session.run(work, detect_result, lambda result: result.exit_code)
    raise typer.Exit(code)
