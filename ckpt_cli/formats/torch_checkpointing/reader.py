"""torch_checkpointing, the successor of DCP: a file per item and rank, ``<item>_<rank>.pt`` or ``.safetensors``, and ``metadata.pkl``.

A ``.pt`` file is what ``torch.save`` makes of the item, with DTensors as in any rank file. A ``.safetensors`` file has the local tensors
alone, so that only the metadata says what they are parts of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_cli.boxes import contiguous_strides
from ckpt_cli.errors import CkptError, CorruptFile, Inconsistent, MissingShard, Undecidable, reading
from ckpt_cli.files.folders import Folders, is_file
from ckpt_cli.files.safetensors_file import Entry, parse_json, read_header
from ckpt_cli.files.source import Files, FileSource, read_small
from ckpt_cli.files.torch_file import StoredTensor, TorchFile
from ckpt_cli.formats.ages import age_notes
from ckpt_cli.formats.assembly import RankState, assemble, stored_entry
from ckpt_cli.formats.base import Format, Match, OptimizerOfRanks, RankValues, ReadOptions, all_roots
from ckpt_cli.formats.dcp.groups import MODEL
from ckpt_cli.formats.optimizer_state import OPTIMIZER
from ckpt_cli.formats.rank_files.dtensor import DistributedLocal, Local, LocalReader, RankMesh, ShardedLocal
from ckpt_cli.formats.rank_files.reader import check_rank_files, largest_mesh, notes_of_ranks, read_rank_file
from ckpt_cli.formats.safetensors.folder import entry_leaf
from ckpt_cli.formats.torch_checkpointing.metadata import (
    FORM_OF,
    ITEM_FILE,
    METADATA,
    Boxes,
    Item,
    ItemFile,
    NestedPath,
    Saved,
    SavedMesh,
    Sharding,
    Spread,
    read_metadata,
)
from ckpt_cli.formats.torch_files.averages import is_average_name
from ckpt_cli.formats.torch_files.groups import groups_of
from ckpt_cli.formats.torch_files.state_dict import left_out_notes
from ckpt_cli.formats.training_state_names import is_record_key, is_state_key
from ckpt_cli.names import check_name, is_extra_state
from ckpt_cli.tensors.component import Component, Note
from ckpt_cli.tensors.plain_values import ValueReader

FORMAT = "torch-checkpointing"
MAIN = "model"


class TorchCheckpointing(Format):
    """Reader of torch_checkpointing's folders."""

    name = FORMAT
    display = "torch_checkpointing"
    by_content = True

    def recognise(self, path: Path, there: Folders) -> list[Match]:
        if there.is_file(path):
            if path.name != METADATA and not ITEM_FILE.fullmatch(path.name):
                return []
            matches = self.recognise(path.parent, there)
            return matches[:1] if path.name == METADATA else [match for match in matches if path in match.files]
        if not there.is_file(path / METADATA):
            return []
        items = {name: ranks for name, ranks in named_items(path, there).items() if next(iter(ranks.values())).suffix != ".json"}
        if not items:
            return []
        # Items of other names, or in files that a layout names, are found in the metadata.
        models = {name: ranks for name, ranks in items.items() if name == MAIN or (MAIN in items and _is_model_name(name))}
        if not models:
            candidates = {name: ranks for name, ranks in items.items() if not is_state_key(name) and not is_record_key(name)}
            files = tuple(file for ranks in candidates.values() for file in ranks.values())
            return [Match(FORMAT, MAIN, path, files or (path / METADATA,), self.display)]
        ordered = sorted(models, key=lambda name: (name != MAIN, is_average_name(name), name))
        return [Match(FORMAT, name, path, tuple(models[name].values()), self.display, ranks=models[name]) for name in ordered]

    def groups(self, match: Match, files: Files) -> list[str]:
        """The items that hold weights, the main one first."""
        if match.trouble is not None or match.component != MAIN:
            return [match.component]
        saved = read_metadata(match.root / METADATA, files)
        found = _weights(match, saved, files)
        # Files called after the model are the model's, whatever else holds weights.
        return list(dict.fromkeys((MAIN, *found))) if match.ranks else found or [MAIN]

    def joined(self, first: Match, second: Match) -> Match:
        ranks = {**second.ranks, **first.ranks}
        return replace(super().joined(first, second), ranks=ranks, more_roots=all_roots(first, second))

    def complements(self, first: Match, second: Match) -> bool:
        return not {path.name for path in first.files} & {path.name for path in second.files}

    def describe(self, match: Match, files: Files, options: ReadOptions) -> Component:
        saved = read_metadata(match.root / METADATA, files)
        name = match.group or self.groups(match, files)[0]
        item = item_of(name, match, saved)
        there = {rank: path for rank, file in item.files.items() if (path := _path(file, match)) is not None}
        missing = tuple(rank for rank in range(saved.world_size) if rank not in there)
        first_missing = match.root / item.files[missing[0]].path if missing else None
        if not there:
            raise MissingShard(f"no file of item {name} is there", path=match.root, expected=str(first_missing))
        states: list[RankState] = []
        notes: list[list[Note]] = []
        for rank, path in there.items():
            with reading(match.root / METADATA):
                described = item.of_rank(rank)
            if item.files[rank].form == "safetensors":
                if not item.tensors and saved.world_size > 1:
                    raise _undescribed(name, saved, path)
                states.append(_safetensors_state(rank, path, described, files, alone=not item.tensors))
            else:
                state, said = read_rank_file(rank, path, files, MAIN, None, MAIN)
                _check_described(state, described)
                states.append(state)
                notes.append(said)
        check_rank_files(states, saved.world_size)
        try:
            assembled = assemble(states, saved.world_size, missing, options)
        except MissingShard as error:
            error.expected = error.expected or (None if first_missing is None else str(first_missing))
            raise
        sources = [files.source(path) for path in (*there.values(), match.root / METADATA)]
        return Component(
            name=match.component,
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
        weights = set(_weights(match, saved, files))
        held = {rank: RankValues({}, {}) for rank in range(saved.world_size)}
        for name in _all_items(match, saved):
            if name in weights or OPTIMIZER.fullmatch(name):
                continue
            for rank, file in item_of(name, match, saved).files.items():
                path = _path(file, match)
                if path is not None:
                    held[rank].values[name], held[rank].sources[name] = _value(path, file.form, files), path
        return held

    def optimizer_files(self, match: Match, files: Files) -> OptimizerOfRanks | None:
        saved = read_metadata(match.root / METADATA, files)
        named = [name for name in _all_items(match, saved) if OPTIMIZER.fullmatch(name)]
        own = [name for name in named if name.endswith(f"_{match.group or match.component}")] or named
        if len(own) != 1:
            return None
        there = {rank: path for rank, file in item_of(own[0], match, saved).files.items() if (path := _path(file, match)) is not None}
        return OptimizerOfRanks(there, saved.world_size) if there else None


def named_items(folder: Path, there: Folders) -> dict[str, dict[int, Path]]:
    """The files of each item by rank, as their names say."""
    items: dict[str, dict[int, Path]] = {}
    for path in there.files(folder, ITEM_FILE.fullmatch):
        if (fields := ITEM_FILE.fullmatch(path.name)) is not None:
            items.setdefault(fields["item"], {})[int(fields["rank"])] = path
    return {name: dict(sorted(ranks.items())) for name, ranks in items.items()}


def item_of(name: str, match: Match, saved: Saved) -> Item:
    """An item of a save; of one that the metadata does not list, names alone tell the files. Raises Inconsistent for impossible ranks."""
    if name in saved.items:
        return saved.items[name]
    files: dict[int, ItemFile] = {}
    for root in (match.root, *match.more_roots):
        for rank, path in named_items(root, Folders()).get(name, {}).items():
            files.setdefault(rank, ItemFile(path.name, FORM_OF[path.suffix.removeprefix(".")]))
    if files and max(files) >= saved.world_size:
        path = match.root / files[max(files)].path
        raise Inconsistent(f"the file is of rank {max(files)}, but {saved.world_size} ranks wrote this save", path=path)
    suffix = next((file.path.rpartition(".")[2] for file in files.values()), "pt")
    return Item({rank: files.get(rank, ItemFile(f"{name}_{rank}.{suffix}", FORM_OF[suffix])) for rank in range(saved.world_size)}, {})


def _all_items(match: Match, saved: Saved) -> list[str]:
    named = (name for root in (match.root, *match.more_roots) for name in named_items(root, Folders()))
    return list(dict.fromkeys((*saved.items, *named)))


def _weights(match: Match, saved: Saved, files: Files) -> list[str]:
    """The items that hold weights: the model first, averages last."""
    found = [name for name in _all_items(match, saved) if _holds_weights(name, match, saved, files)]
    return sorted(found, key=lambda name: (name != MAIN, not _is_model_name(name), is_average_name(name), name))


def _holds_weights(name: str, match: Match, saved: Saved, files: Files) -> bool:
    if is_state_key(name):
        return False
    if name in saved.items:
        return any(len(sharding.shape) > 1 for entries in saved.items[name].tensors.values() for _, sharding in entries)
    if is_record_key(name):
        return False
    # The metadata does not list it, so that its file is asked: a dict of numbers is no model.
    path = next((path for file in item_of(name, match, saved).files.values() if (path := _path(file, match)) is not None), None)
    if path is None or path.suffix != ".pt":
        return path is not None and path.suffix == ".safetensors"
    try:
        file = files.parsed(path, TorchFile)
        reader = LocalReader(file, 0)
        with reading(path):
            group = groups_of(file, MAIN, reader)[1][0]
            return any((local := reader.read(node)) is not None and len(local.shape) > 1 for node in group.entries.values())
    except CkptError:
        return False


def _is_model_name(name: str) -> bool:
    return not is_state_key(name) and (MODEL.fullmatch(name) is not None or is_average_name(name))


def _path(file: ItemFile, match: Match) -> Path | None:
    """Where a file of an item is, of the folders of all nodes; None if it is in none."""
    return next((root / file.path for root in (match.root, *match.more_roots) if is_file(root / file.path)), None)


def _value(path: Path, form: str, files: Files) -> Any:
    """The value of an item in a file of one rank."""
    with reading(path):
        if form == "json":
            return parse_json(read_small(path))
        if form == "raw":
            return read_small(path)
        if form == "safetensors":
            raise CorruptFile("an item without weights is kept in safetensors", expected="a file of torch.save")
        file = TorchFile(files.source(path))
        return ValueReader(file).read(file.root)


# -- local tensors, and what the metadata says of them -----------------------------------------------------------------


def _undescribed(name: str, saved: Saved, path: Path) -> Undecidable:
    return Undecidable(
        f"item {name} was saved without a resharder: nothing says which parts of the tensors its {saved.world_size} files hold",
        path=path,
        expected=f"item {name} in {METADATA}",
        hint="save it again with a resharder for this item, or as .pt files, which say it themselves",
    )


def _safetensors_state(rank: int, path: Path, by_path: Mapping[NestedPath, Sharding], files: Files, *, alone: bool) -> RankState:
    source = files.source(path)
    header = read_header(source)
    described = {".".join(map(str, nested)): sharding for nested, sharding in by_path.items()}
    meshes: dict[int, RankMesh] = {}
    held: dict[str, Local] = {}
    with reading(path):
        for entry in header.entries:
            with reading(path, tensor=entry.name):
                held[check_name(entry.name)] = _local(rank, entry, source, described, meshes, alone=alone)
    lacking = next((text for text in described if text not in held), None)
    if lacking is not None:
        text = f"{METADATA} says that rank {rank} has this tensor, and its file does not"
        raise Inconsistent(text, tensor=lacking, path=path, hint="files from two saves may be mixed")
    weights = {key: local for key, local in held.items() if not is_extra_state(key)}
    leaves = tuple(entry_leaf(entry) for entry in header.entries if is_extra_state(entry.name))
    return RankState(rank, path, weights, leaves)


def _local(
    rank: int, entry: Entry, source: FileSource, described: Mapping[str, Sharding], meshes: dict[int, RankMesh], *, alone: bool
) -> Local:
    """A tensor of a file; ``alone``: one rank saved the item, and nothing describes it. ``meshes`` are those that were read before."""
    stored = stored_entry(entry, source)
    sharding = described.get(entry.name)
    if sharding is None:
        if alone:
            return stored
        raise Inconsistent(f"{METADATA} does not say that rank {rank} has this tensor", hint="files from two saves may be mixed")
    if isinstance(sharding, Boxes):
        return ShardedLocal(sharding.shape, tuple(_parts(stored, sharding)), tuple((rank, box) for box, _ in sharding.boxes))
    if id(sharding.mesh) not in meshes:
        meshes[id(sharding.mesh)] = _mesh(rank, sharding.mesh)
    return DistributedLocal(stored, sharding.shape, sharding.placements, meshes[id(sharding.mesh)], None, False, False)


def _parts(stored: StoredTensor, sharding: Boxes) -> Iterable[tuple[StoredTensor, Any]]:
    """Each part of a stored tensor, and its box in the whole."""
    for box, inside in sharding.boxes:
        if any(start + n > size for start, n, size in zip(inside, box.extent, stored.shape, strict=True)):
            raise Inconsistent("a part reaches beyond the tensor in the file", hint="files from two saves may be mixed")
        first = sum(i * stride for i, stride in zip(inside, stored.strides, strict=True))
        yield replace(stored, shape=box.extent, offset=stored.offset + first * stored.dtype.itemsize), box


def _mesh(rank: int, mesh: SavedMesh) -> RankMesh:
    if rank not in mesh.ranks:
        raise CorruptFile(f"the metadata say that rank {rank} has this tensor, whose mesh leaves it out")
    position = mesh.ranks.index(rank)
    coordinate = tuple(position // stride % size for size, stride in zip(mesh.shape, contiguous_strides(mesh.shape), strict=True))
    return RankMesh(mesh.names, mesh.shape, mesh.ranks, coordinate)


def _check_described(state: RankState, by_path: Mapping[NestedPath, Sharding]) -> None:
    """What a file says of its tensors must be what the metadata says: else they are of different saves. Raises Inconsistent."""
    described: dict[str, list[Sharding]] = {}
    for nested, sharding in by_path.items():
        described.setdefault(str(nested[-1]) if nested else "", []).append(sharding)
    alike: dict[tuple[int, int], bool] = {}
    for name, shardings in described.items():
        local = state.locals.get(name)
        if local is not None and len(shardings) == 1 and not _agrees(local, shardings[0], alike):
            raise Inconsistent(
                f"the file of rank {state.rank} and {METADATA} disagree about this tensor",
                tensor=name,
                path=state.path,
                hint="files from two saves may be mixed",
            )
    flat = all(len(nested) == 1 for nested in by_path)
    lacking = next((name for name in described if flat and name not in state.locals and not is_extra_state(name)), None)
    if lacking is not None:
        text = f"{METADATA} says that rank {state.rank} has this tensor, and its file does not"
        raise Inconsistent(text, tensor=lacking, path=state.path, hint="files from two saves may be mixed")


def _agrees(local: Local, sharding: Sharding, alike: dict[tuple[int, int], bool]) -> bool:
    """Whether a tensor of a file is sharded as the metadata say; ``alike`` has the meshes that were compared before."""
    if local.shape != sharding.shape:
        return False
    if not isinstance(local, DistributedLocal) or not isinstance(sharding, Spread):
        return True
    pair = (id(local.mesh), id(sharding.mesh))
    if pair not in alike:
        alike[pair] = (local.mesh.shape, local.mesh.ranks) == (sharding.mesh.shape, sharding.mesh.ranks)
    return alike[pair] and local.placements == sharding.placements
