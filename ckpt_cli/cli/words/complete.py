"""What values complete to: words of the options, and the components and steps of the path that was already typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import typer

if TYPE_CHECKING:
    from ckpt_cli.discover.found import Found

Completer: TypeAlias = Callable[[typer.Context, list[str], str], list[str]]
DTYPES = ("keep", "fp32", "bf16", "fp16", "base")


def words(known: Sequence[str]) -> Completer:
    """What completes to one of a few words."""

    def listed(context: typer.Context, args: list[str], incomplete: str) -> list[str]:
        return list(known)

    return listed


def components(context: typer.Context, args: list[str], incomplete: str) -> list[str]:
    """The components of the path, from names alone, and the words for several."""
    from ckpt_cli.errors import CkptError

    names: list[str] = []
    for path in _paths(context):
        try:
            names += [place.name for found in _found(path) for place in found.places]
        except (CkptError, OSError):
            continue
    several = ["both", "all"] if len(dict.fromkeys(names)) > 1 or not names else []
    return list(dict.fromkeys([*names, *([] if names else ["model", "ema"]), *several]))


def steps(context: typer.Context, args: list[str], incomplete: str) -> list[str]:
    """The steps of the path, the newest first."""
    from ckpt_cli.errors import CkptError

    numbers: set[int] = set()
    for path in _paths(context):
        try:
            numbers |= {found.step for found in _found(path) if found.step is not None}
        except (CkptError, OSError):
            continue
    return [*map(str, sorted(numbers, reverse=True)), *(["latest"] if numbers else [])]


def _paths(context: typer.Context) -> list[Path]:
    # While the last option has no value yet, arguments are not assigned to their names.
    given = context.params.get("path") or context.params.get("paths") or context.args[:1]
    return [Path(text).expanduser() for text in ([given] if isinstance(given, str) else given)]


def _found(path: Path) -> tuple[Found, ...]:
    from ckpt_cli.discover.locate import locate

    return locate(path, None, ()).checkpoints
