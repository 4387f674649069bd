"""What a format is: a module that recognises its files by name and describes them without reading weights."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.tensors.component import Component

ShardOrder = Literal["auto", "tp-first", "left-to-right"]
MAX_RANKS = 1 << 20
"""More ranks than any training has: what names or files say beyond that is damaged or a lie, and is never counted through."""


def missing_of(world_size: int, there: Container[int]) -> tuple[int, ...]:
    """The ranks below a world size that are not there; none of a world size that cannot be, which is an error of its own."""
    return tuple(rank for rank in range(world_size) if rank not in there) if world_size <= MAX_RANKS else ()


@dataclass(frozen=True, slots=True)
class Match:
    """Files that one reader recognises as one component.

    ``ranks`` maps rank to file where the format has ranks; ``world_size`` is what the file names say, None if they do not.
    ``trouble`` is the error that describing it will end with, where names alone tell; ``group`` picks one of several state
    dicts inside;
    ``more_roots`` are folders of other nodes that hold files of the same save.
    """

    format: str
    component: str
    root: Path
    files: tuple[Path, ...]
    evidence: str
    world_size: int | None = None
    ranks: Mapping[int, Path] = field(default_factory=dict)
    trouble: CkptError | None = None
    group: str | None = None
    more_roots: tuple[Path, ...] = ()

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks whose file is not there."""
        return missing_of(self.world_size or max(self.ranks, default=-1) + 1, self.ranks)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a reader may need to decide: how many ``experts`` the model's config counts (``has_config``: it has one), ``shard_order``."""

    experts: int | None = None
    has_config: bool = False
    shard_order: ShardOrder = "auto"


class Reader(Protocol):
    """One on-disk format."""

    name: str

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        """The components that ``path`` (a folder or a file) holds directly, from names alone. Never raises for content."""
        ...

    def groups(self, match: Match, files: Files) -> list[str]:
        """The names of the state dicts inside of a match, the main one first; for most formats there is only that one."""
        ...

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        """Read headers and pickles, never weights, and prove that every tensor tiles exactly.

        Raises InputError for files that cannot be read, IncompleteError for a checkpoint that is not whole.
        """
        ...
