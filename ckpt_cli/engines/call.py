"""The call that does a part of a command in another process: the command again, with paths that mean the same there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ckpt_cli.given import URL
from ckpt_cli.output.key_map import lasting_key_map
from ckpt_cli.output.options import PUSHING
from ckpt_cli.paths import absolute
from ckpt_cli.progress import Progress

AT_HOME = PUSHING | {"engine", "ray_address", "ray_parts", "part", "dry_run", "checksum", "verify", "compare"}
"""Options that are for the process that was started by hand: what is done once, and how the work is spread."""


@dataclass(frozen=True, slots=True)
class PartCall:
    """A function of this package and its arguments, all but ``part``; ``reads`` are the paths that it opens."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    reads: tuple[str, ...]

    def __call__(self, part: str, jobs: int, progress: Progress) -> Any:
        """Do one part with this many threads."""
        return self.function(*self.arguments, **{**self.keywords, "jobs": jobs, "part": part, "progress": progress})


def part_call(function: Callable[..., Any], arguments: Sequence[Any], options: Any, *, reads: Sequence[object], **named: Any) -> PartCall:
    """The call of a command with these options (of `merge`, say); paths should be `lasting`."""
    chosen = {field.name: getattr(options, field.name) for field in fields(options) if field.name not in AT_HOME}
    chosen["key_map"] = tuple(lasting_key_map(options.key_map))
    return PartCall(function, tuple(arguments), {**chosen, **named}, tuple(lasting(path) for path in reads if path is not None))


def lasting(path: object) -> str:
    """A path that means the same in another folder; addresses stay as they are."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else str(path)
    return text if URL.fullmatch(text) else absolute(text)
