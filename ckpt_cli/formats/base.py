"""The interface of a format: it recognises its files by name and describes them without reading weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_cli.errors import CkptError, CorruptFile, Inconsistent
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.kept_configs import KeptConfig
from ckpt_cli.names import ShardOrder as ShardOrder
from ckpt_cli.tensors.component import Component, Note

if TYPE_CHECKING:
    from ckpt_cli.formats.optimizer_state import NamedState, TrainMode

MAX_RANKS = 1 << 20
"""More ranks than any training has: larger numbers in names or files are damaged or false, and never looped over."""

ONCE, APART = "every file in one of the folders", "join only folders of one save, each with files that the others do not have"
"""What is said where two folders that are joined hold the same file."""

WEIGHTS_16 = "weights16"
"""The component that is the model in the dtype of the training, beside one in fp32."""

MEANINGS = {
    WEIGHTS_16: "weights in the dtype that training computed with; model is the copy of the optimizer, mostly fp32",
    "rank-shards": "one file per rank (process of the training)",
    "verl family": "verl, or a trainer whose files have the same names",
}
"""Words of ours (components, formats, trainers) that do not explain themselves: a screen says what they mean."""


def are_apart(numbers: Collection[int]) -> bool:
    """Whether more of some numbers are missing than there are, as of steps 0, 50 and 100.

    >>> are_apart([0, 50, 100]), are_apart([0, 2]), are_apart([0])
    (True, False, False)
    """
    return max(numbers, default=0) + 1 > 2 * len(numbers) > 2


def missing_of(world_size: int, there: Container[int]) -> tuple[int, ...]:
    """The missing ranks below a world size; none for an impossible world size, which is a separate error."""
    return tuple(rank for rank in range(world_size) if rank not in there) if world_size <= MAX_RANKS else ()


class NoWeights(CorruptFile):
    """What was saved like a model holds nothing that could be a weight, such as state alone."""


@dataclass(frozen=True, slots=True)
class Match:
    """Files that one format recognises as one component.

    ``ranks`` maps rank to file if the format has ranks; ``world_size`` is what the file names say, None if they do not.
    ``trouble`` is the error that describing it will raise, if names alone show it; ``group`` picks one of several state
    dicts inside; ``number`` is which of several models of one save this is (accelerate numbers them, and their optimizers alike);
    ``more_roots`` are folders of other nodes that hold files of the same save; ``lists_nothing``: it is an index none of whose files is
    there, or a file that holds no weights, which is only taken where nothing else is.
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
    lists_nothing: bool = False

    @property
    def first(self) -> Path:
        """The first file, or the folder of a save that has none of the files that it should have."""
        return self.files[0] if self.files else self.root

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks whose file is not there."""
        return missing_of(self.world_size or max(self.ranks, default=-1) + 1, self.ranks)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a format may need to know: the number of ``experts`` in the model's config (``has_config``: it has one), ``shard_order``."""

    experts: int | None = None
    has_config: bool = False
    shard_order: ShardOrder = "auto"


@dataclass(frozen=True, slots=True)
class RankValues:
    """Training state of one rank as values by name, and the file that each comes from."""

    values: dict[str, Any]
    sources: dict[str, Path]


@dataclass(frozen=True, slots=True)
class OptimizerOfRanks:
    """The files with an optimizer in the form of rank files that belong to weights; ``world_size`` is None where it is unknown."""

    ranks: Mapping[int, Path]
    world_size: int | None = None


