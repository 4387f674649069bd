"""torch_checkpointing, the successor of DCP: a file per item and rank, ``<item>_<rank>.pt`` or ``.safetensors``, and ``metadata.pkl``.

A ``.pt`` file is what ``torch.save`` makes of the item, with DTensors as in any rank file. A ``.safetensors`` file has the local tensors
alone, so that only the metadata says what they are parts of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, Inconsistent, MissingShard, reading
from ckpt_cli.files.folders import Folders, is_file
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import Files, read_small
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.ages import age_notes
from ckpt_cli.formats.assembly import RankState, assemble
from ckpt_cli.formats.base import APART, Format, Match, OptimizerOfRanks, RankValues, ReadOptions, all_roots
from ckpt_cli.formats.optimizer_state import OPTIMIZER
from ckpt_cli.formats.rank_files.reader import check_rank_files, largest_mesh, notes_of_ranks, read_rank_file
from ckpt_cli.formats.sets.parts import refuse_twice, stem_of
from ckpt_cli.formats.torch_checkpointing.described import check_described, refuse_copies, safetensors_state, undescribed
from ckpt_cli.formats.torch_checkpointing.items import (
    MAIN,
    all_items,
    is_model_name,
    item_of,
    models,
    named_items,
    notes_of_others,
    notes_of_unlisted,
    path_of,
    ranks_of_state,
    unused_items,
    weights,
)
from ckpt_cli.formats.torch_checkpointing.metadata import ITEM_FILE, METADATA, Saved, read_metadata
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.formats.torch_files.state_dict import left_out_notes
from ckpt_cli.formats.training_state_names import is_record_key, is_state_key
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.plain_values import ValueReader
from ckpt_cli.tensors.tensor import Tensor

FORMAT = "torch-checkpointing"


class TorchCheckpointing(Format):
    """Reader of torch_checkpointing's folders."""

    name = FORMAT
    display = "torch_checkpointing"
    by_content = True

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        if there.is_file(path):
            fields = ITEM_FILE.fullmatch(path.name)
            if path.name == METADATA:
                return self.recognise(path.parent, there)[:1]
            if fields is None or is_state_key(fields["item"]) or is_record_key(fields["item"]):
                return []
            if not there.is_file(path.parent / METADATA):
                return [match for match in self._without_metadata(path.parent, there) if path in match.files]
            # The file of an item means this item, whatever else there is.
            return [self._named(fields["item"], path.parent, named_items(path.parent, there))]
        if not there.is_file(path / METADATA):
            return self._without_metadata(path, there)
        items = {name: ranks for name, ranks in named_items(path, there).items() if next(iter(ranks.values())).suffix != ".json"}
        if not items:
            return []
        # Items of other names, or in files that a layout names, are found in the metadata.
        if MAIN not in items:
            candidates = {name: ranks for name, ranks in items.items() if not is_state_key(name) and not is_record_key(name)}
            files = tuple(file for ranks in candidates.values() for file in ranks.values())
            return [Match(FORMAT, MAIN, path, files or (path / METADATA,), self.display)]
        names = sorted(filter(is_model_name, items), key=lambda name: (name != MAIN, is_average_name(name), name))
        return [self._named(name, path, items) for name in names]

    def _without_metadata(self, folder: Path, there: Folders) -> list[Match]:
        """Items in safetensors whose metadata, which alone says what parts the ranks hold, is lost: state of the same ranks shows them."""
        items = named_items(folder, there)
        states = ranks_of_state(items)
        lost = MissingShard(
            f"{METADATA}, which says what part of the tensors each file holds, is missing",
            path=folder,
            expected=str(folder / METADATA),
            hint="copy it from where the save was written",
        )
        return [
            replace(self._named(name, folder, items), trouble=lost)
            for name, ranks in items.items()
            if states > 1 and max(ranks) < states and all(path.suffix == ".safetensors" for path in ranks.values())
        ]

    def _named(self, item: str, folder: Path, items: Mapping[str, Mapping[int, Path]]) -> Match:
        """The match of an item that its files name, or of the model that it is a part of."""
        stem = stem_of(item)
        if stem == item or stem in items:
            return Match(FORMAT, item, folder, tuple(items[item].values()), self.display, ranks=items[item])
        files = tuple(file for name, ranks in items.items() if stem_of(name) == stem for file in ranks.values())
        return Match(FORMAT, stem, folder, files, self.display)

    def groups(self, match: Match, files: Files) -> list[str]:
        """The models among the items, the main one first."""
        if match.trouble is not None or match.component != MAIN:
            return [match.component]
        found = models(weights(match, read_metadata(match.root / METADATA, files), files))
        # Files called after the model are the model's, whatever else holds weights.
        return list(dict.fromkeys((MAIN, *found))) if match.ranks else list(found) or [MAIN]

    def joined(self, first: Match, second: Match) -> Match:
        ranks = {**second.ranks, **first.ranks}
        return replace(super().joined(first, second), ranks=ranks, more_roots=all_roots(first, second))

    def complements(self, first: Match, second: Match) -> bool:
        return not {path.name for path in first.files} & {path.name for path in second.files}

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        saved = read_metadata(match.root / METADATA, files)
        for other in (root / METADATA for root in match.more_roots):
            if is_file(other) and read_metadata(other, files) != saved:
                raise Inconsistent(
                    f"{other} is from another save", path=match.root / METADATA, expected="the same on all nodes", hint=APART
                )
        name = match.group or self.groups(match, files)[0]
        held = [name] if name in all_items(match, saved) else models(weights(match, saved, files)).get(name, [name])
        parts = [self._described(item, match, saved, files, options) for item in held]
        first = parts[0]
        tensors: dict[str, Tensor] = {}
        for part in parts:
            with reading(match.root):
                refuse_twice(tensors, part.tensors, held)
            tensors |= part.tensors
        notes = [note for part in parts for note in part.notes]
        if match.group is None and match.component == MAIN:
            notes += notes_of_others(name, [other for other in models(weights(match, saved, files)) if other != name])
            notes += unused_items(match, saved, files).notes
        return replace(
            first,
            name=match.component,
            tensors=tensors,
            files=tuple(dict.fromkeys(file for part in parts for file in part.files)),
            missing_ranks=tuple(sorted({rank for part in parts for rank in part.missing_ranks})),
            leaves=tuple(leaf for part in parts for leaf in part.leaves),
            notes=tuple(dict.fromkeys(notes)),
            ordered=all(part.ordered for part in parts),
        )

    def _described(self, name: str, match: Match, saved: Saved, files: Files, options: ReadOptions) -> Component:
        """One item as a component."""
        item = item_of(name, match, saved)
        there = {rank: path for rank, file in item.files.items() if (path := path_of(file, match)) is not None}
        missing = tuple(rank for rank in range(saved.world_size) if rank not in there)
        first_missing = match.root / item.files[missing[0]].path if missing else None
        if not there:
            raise MissingShard(f"no file of item {name} is there", path=match.root, expected=str(first_missing))
        kind = "ema" if is_average_name(name) else MAIN
        states: list[RankState] = []
        plain: list[tuple[RankState, dict[str, Tensor]]] = []
        notes: list[list[Note]] = []
        for rank, path in there.items():
            with reading(match.root / METADATA):
                described = item.of_rank(rank)
            if item.files[rank].form == "safetensors":
                if not item.tensors and saved.world_size > 1:
                    raise undescribed(name, saved, path)
                state, stored = safetensors_state(rank, path, described, files, alone=not item.tensors)
                states.append(state)
                plain.append((state, stored))
            else:
                read = read_rank_file(rank, path, files, kind, None, kind)
                # An item that was saved without a resharder is not listed.
                said = check_described(read, files.parsed(path, TorchFile), described) if item.tensors else []
                states.append(read.state)
                notes.append([*read.notes, *said])
        check_rank_files(states, saved.world_size)
        refuse_copies(plain)
        try:
            assembled = assemble(states, saved.world_size, missing, options)
        except MissingShard as error:
            error.expected = error.expected or (None if first_missing is None else str(first_missing))
            raise
        sources = [files.source(path) for path in (*there.values(), match.root / METADATA)]
        return Component(
            name=name,
            format=FORMAT,
            root=match.root,
            tensors=assembled.tensors,
            files=tuple(there.values()),
            world_size=saved.world_size,
            missing_ranks=missing,
            mesh=next((mesh for state in states if (mesh := largest_mesh(state)) is not None), None),
            leaves=states[0].leaves,
            notes=(
                *notes_of_ranks(notes),
                *assembled.notes,
                *left_out_notes(leaf for state in states for leaf in state.leaves),
                *age_notes(sources),
                *notes_of_unlisted(name, saved),
            ),
            writer=match.evidence,
            # safetensors sorts tensors, and the metadata has no order.
            ordered=all(file.form == "torch" for file in item.files.values()),
        )

    def of_save(self, match: Match, there: Folders) -> list[Path]:
        return [path for root in (match.root, *match.more_roots) for path in there.files(root, ITEM_FILE.fullmatch)]

    # -- what is beside the weights ------------------------------------------------------------------------------------

    def training_states(self, match: Match, files: Files) -> Mapping[int, RankValues]:
        """The items that hold neither weights nor an optimizer, of each rank; nothing for a rank whose files are missing."""
        saved = read_metadata(match.root / METADATA, files)
        kept = set(weights(match, saved, files))
        held = {rank: RankValues({}, {}) for rank in range(saved.world_size)}
        for name in all_items(match, saved):
            if name in kept or OPTIMIZER.fullmatch(name):
                continue
            for rank, file in item_of(name, match, saved).files.items():
                path = path_of(file, match)
                if path is not None:
                    held[rank].values[name], held[rank].sources[name] = _value(path, file.form, files), path
        return held

    def optimizer_files(self, match: Match, files: Files) -> OptimizerOfRanks | None:
        saved = read_metadata(match.root / METADATA, files)
        named = [name for name in all_items(match, saved) if OPTIMIZER.fullmatch(name)]
        own = [name for name in named if name.endswith(f"_{match.group or match.component}")] or named
        if len(own) != 1:
            return None
        there = {rank: path for rank, file in item_of(own[0], match, saved).files.items() if (path := path_of(file, match)) is not None}
        return OptimizerOfRanks(there, saved.world_size) if there else None


def _value(path: Path, form: str, files: Files) -> Any:
    """The value of an item in a file of one rank."""
    with reading(path):
        files.watch(path)
        if form == "json":
            return parse_json(read_small(path))
        if form == "raw":
            return read_small(path)
        if form == "safetensors":
            raise CorruptFile("an item without weights is kept in safetensors", expected="a file of torch.save")
        file = TorchFile(files.source(path))
        return ValueReader(file).read(file.root)
