"""What a format is: a module that recognises its files by name and describes them without reading weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.tensors.component import Component, Note

if TYPE_CHECKING:
    from ckpt_cli.formats.optimizer_state import NamedState

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
    dicts inside; ``number`` is which of several models of one save this is (accelerate numbers them, and their optimizers alike);
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
    number: int = 0

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


class Format(ABC):
    """One on-disk format: what recognises its files by name, and what describes them without reading weights.

    ``display`` is what people call it. ``is_refused``: it is only recognised, to say what it is. ``is_loaded``: Hugging Face's loaders
    read it as it is. ``is_sharded``: one of its files alone is no model. ``keeps_order``: its tensors stand in the order of the model.
    ``tells_writer``: what is described says which version of a library wrote it.
    """

    name: str
    display: str
    is_refused: bool = False
    is_loaded: bool = False
    is_sharded: bool = True
    keeps_order: bool = True
    tells_writer: bool = False
    by_content: bool = False
    """Whether only the content tells which components there are."""

    @abstractmethod
    def recognise(self, path: Path, there: Folders) -> list[Match]:
        """The components that ``path`` (a folder or a file) holds directly, from names alone. Never raises for content."""

    @abstractmethod
    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        """Read headers and pickles, never weights, and prove that every tensor tiles exactly.

        Raises InputError for files that cannot be read, IncompleteError for a checkpoint that is not whole.
        """

    def groups(self, match: Match, files: Files) -> list[str]:
        """The names of the state dicts inside of a match, the main one first; for most formats there is only that one."""
        return [match.component]

    def single_file(self, match: Match) -> Path | None:
        """The one file that is taken for the whole model, if the match is such a file."""
        return None

    def training_state(self, match: Match, files: Files) -> tuple[dict[str, Any], Path]:
        """What lies among the weights and is neither weights nor optimizer, nested as it was saved, and where it lies."""
        return {}, match.root

    def doubts(self, match: Match, files: Files) -> list[Note]:
        """Warnings about files that may be of another save, for whoever reads the state alone."""
        return []

    def optimizer(self, match: Match, files: Files) -> NamedState | None:
        """The optimizer that lies among the weights, by parameter; None if there is none."""
        return None

    def optimizer_file(self, match: Match, files: Files) -> Path | None:
        """The file of weights in which an optimizer lies as files of ranks hold it; None if there is none."""
        return None

    def least_ranks(self, match: Match) -> int | None:
        """How many ranks wrote the files at least, as far as their names tell; None if these say nothing of ranks."""
        return match.world_size or (max(match.ranks) + 1 if match.ranks else None)

    # -- one save in several folders: without a shared disk, each node keeps the files of its own ranks

    def joined(self, first: Match, second: Match) -> Match:
        """Two matches of the same component as one. What contradicts becomes its ``trouble``; nothing is read."""
        return replace(first, files=(*first.files, *second.files), more_roots=all_roots(first, second))

    def complements(self, first: Match, second: Match) -> bool:
        """Whether two matches look like parts of one save: they have no file in common, and neither has the files of all ranks."""
        return False

    def counts_ranks(self, match: Match) -> bool:
        """Whether the files say how many ranks wrote them."""
        return True


def all_roots(first: Match, second: Match) -> tuple[Path, ...]:
    """The folders of two matches but for the first one's own."""
    return tuple(dict.fromkeys((*first.more_roots, second.root, *second.more_roots)))
