"""`ckpt env`: collects what a bug report needs, and hands it to its screen."""

from __future__ import annotations

import typer

from ckpt_cli.cli import options
from ckpt_cli.cli.session import Session


def env(
    json: options.Json = False,
    quiet: options.Quiet = 0,
    strict: options.Strict = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    color: options.Color = "auto",
) -> None:
    from ckpt_cli.cli.screens.environment import env_result
    from ckpt_cli.commands.env import environment

    session = Session("env", json=json, quiet=quiet, strict=strict, verbose=verbose, debug=debug, color=color)
    raise typer.Exit(session.run(lambda _: environment(), env_result, lambda _: 0))
