"""What `ckpt env` prints: facts to paste into a bug report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_cli.cli import text
from ckpt_cli.cli.screens.widgets import next_line, plain, print_facts
from ckpt_cli.names import printable
from ckpt_cli.results.environment import EnvResult

if TYPE_CHECKING:
    from ckpt_cli.cli.session import Session


def env_result(result: EnvResult, session: Session) -> None:
    """The whole screen; paths are in full, as they are read elsewhere. With -q the version of ckpt alone."""
    console = session.out()
    if session.quiet:
        console.print(plain(result.version))
        return
    installed = [f"{name} {version}" for name, version in result.packages.items() if version is not None]
    absent = [name for name, version in result.packages.items() if version is None]
    print_facts(
        console,
        [
            ("ckpt", f"{result.version}   {printable(result.package)}"),
            ("python", f"{result.python}   {printable(result.executable)}"),
            ("platform", result.platform),
            ("packages", ", ".join(installed)),
            ("extras", ", ".join(extra for extra, there in result.extras.items() if there) or "none"),
            ("not there", ", ".join(absent)),
            ("threads", str(result.threads)),
            ("memory limit", ", ".join(f"ulimit {option}: {text.size(size)}" for option, size in result.limits.items())),
            ("file names", result.encoding),
            ("cache", printable(result.cache or "none: there is no home folder")),
            ("hub cache", printable(result.hub_cache)),
            ("variables", ", ".join(f"{name}={printable(value)}" for name, value in result.variables.items())),
        ],
    )
    console.print()
    next_line(session, "ckpt env --json")