class Format(ABC):
    """One on-disk format: recognises its files by name and describes them without reading weights.

    ``display`` is its name for people. ``is_refused``: it is only recognised, to be refused. ``is_loaded``: Hugging Face's loaders
    read it as it is. ``is_sharded``: one of its files alone is not a model. ``keeps_order``: its tensors are in the order of the model.
    ``tells_writer``: its files record which library version wrote them.
    """

    name: str
    display: str
    is_refused: bool = False
    is_loaded: bool = False
    is_sharded: bool = True
    is_unsure: bool = False
    """Whether names alone do not tell that these are weights: any other format goes first, and steps beside them."""

    keeps_order: bool = True
    tells_writer: bool = False
    in_tags: bool = False
    """Whether it keeps a save in a folder of any name, one level below the folder of the step."""

    proves_whole: bool = True
    """Whether its files show that all of them are there."""

    by_content: bool = False
    """Whether only the content tells which components there are."""

    @abstractmethod
    def recognise(self, path: Path, there: Folders) -> list[Match]:
        """The components that ``path`` (a folder or a file) holds directly, from names alone. Never raises for content."""

    @abstractmethod
    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        """Read headers and pickles, never weights, and prove that every tensor tiles exactly.

        Raises InputError for files that cannot be read, IncompleteError for an incomplete checkpoint.
        """

    def groups(self, match: Match, files: Files) -> list[str]:
        """The names of the state dicts in a match, the main one first; most formats have only that one."""
        return [match.component]

    def single_file(self, match: Match) -> Path | None:
        """The file, if the match is a single file taken as the whole model."""
        return None

    def training_state(self, match: Match, files: Files) -> tuple[dict[str, Any], Path]:
        """What is stored with the weights and is neither weights nor optimizer, nested as it was saved, and where it is."""
        return {}, match.root

    def training_states(self, match: Match, files: Files) -> Mapping[int, RankValues]:
        """The same, where each rank has its own: of all ranks, without values for those whose files are missing."""
        return {}

    def kept_configs(self, match: Match, files: Files) -> list[KeptConfig]:
        """The configs of transformers that lie beside the weights in the same files. Raises what reading raises."""
        return []

    def doubts(self, match: Match, files: Files) -> list[Note]:
        """Warnings about files that may be from another save, for commands that read only the state."""
        return []

    def optimizer(self, match: Match, files: Files) -> NamedState | None:
        """The optimizer that is stored with the weights, by parameter; None if there is none."""
        return None

    def train_mode(self, match: Match, files: Files) -> TrainMode | None:
        """What the groups of that optimizer say, if it is schedule-free and was saved in train mode; reads none of its state."""
        return None

    def optimizer_files(self, match: Match, files: Files) -> OptimizerOfRanks | None:
        """The files of this save that hold the optimizer in the form of rank files, the weights files or others; None if there are none."""
        return None

    def of_save(self, match: Match, there: Folders) -> list[Path]:
        """Files in the folders of a match that belong to the same save, whatever their names: they are no other weights beside it."""
        return []

    def least_ranks(self, match: Match) -> int | None:
        """How many ranks wrote the files at least, as far as their names tell; None if these say nothing of ranks."""
        return match.world_size or (max(match.ranks) + 1 if match.ranks else None)

    def ranks_told(self, match: Match, files: Files) -> int | None:
        """The same, as far as their content tells, for which no weights are read."""
        return self.least_ranks(match)

    # -- one save in several folders: without a shared disk, each node keeps the files of its own ranks

    def takes(self, other: Match) -> bool:
        """Whether a match of another folder may be part of a save in this format: files of a node without metadata say less of theirs."""
        return other.format == self.name

    def part_name(self, file: Path) -> str:
        """What tells a file from the others of its save."""
        return file.name

    def joined(self, first: Match, second: Match) -> Match:
        """Two matches of the same component as one. Contradictions become its ``trouble``; nothing is read."""
        trouble = self.twice(first, second) or first.trouble
        return replace(first, files=(*first.files, *second.files), more_roots=all_roots(first, second), trouble=trouble)

    def twice(self, first: Match, second: Match) -> CkptError | None:
        """The error for a file that two folders hold: one of them is not of this save, or a copy, and nothing tells which."""
        held = {self.part_name(file): file.parent for file in first.files}
        both = next((file for file in second.files if self.part_name(file) in held), None)
        if both is None:
            return None
        name = self.part_name(both)
        return Inconsistent(f"{name} is in both {held[name]} and {both.parent}", path=both, expected=ONCE, hint=APART)

    def adds(self, first: Match, second: Match) -> bool:
        """Whether a match of another folder holds files that the first one lacks."""
        return not {self.part_name(file) for file in second.files} <= {self.part_name(file) for file in first.files}

    def complements(self, first: Match, second: Match) -> bool:
        """Whether two matches look like parts of one save: they have no file in common, and neither has the files of all ranks."""
        return False

    def counts_ranks(self, match: Match) -> bool:
        """Whether the files say how many ranks wrote them."""
        return True


def all_roots(first: Match, second: Match) -> tuple[Path, ...]:
    """The folders of two matches, except the first one's own."""
    return tuple(dict.fromkeys((*first.more_roots, second.root, *second.more_roots)))
