"""Local tensors of an item's files, and what the metadata says of them: both must speak of the same tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_cli.boxes import contiguous_strides
from ckpt_cli.errors import CorruptFile, Inconsistent, Undecidable, reading
from ckpt_cli.files.pickle_nodes import as_dict
from ckpt_cli.files.safetensors_file import read_header
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import StoredTensor, TorchFile
from ckpt_cli.formats.assembly import RankState, one_piece, stored_entry
from ckpt_cli.formats.rank_files.dtensor import DistributedLocal, Local, RankMesh, ShardedLocal
from ckpt_cli.formats.rank_files.reader import RankRead
from ckpt_cli.formats.safetensors.folder import entry_leaf
from ckpt_cli.formats.torch_checkpointing.metadata import METADATA, Boxes, NestedPath, Saved, SavedMesh, Sharding, Spread, path_text
from ckpt_cli.formats.training_state_names import is_state_key
from ckpt_cli.formats.unused.search import CODE, Unused
from ckpt_cli.names import check_name, is_extra_state
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import alike
from ckpt_cli.tensors.tensor import Tensor

MIXED = "files from two saves may be mixed"


def undescribed(name: str, saved: Saved, path: Path) -> Undecidable:
    return Undecidable(
        f"item {name} was saved without a resharder: nothing says which parts of the tensors its {saved.world_size} files hold",
        path=path,
        expected=f"item {name} in {METADATA}",
        hint="save it again with a resharder for this item, or as .pt files, which say it themselves",
    )


def safetensors_state(
    rank: int, path: Path, by_path: Mapping[NestedPath, Sharding], files: Files, *, alone: bool
) -> tuple[RankState, dict[str, Tensor]]:
    """What a file of safetensors holds, placed as the metadata says, and its tensors as they lie in it."""
    source = files.source(path)
    header = read_header(source)
    described = {path_text(nested): sharding for nested, sharding in by_path.items()}
    if len(described) < len(by_path):
        raise CorruptFile(f"{METADATA} has two places for one tensor of rank {rank}", path=path, expected="a name for each tensor")
    meshes: dict[int, RankMesh] = {}
    held: dict[str, Local] = {}
    plain: dict[str, Tensor] = {}
    with reading(path):
        for entry in header.entries:
            with reading(path, tensor=entry.name):
                stored = stored_entry(entry, source)
                plain[entry.name] = one_piece(entry.name, stored, rank)
                held[check_name(entry.name)] = _local(rank, stored, path, described, meshes, entry.name, alone=alone)
    lacking = next((text for text in described if text not in held), None)
    if lacking is not None:
        raise _lacking(rank, path, lacking)
    weights = {key: local for key, local in held.items() if not is_extra_state(key)}
    leaves = tuple(entry_leaf(entry) for entry in header.entries if is_extra_state(entry.name))
    return RankState(rank, path, weights, leaves), {key: plain[key] for key in weights}


def _local(
    rank: int, stored: StoredTensor, path: Path, described: Mapping[str, Sharding], meshes: dict[int, RankMesh], name: str, *, alone: bool
) -> Local:
    """A tensor of a file; ``alone``: one rank saved the item, and nothing describes it. ``meshes`` are those that were read before."""
    sharding = described.get(name)
    if sharding is None:
        if alone:
            return stored
        raise _unlisted(rank, path, name)
    if isinstance(sharding, Boxes):
        return ShardedLocal(sharding.shape, tuple(_parts(stored, sharding)), tuple((rank, box) for box, _ in sharding.boxes))
    if id(sharding.mesh) not in meshes:
        meshes[id(sharding.mesh)] = _mesh(rank, sharding.mesh)
    return DistributedLocal(stored, sharding.shape, sharding.placements, meshes[id(sharding.mesh)], None, False, False)


def _parts(stored: StoredTensor, sharding: Boxes) -> Iterable[tuple[StoredTensor, Any]]:
    """Each part of a stored tensor, and its box in the whole."""
    for box, inside in sharding.boxes:
        if any(start + n > size for start, n, size in zip(inside, box.extent, stored.shape, strict=True)):
            raise Inconsistent("a part reaches beyond the tensor in the file", hint=MIXED)
        first = sum(i * stride for i, stride in zip(inside, stored.strides, strict=True))
        yield replace(stored, shape=box.extent, offset=stored.offset + first * stored.dtype.itemsize), box


def _mesh(rank: int, mesh: SavedMesh) -> RankMesh:
    if rank not in mesh.ranks:
        raise CorruptFile(f"the metadata say that rank {rank} has this tensor, whose mesh leaves it out")
    position = mesh.ranks.index(rank)
    coordinate = tuple(position // stride % size for size, stride in zip(mesh.shape, contiguous_strides(mesh.shape), strict=True))
    return RankMesh(mesh.names, mesh.shape, mesh.ranks, coordinate)


def refuse_copies(read: Sequence[tuple[RankState, Mapping[str, Tensor]]]) -> None:
    """Raise Inconsistent if two files with different parts of tensors have the same bytes: a file of safetensors says no rank."""
    # Files that hold only parts of vectors may be equal, such as ones.
    held = [stored if any(len(tensor.shape) > 1 and tensor.numel for tensor in stored.values()) else {} for _, stored in read]
    for first, second in alike(held):
        one, other = read[first][0], read[second][0]
        if any(_place(local) != _place(other.locals[name]) for name, local in one.locals.items()):
            text = f"{one.path.name} holds the same parts of the tensors: one file was copied over the other"
            raise Inconsistent(text, path=other.path, expected="another part for each rank", hint=MIXED)


def _place(local: Local) -> object:
    """What makes the part of one rank another than that of others: coordinates on the axes that cut it, or boxes."""
    if isinstance(local, ShardedLocal):
        return [box for _, box in local.shards]
    if not isinstance(local, DistributedLocal):
        return None
    return [at for at, placement in zip(local.mesh.coordinate, local.placements, strict=False) if placement.kind != "Replicate"]


def check_described(read: RankRead, file: TorchFile, by_path: Mapping[NestedPath, Sharding]) -> list[Note]:
    """What a file of ``torch.save`` says of its tensors must be what the metadata says: else they are of different saves.

    Every tensor of the metadata must be in the file, at its place, and every tensor of the state dict in the metadata, since the library
    lists all of an item; a note tells of those that are in no state dict of the file. Raises Inconsistent.
    """
    rank, path = read.state.rank, read.state.path
    names = {id(node): str(name) for name, node in read.entries.items()}
    told = {id(node) for group in read.groups for node in (*group.entries.values(), group.node) if node is not None}
    meshes: dict[tuple[int, int], bool] = {}
    listed: set[int] = set()
    beside: list[str] = []
    for nested, sharding in by_path.items():
        way, text = _way_to(file.root, nested), path_text(nested)
        if way is None:
            raise _lacking(rank, path, text)
        listed.add(id(way[-1]))
        local = read.state.locals.get(names.get(id(way[-1]), ""))
        if local is not None and not _agrees(local, sharding, meshes):
            raise Inconsistent(f"the file of rank {rank} and {METADATA} disagree about this tensor", tensor=text, path=path, hint=MIXED)
        if told.isdisjoint(map(id, way)) and not any(map(is_state_key, nested)):
            beside.append(text)
    unlisted = next((name for name in read.state.locals if id(read.entries[name]) not in listed), None)
    if unlisted is not None:
        raise _unlisted(rank, path, unlisted)
    if not beside or any(note.code == CODE for note in read.notes):
        return []
    return Unused(tuple(beside)).notes


def _way_to(root: object, nested: NestedPath) -> list[object] | None:
    """What a file holds on the way to a place, through dicts and lists, and there; None if nothing is there."""
    way = [root]
    for part in nested:
        node = way[-1]
        if isinstance(node, (list, tuple)):
            inner = node[part] if isinstance(part, int) and 0 <= part < len(node) else None
        else:
            inner = (as_dict(node) or {}).get(part)
        if inner is None:
            return None
        way.append(inner)
    return way


def _lacking(rank: int, path: Path, name: str) -> Inconsistent:
    return Inconsistent(f"{METADATA} says that rank {rank} has this tensor, and its file does not", tensor=name, path=path, hint=MIXED)


def _unlisted(rank: int, path: Path, name: str) -> Inconsistent:
    return Inconsistent(f"{METADATA} does not say that rank {rank} has this tensor", tensor=name, path=path, hint=MIXED)


def _agrees(local: Local, sharding: Sharding, meshes: dict[tuple[int, int], bool]) -> bool:
    """Whether a tensor of a file is sharded as the metadata say; ``meshes`` has the pairs that were compared before."""
    if local.shape != sharding.shape:
        return False
    if not isinstance(local, DistributedLocal) or not isinstance(sharding, Spread):
        return True
    pair = (id(local.mesh), id(sharding.mesh))
    if pair not in meshes:
        meshes[pair] = (local.mesh.shape, local.mesh.ranks) == (sharding.mesh.shape, sharding.mesh.ranks)
    return meshes[pair] and local.placements == sharding.placements
