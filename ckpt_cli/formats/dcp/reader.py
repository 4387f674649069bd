"""torch DCP folders: ``.metadata`` and ``*.distcp``, read with positioned reads, without torch and without collectives.

A ``.distcp`` file is a plain concatenation of items; an item is a whole ``torch.save`` zip of one chunk (strides and dtype
in there count), or one safetensors blob for all tensors of the file (SerializationFormat.SAFETENSORS, torch >= 2.8).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from ckpt_cli.errors import CkptError, IsOptimizer, MissingShard, Undecidable, Unsupported, reading
from ckpt_cli.files.folders import Folders, is_file
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.ages import age_notes
from ckpt_cli.formats.base import Format, Match, NoWeights, ReadOptions, all_roots
from ckpt_cli.formats.dcp.agreement import lost_notes
from ckpt_cli.formats.dcp.begun import notes_of_average
from ckpt_cli.formats.dcp.copies import copied_notes
from ckpt_cli.formats.dcp.groups import FLAT, Group, groups_of, may_be_the_model
from ckpt_cli.formats.dcp.items import ItemReader, assembled
from ckpt_cli.formats.dcp.kept_configs import configs_among
from ckpt_cli.formats.dcp.metadata import (
    ITEM_FILE,
    METADATA,
    RANK_METADATA,
    Catalog,
    CatalogTensor,
    metadata_files,
    named_metadata,
    read_catalog,
)
from ckpt_cli.formats.dcp.optimizer import read_dcp_optimizer, step_notes, train_mode_of
from ckpt_cli.formats.dcp.state import is_optimizer, read_dcp_state
from ckpt_cli.formats.dcp.swapped import swapped_notes
from ckpt_cli.formats.dcp.unused import unused_in
from ckpt_cli.formats.kept_configs import KeptConfig, configs_in
from ckpt_cli.formats.megatron.common import read_arguments
from ckpt_cli.formats.megatron.run_config import with_settings
from ckpt_cli.formats.megatron.signs import is_step
from ckpt_cli.formats.optimizer_state import NamedState, TrainMode
from ckpt_cli.formats.step_names import nearest_step
from ckpt_cli.formats.torch_files.counters import trained_notes
from ckpt_cli.formats.torch_files.state_dict import left_out_notes
from ckpt_cli.formats.torch_files.swapped import ALGORITHMS
from ckpt_cli.formats.training_state_names import is_record_key, is_state_key
from ckpt_cli.names import check_name, few, is_extra_state, plural, printable
from ckpt_cli.paths import absolute
from ckpt_cli.tensors.component import Component, Leaf, Note
from ckpt_cli.tensors.plain_values import ValueReader
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.urls import is_remote

FORMAT = "dcp"
MEGATRON = re.compile(r"decoder\.layers\.[0-9]+\.(self_attention|mlp)\.linear_", re.ASCII)
PADDLE = re.compile(r"[0-9]+\.metadata", re.ASCII)
"""What Paddle calls the metadata of its own ``.distcp`` files."""

OF_LIGHTNING = "meta.pt"
"""What Lightning has in a ``.ckpt`` file besides tensors."""


class Dcp(Format):
    """Reader of torch.distributed.checkpoint folders."""

    name = FORMAT
    display = "torch DCP"
    by_content = True
    tells_writer = True

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        is_part = path.name == METADATA or RANK_METADATA.fullmatch(path.name) or path.suffix == ".distcp"
        folder = path.parent if is_part else path
        found = named_metadata(folder, there)
        items = tuple(entry for entry in there.entries(folder) if entry.suffix == ".distcp")
        if not found and (not items or there.files(folder, PADDLE.fullmatch)):
            return []
        if is_step(folder, there):
            return []  # of Megatron, which names tensors otherwise
        trouble: CkptError | None = None if found else lost_metadata(folder, there)
        return [Match(FORMAT, "model", folder, items or tuple(found), "torch DCP", trouble=trouble)]

    def groups(self, match: Match, files: Files) -> list[str]:
        """The groups of tensors in the folder that may be weights, the main one first."""
        return [group.name for group in groups_of(read_catalog((match.root, *match.more_roots), files))] if match.trouble is None else []

    def training_state(self, match: Match, files: Files) -> tuple[dict[str, Any], Path]:
        return read_dcp_state((match.root, *match.more_roots), files), match.root

    def doubts(self, match: Match, files: Files) -> list[Note]:
        roots = (match.root, *match.more_roots)
        return doubts_of_save(read_catalog(roots, files), match, ItemReader(roots, files), files)

    def optimizer(self, match: Match, files: Files) -> NamedState | None:
        return read_dcp_optimizer((match.root, *match.more_roots), files)

    def train_mode(self, match: Match, files: Files) -> TrainMode | None:
        return train_mode_of((match.root, *match.more_roots), files)

    def least_ranks(self, match: Match) -> int | None:
        ranks = [int(fields["rank"]) for path in match.files if (fields := ITEM_FILE.fullmatch(path.name)) is not None]
        # One rank may write what all have: a save without collectives.
        return max(ranks) + 1 if any(ranks) else None

    def ranks_told(self, match: Match, files: Files) -> int | None:
        # Not the files that are there: some may be missing, others left over from another save.
        return read_catalog((match.root, *match.more_roots), files).ranks

    def joined(self, first: Match, second: Match) -> Match:
        if first.trouble is not None and second.trouble is None:
            # The metadata is on one node only.
            more = tuple(root for root in (first.root, *all_roots(first, second)) if root != second.root)
            return replace(second, files=(*first.files, *second.files), more_roots=more, trouble=self.twice(first, second))
        return super().joined(first, second)

    def twice(self, first: Match, second: Match) -> CkptError | None:
        # Every node may have the metadata, which are compared when they are read.
        return super().twice(*(replace(match, files=_items_of(match)) for match in (first, second)))

    def adds(self, first: Match, second: Match) -> bool:
        lacks = first.trouble is not None and second.trouble is None
        return lacks or super().adds(replace(first, files=_items_of(first)), replace(second, files=_items_of(second)))

    def complements(self, first: Match, second: Match) -> bool:
        names = [{path.name for path in _items_of(match)} for match in (first, second)]
        return not names[0] & names[1]

    def counts_ranks(self, match: Match) -> bool:
        # Saved without collectives, every rank has metadata of its own.
        return match.trouble is not None or any(is_file(root / METADATA) for root in (match.root, *match.more_roots))

    def kept_configs(self, match: Match, files: Files) -> list[KeptConfig]:
        roots = (match.root, *match.more_roots)
        beside = next((root / OF_LIGHTNING for root in roots if is_file(root / OF_LIGHTNING)), None)
        held = configs_in(files.parsed(beside, TorchFile)) if beside is not None else []
        return [*held, *configs_among(read_catalog(roots, files), ItemReader(roots, files))]

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        roots = (match.root, *match.more_roots)
        catalog = read_catalog(roots, files)
        with reading(match.root):
            groups = groups_of(catalog)
        group = _chosen(match, catalog, groups)
        state = [name for name in group.tensors if is_extra_state(name)]
        if state:
            group = replace(group, tensors={name: entry for name, entry in group.tensors.items() if not is_extra_state(name)})
        if not group.tensors:
            raise NoWeights("the folder holds no tensor that could be a weight", path=match.root, expected="a model's state dict")
        _refuse_permuted(catalog, group, match.root)
        reader = ItemReader(roots, files)
        reader.check_files(group.tensors.values())
        reader.expect(group.tensors.values())
        tensors: dict[str, Tensor] = {}
        for name, entry in group.tensors.items():
            with reading(match.root, tensor=name):
                tensors[check_name(name)] = assembled(name, entry, reader)
        notes = notes_of_objects(group, reader, match.root)
        notes += notes_of_average(catalog, group, reader)
        notes += trained_notes(group.trained)
        swapped = swapped_notes(catalog, reader, group.key, groups[0].key)
        notes += swapped
        used = {stored.file for entry in group.tensors.values() for places in entry.chunks.values() for stored in places}
        known = set(catalog.files)
        unused = [path.name for path in match.files if path.suffix == ".distcp" and path.name not in known]
        if match.group is None:
            others = [other for other in groups if other.name != group.name and other.holds_weights]
            beside = unused_in(catalog, (group, *others), reader, (ALGORITHMS,) if swapped else ())
            notes += [*_notes_of_groups(group, others), *beside.notes]
        notes += notes_of_other_saves(catalog, match, sorted(used), reader, files)
        if unused:
            notes.append(
                Note(
                    "info",
                    "left-overs",
                    f"{plural(len(unused), 'file of an earlier save is', 'files of an earlier save are')} not used: {few(unused)}",
                )
            )
        world = max((stored.rank for entry in catalog.tensors.values() for p in entry.chunks.values() for stored in p), default=0) + 1
        return Component(
            name=match.component,
            format=FORMAT,
            root=match.root,
            tensors=tensors,
            files=tuple(reader.path(file) for file in sorted(used)),
            world_size=world,
            leaves=tuple(Leaf(name, "stored object") for name in (*state, *catalog.objects)),
            notes=tuple(notes),
            writer=f"torch DCP ({catalog.writer})",
            ordered=catalog.ordered,
            arguments=_arguments(catalog, tensors, reader, match.root, files),
        )


def _arguments(catalog: Catalog, tensors: Iterable[str], reader: ItemReader, root: Path, files: Files) -> dict[str, Any]:
    """The arguments of Megatron-FSDP, which saves an ordinary DCP folder (fsdp_dtensor); those of other trainers say nothing of weights."""
    if not any(map(MEGATRON.search, tensors)):
        return {}
    thing = catalog.objects.get("args")
    held = None if thing is None or thing.stored is None or not is_file(reader.path(thing.stored.file)) else reader.parsed(thing.stored)
    return with_settings({} if held is None else read_arguments(held.root, ValueReader(held)), root, files)


def _items_of(match: Match) -> tuple[Path, ...]:
    """The data files of a match, without the metadata."""
    return tuple(path for path in match.files if path.suffix == ".distcp")


def lost_metadata(folder: Path, there: Folders) -> MissingShard:
    """The error for data files without metadata."""
    temporary = " (.metadata.tmp is there)" if there.is_there(folder / ".metadata.tmp") else ""
    return MissingShard(
        f"{METADATA} is missing{temporary}: it is written last, so the save did not finish",
        path=folder,
        expected=str(folder / METADATA),
        hint="if the save did finish, .metadata is on the node that ran rank 0: copy it from there",
    )


def notes_of_objects(group: Group, reader: ItemReader, root: Path) -> list[Note]:
    """Warnings about entries beside weights that are not tensors. Raises Unsupported, or MissingShard, where that would lose weights."""
    notes: list[Note] = []
    leaves: list[Leaf] = []
    for name, thing in group.objects.items():
        if is_extra_state(name):
            continue
        # Nothing tells a trainer's state from weights in a folder without groups.
        stray = group.writer == FLAT
        if thing.stored is None or not is_file(reader.path(thing.stored.file)):
            if not stray:
                file = thing.stored.file if thing.stored else None
                raise MissingShard(
                    "the file of this entry is missing, so it is unknown whether it holds tensors",
                    path=root,
                    tensor=name,
                    expected=str(root / file) if file else "a place for it in the metadata",
                    hint="copy it from the node that wrote it, or pass that node's folder with --also",
                )
            notes.append(Note("warning", "object-missing", f"{printable(name)} is not a tensor, and its file is missing"))
        elif reader.holds_tensors(thing.stored):
            if not stray:
                raise Unsupported(
                    "this entry is not a tensor but holds tensors",
                    path=root,
                    tensor=name,
                    expected="a dict of tensors",
                    hint="save its contents as separate entries",
                )
            text = f"{printable(name)} is not a tensor but holds tensors, which are not written"
            notes.append(Note("warning", "object-with-tensors", text))
        elif not stray or not (is_state_key(name) or is_record_key(name)):
            leaves.append(reader.leaf(name, thing.stored))
    return [*notes, *left_out_notes(leaves)]


def notes_of_other_saves(catalog: Catalog, match: Match, used: Sequence[str], reader: ItemReader, files: Files) -> list[Note]:
    """Signs that metadata and data are from different saves: items of weights do not record their step, and sizes may fit by chance.

    The metadata of torch >= 2.3 has the folder that was saved to, and it is written with the files. That these are longer tells nothing:
    torch itself writes items that the metadata does not speak of (an object of another rank). One that is shorter was not written to its
    end, and a save into the folder of an earlier one leaves the metadata of that until all files are there.
    """
    cut = reader.cut_files(catalog, used)
    sources = [files.source(reader.path(file)) for file in used]
    metadata = [files.source(path) for path in metadata_files((match.root, *match.more_roots), files)]
    told = [*lost_notes(catalog.lost, METADATA), *cut_notes(cut), *copied_notes(catalog, used, reader), *origin_notes(catalog, match.root)]
    return [*told, *step_notes(catalog, reader), *age_notes([*sources, *metadata])]


def doubts_of_save(catalog: Catalog, match: Match, reader: ItemReader, files: Files) -> list[Note]:
    """The same of all data files, whatever is read of them; in a store, where each takes a request, of none."""
    there = [file for file in catalog.files if not is_remote(path := reader.path(file)) and is_file(path)]
    return notes_of_other_saves(catalog, match, sorted(there), reader, files)


def cut_notes(cut: Sequence[str]) -> list[Note]:
    """A warning about data files whose end, which holds no weights, is missing."""
    if not cut:
        return []
    ends = "ends" if len(cut) == 1 else "end"
    text = f"{few(cut)} {ends} before the last entry that {METADATA} has there, which is not read"
    return [Note("warning", "file-cut", f"{text}: if a later save into this folder was interrupted, the result mixes two saves")]


def origin_notes(catalog: Catalog, root: Path) -> list[Note]:
    """A warning if the metadata says that the save was written to the folder of another step than its own."""
    notes = []
    step = nearest_step(Path(absolute(root)))
    for origin in catalog.origins:
        said = nearest_step(PurePosixPath(origin))
        if step is not None and said not in (None, step):
            text = f"the folder says step {step}, but its metadata was written for {printable(origin)}: they may be from different saves"
            notes.append(Note("warning", "step-differs", text))
    return notes


def _notes_of_groups(main: Group, others: Sequence[Group]) -> list[Note]:
    """Notes about groups of weights that are not in this component; a warning for those that could also be the model."""
    held = {id(tensor) for tensor in main.tensors.values()}
    others = [other for other in others if not all(id(tensor) in held for tensor in other.tensors.values())]
    alone = not any("disc" in other.name for other in others)  # A generator is a model of its own in GANs only.
    doubtful = [other for other in others if may_be_the_model(other, main) or (other.name == "generator" and alone)]
    notes = []
    if doubtful:
        text = f"the folder also holds tensors of {few([_told(other) for other in doubtful])}, which are not in this component"
        notes.append(Note("warning", "other-groups", text, tuple(other.name for other in doubtful)))
    if known := [other for other in others if other not in doubtful]:
        text = f"the folder also holds {few([_told(other) for other in known])}"
        notes.append(Note("info", "other-components", text, tuple(other.name for other in known)))
    return notes


def _told(group: Group) -> str:
    if group.writer == FLAT:
        return f"{few(list(group.tensors), 3)} at the top level (--type {group.name})"
    where = f", at {printable(group.key)}" if group.key not in ("", group.name) else ""
    return f"{group.name} (--type {group.name}{where})"


def _chosen(match: Match, catalog: Catalog, groups: Sequence[Group]) -> Group:
    if not groups and any(is_optimizer(tensor.path) for tensor in catalog.tensors.values()):
        raise IsOptimizer("the folder holds an optimizer, and no tensor that could be a weight", path=match.root)
    if not groups:
        raise NoWeights("the folder holds no tensor that could be a weight", path=match.root, expected="a model's state dict")
    return groups[0] if match.group is None else next(group for group in groups if group.name == match.group)


def _refuse_permuted(catalog: Catalog, group: Group, root: Path) -> None:
    """Two things that torch 2.3 and 2.4 recorded wrongly, although the chunks tile perfectly.

    - FSDP2 with tensor parallelism: two cuts of one dimension were recorded in mesh order although tp had been cut first.
      The sign is a dimension with as many chunks as ranks, in the order of ranks, beside tensors cut on two dimensions.
    - FSDP2 with hybrid sharding (torch 2.3): chunks were numbered by the replica row instead of the place in the row, so
      that the row of a chunk tells where it claims to be.
    """
    if catalog.writer not in ("2.3", "2.4-2.6"):
        return
    entries = {name: entry for name, entry in group.tensors.items() if len(entry.chunks) > 1}
    world = 1 + max((stored.rank for entry in entries.values() for places in entry.chunks.values() for stored in places), default=0)
    if world < 4:
        return
    on_grid = any(_cut_dimensions(entry) > 1 for entry in catalog.tensors.values()) or _cut_by_some(entries, world)
    for name, entry in entries.items():
        ranks = [places[0].rank for _, places in sorted(entry.chunks.items(), key=lambda item: item[0].offset)]
        count = len(ranks)
        if on_grid:
            wrong = _cut_dimensions(entry) == 1 and count == world and ranks == sorted(ranks)
        else:
            rows = world // count
            by_row = count < world and all(rank // rows == i for i, rank in enumerate(ranks))
            wrong = by_row and any(rank % count != i for i, rank in enumerate(ranks))
        if wrong:
            what = "tensor parallelism" if on_grid else "hybrid sharding"
            raise Undecidable(
                f"torch <= 2.4 recorded the chunks of FSDP2 with {what} in a wrong order",
                path=root,
                tensor=name,
                expected="a save by torch >= 2.5, or rank files, which record how tensors were cut",
                hint="load it with the torch version that saved it, on the same mesh, and save the full state dict",
            )


def _cut_by_some(entries: Mapping[str, CatalogTensor], world: int) -> bool:
    """Whether some tensors are cut by all ranks, and others by fewer than one mesh of all ranks would cut them."""
    by_all, by_fewer = False, False
    for entry in entries.values():
        if _cut_dimensions(entry) == 1:
            axis = next(d for d in range(len(entry.shape)) if len({box.offset[d] for box in entry.chunks}) > 1)
            size = -(-entry.shape[axis] // world)
            by_all |= len(entry.chunks) == world
            by_fewer |= len(entry.chunks) < -(-entry.shape[axis] // size)
    return by_all and by_fewer


def _cut_dimensions(entry: CatalogTensor) -> int:
    """How many dimensions of a tensor are cut into chunks."""
    return sum(len({box.offset[d] for box in entry.chunks}) > 1 for d in range(len(entry.shape)))
