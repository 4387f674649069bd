"""Files of ranks under any name that numbers them: ``checkpoint_rank_3.pt``, ``rank3.pt``, ``fsdp_shard_4_of_4.pt``, ``model_3.pt``.

Such names say less than those of `rank_files.reader`: the numbers may be those of epochs, or of parts that were cut by hand. Distributed
tensors in the files say their rank and how many there are; without any, the files stay what they are by name, parts of an unknown set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import Files
from ckpt_cli.formats.assembly import RankState
from ckpt_cli.formats.base import Match, OptimizerOfRanks, RankValues, ReadOptions
from ckpt_cli.formats.optimizer_state import holds_optimizer
from ckpt_cli.formats.rank_files.counted import counted_ranks
from ckpt_cli.formats.rank_files.reader import RankShards, announced_size, unproven
from ckpt_cli.formats.sets.kinds import ITEM, MARKS, OF, WEAK
from ckpt_cli.formats.sets.names import error_of, part_of
from ckpt_cli.formats.torch_checkpointing.items import named_items, ranks_of_state
from ckpt_cli.formats.torch_checkpointing.metadata import METADATA
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.formats.torch_files.reader import beside_weights
from ckpt_cli.formats.training_state_names import is_record_key, is_state_file, is_state_key
from ckpt_cli.tensors.component import Component, Note

FORMAT = "self-describing"
SUFFIXES = (".pt", ".pth", ".th", ".bin", ".ckpt")
MAX_NAMES = 1000


class SelfDescribing(RankShards):
    """Reader of files of ranks whose names are not those of a known trainer."""

    name = FORMAT
    display = "files of ranks"
    is_unsure = True

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        if there.is_file(path):
            # Asked for each of many steps: a file that is one of no set needs no look at the others.
            if not path.name.endswith(SUFFIXES) or RankShards().recognise(path, there) or _match(path, there) is None:
                return []
            return [_with_first(match, path) for match in self.recognise(path.parent, there) if path in match.files]
        files = there.files(path, lambda name: name.endswith(SUFFIXES) and not is_state_file(name))
        if not files or RankShards().recognise(path, there):
            return []
        found: dict[str, Match] = {}
        seen: set[Path] = set()
        for file in islice((file for file in files if file not in seen), MAX_NAMES):
            match = _match(file, there)
            if match is not None:
                seen |= set(match.files)
                found.setdefault(match.component, match)
        return list(found.values())

    def world_size(self, match: Match, states: Sequence[RankState]) -> int:
        """What the distributed tensors say. Raises PartOfSet, with the kind of set that names tell, if a file has none."""
        if not all(map(announced_size, states)) and match.world_size != 1:
            part = part_of(match.files[0], Folders())
            raise unproven(states) if part is None else error_of(part, Folders())
        return max(match.world_size or 0, max(match.ranks) + 1, *map(announced_size, states))

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        component = super().describe(match, files, options)
        return replace(component, notes=(*component.notes, *self.doubts(match, files)))

    def doubts(self, match: Match, files: Files) -> list[Note]:
        if not self.of_save(match, Folders()):
            return []
        lost = f"{METADATA}, which lists what torch_checkpointing saved, is missing"
        text = f"{lost}: only weights are read, and there may have been more of them; copy it from where the save was written"
        return [Note("warning", "no-metadata", text)]

    def of_save(self, match: Match, there: Folders) -> list[Path]:
        """Items of torch_checkpointing that are state of the same ranks; none if there are no such items, or if metadata tell more."""
        if ITEM.fullmatch(match.files[0].name) is None or there.is_file(match.root / METADATA):
            return []
        items = [(name, ranks) for root in (match.root, *match.more_roots) for name, ranks in named_items(root, there).items()]
        return [path for name, ranks in items if is_state_key(name) or is_record_key(name) for path in ranks.values()]

    def training_states(self, match: Match, files: Files) -> Mapping[int, RankValues]:
        held = {rank: beside_weights(path, files) for rank, path in match.ranks.items()}
        if not any(held.values()):
            return {}
        return {rank: RankValues(values, dict.fromkeys(values, match.ranks[rank])) for rank, values in held.items()}

    def optimizer_files(self, match: Match, files: Files) -> OptimizerOfRanks | None:
        return OptimizerOfRanks(match.ranks, match.world_size) if holds_optimizer(match.ranks[min(match.ranks)], files) else None


def _match(file: Path, there: Folders) -> Match | None:
    """The set that a file belongs to, as files of ranks; None for a file that is one of no set, or of another kind."""
    part = part_of(file, there)
    if part is None:
        return _item(file, there) or _counted(file, there)
    if part.place is None or part.kind not in (*MARKS, OF, WEAK):
        return None
    # "1 of 4" to "4 of 4" begin with one.
    first = 1 if part.count is not None and 0 not in part.siblings and max(part.siblings) == part.count else 0
    ranks = {number - first: path for number, path in sorted(part.siblings.items())}
    stem = file.name[: part.place[0]]
    component = "ema" if is_average_name(stem.rstrip("._-0123456789").removesuffix("rank").rstrip("._-")) else "model"
    size = part.count if part.count is not None and max(ranks) < part.count else None
    return Match(FORMAT, component, file.parent, tuple(ranks.values()), "files of ranks", size, ranks)


def _item(file: Path, there: Folders) -> Match | None:
    """An item of torch_checkpointing without metadata: several files with number 0, or as many as there are of the state beside them."""
    fields = ITEM.fullmatch(file.name)
    if fields is None:
        return None
    items = named_items(file.parent, there)
    ranks, states = items[fields["item"]], ranks_of_state(items)
    if any(path.suffix != ".pt" for path in ranks.values()) or not (max(ranks) < states or (0 in ranks and len(ranks) > 1)):
        return None
    size = states if max(ranks) < states else None
    return Match(FORMAT, fields["item"], file.parent, tuple(ranks.values()), "files of ranks", size, ranks)


def _counted(file: Path, there: Folders) -> Match | None:
    """Files of which not the names, but the tensors in the first one say that they are of ranks."""
    ranks = counted_ranks(file, there)
    return Match(FORMAT, "model", file.parent, tuple(ranks.values()), "files of ranks", ranks=ranks) if ranks else None


def _with_first(match: Match, path: Path) -> Match:
    """The match with the file that was given as its first: errors are about that one."""
    return replace(match, files=(path, *(file for file in match.files if file != path)))
