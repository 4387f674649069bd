"""What `ckpt env` returns."""

from __future__ import annotations

from ckpt_cli.results.checkpoint import Frozen, NoteInfo


class EnvResult(Frozen):
    """Versions, extras, platform and paths.

    ``packages`` maps names to versions (None: not installed), ``extras`` says which are there, ``variables`` are those that are set and
    change what ckpt does; ``limits`` are of memory, in bytes.
    """

    version: str
    python: str
    executable: str
    platform: str
    package: str
    packages: dict[str, str | None]
    extras: dict[str, bool]
    threads: int
    limits: dict[str, int]
    encoding: str
    cache: str | None
    hub_cache: str
    variables: dict[str, str]
    notes: tuple[NoteInfo, ...] = ()
