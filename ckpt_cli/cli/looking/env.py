"""`ckpt env`: collects what a bug report needs, and hands it to its screen."""

from __future__ import annotations

from ckpt_cli.cli.session import Session
from ckpt_cli.cli.words.declare import command


@command()
def env(session: Session) -> int:
    from ckpt_cli.cli.looking.environment import env_result
    from ckpt_cli.commands.env import environment

    return session.run(lambda _: environment(), env_result, lambda _: 0)
