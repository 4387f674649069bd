"""From what each rank holds to whole tensors: boxes from placements, replicas recognised, coverage proved.

Placements decide, never values. Two ranks whose parts are the same box hold replicas; parts must tile the tensor exactly.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_cli.boxes import Box, Overlapping, Shape, boxes_of, check_tiling, contiguous_strides, split_dimension, whole
from ckpt_cli.dtypes import Dtype
from ckpt_cli.errors import CorruptFile, Gap, Inconsistent, MissingShard, Overlap, Undecidable
from ckpt_cli.files.safetensors_file import Entry
from ckpt_cli.files.source import Source
from ckpt_cli.files.torch_file import Storage, StoredTensor
from ckpt_cli.formats.base import ReadOptions, ShardOrder
from ckpt_cli.formats.rank_files.cuts import splits_of
from ckpt_cli.formats.rank_files.dtensor import DistributedLocal, Local, ShardedLocal
from ckpt_cli.formats.rank_files.experts import expert_blocks
from ckpt_cli.tensors.component import Leaf, Note
from ckpt_cli.tensors.tensor import LayoutKind, Piece, Tensor

MAX_BOXES = 1 << 16
"""Blocks of one tensor on one rank."""


@dataclass(frozen=True, slots=True)
class RankState:
    """What the file of one rank holds; ``fingerprint`` is equal for files of the same bytes, ``recorded`` the rank that it says itself."""

    rank: int
    path: Path
    locals: Mapping[str, Local]
    leaves: tuple[Leaf, ...] = ()
    fingerprint: object = None
    recorded: int | None = None


@dataclass(frozen=True, slots=True)
class Assembled:
    tensors: dict[str, Tensor]
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class RankPart:
    """A stored tensor of one rank, and its box (or that of a block of it, at ``place``) in the whole tensor."""

    rank: int
    stored: StoredTensor
    box: Box
    place: Shape


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor with its parts, before replicas are told from pieces."""

    shape: Shape
    parts: list[RankPart]
    kind: LayoutKind
    layout: str
    check_copies: bool = False


def assemble(states: Sequence[RankState], world_size: int, missing: tuple[int, ...], options: ReadOptions) -> Assembled:
    """The whole tensors of a component, in the order of the lowest rank's state dict.

    Raises MissingShard (if ranks are missing), Gap, Overlap, Inconsistent or Undecidable, each naming the tensor.
    """
    notes: dict[str, Note] = {}
    tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for state in states for name in state.locals):
        held = {state.rank: state.locals[name] for state in states if name in state.locals}
        lacking = [state for state in states if name not in state.locals]
        _check_present(name, held, lacking)
        dtype = _common_dtype(name, held)
        placed = _placed(name, held, world_size, missing, options, notes)
        tensors[name] = tile(name, dtype, placed, world_size, missing)
    if missing:
        _refuse_unseen_ranks(states, world_size, missing)
        text = f"{ranks_of(missing, world_size)} missing; other ranks hold replicas of everything"
        notes["missing"] = Note("warning", "replicas-only", text)
    return Assembled(with_aliases(tensors), tuple(notes.values()))


def _refuse_unseen_ranks(states: Sequence[RankState], world_size: int, missing: tuple[int, ...]) -> None:
    """A missing rank that some tensor's meshes leave out may have held tensors of its own (another pipeline stage).

    Files of plain tensors alone have no meshes: another rank may have held a replica, or a part that was split by hand.
    """
    if all(isinstance(local, StoredTensor) for state in states for local in state.locals.values()):
        raise MissingShard(f"{ranks_of(missing, world_size)} missing, and nothing in the other files says what it held")
    for name in dict.fromkeys(name for state in states for name in state.locals):
        held = [state.locals.get(name) for state in states]
        meshes = [local.mesh for local in held if isinstance(local, DistributedLocal)]
        unseen = [rank for rank in missing if meshes and not any(rank in mesh.ranks for mesh in meshes)]
        if unseen:
            raise MissingShard(f"{ranks_of(missing, world_size)} missing, and what rank {unseen[0]} held is in no other file")


def _check_present(name: str, held: Mapping[int, Local], lacking: Sequence[RankState]) -> None:
    for state in lacking:
        local = next(iter(held.values()))
        if isinstance(local, DistributedLocal) and not any(
            isinstance(other, DistributedLocal) and state.rank in other.mesh.ranks for other in held.values()
        ):
            continue
        raise Inconsistent(
            f"rank {min(held)} has this tensor, rank {state.rank} lacks it",
            tensor=name,
            path=state.path,
            hint="files from two saves may be mixed",
        )


def _common_dtype(name: str, held: Mapping[int, Local]) -> Dtype:
    found: dict[Dtype, list[int]] = {}
    kinds: dict[str, list[int]] = {}
    for rank, local in held.items():
        kinds.setdefault(type(local).__name__, []).append(rank)
        stored = [local] if isinstance(local, StoredTensor) else [local.stored] if isinstance(local, DistributedLocal) else []
        stored += [tensor for tensor, _ in local.shards] if isinstance(local, ShardedLocal) else []
        for tensor in stored:
            found.setdefault(tensor.dtype, []).append(rank)
    if len(kinds) > 1:
        raise Inconsistent("some ranks hold a plain tensor and others a shard", tensor=name, hint="files from two saves may be mixed")
    if len(found) > 1:
        listed = ", ".join(f"{dtype} on rank {ranks[0]}" for dtype, ranks in found.items())
        raise Inconsistent(f"the ranks disagree about the dtype: {listed}", tensor=name, hint="files from two saves may be mixed")
    if not found:
        raise MissingShard("no file holds a shard of this tensor", tensor=name)
    return next(iter(found))


# -- where the parts lie ---------------------------------------------------------------------------------------------


def _placed(
    name: str, held: Mapping[int, Local], world_size: int, missing: tuple[int, ...], options: ReadOptions, notes: dict[str, Note]
) -> PlacedTensor:
    plain = {rank: local for rank, local in held.items() if isinstance(local, StoredTensor)}
    sharded = {rank: local for rank, local in held.items() if isinstance(local, ShardedLocal)}
    distributed = {rank: local for rank, local in held.items() if isinstance(local, DistributedLocal)}
    if plain:
        return _placed_plain(name, plain, world_size)
    if sharded:
        return _placed_sharded(name, sharded)
    return _placed_distributed(name, distributed, world_size, missing, options, notes)


def _placed_plain(name: str, held: Mapping[int, StoredTensor], world_size: int) -> PlacedTensor:
    """A plain tensor is a replica on every rank; the probe compares the replicas."""
    first = next(iter(held.values()))
    _check_same(name, {rank: local.shape for rank, local in held.items()})
    parts = [RankPart(rank, stored, whole(stored.shape), (0,) * len(stored.shape)) for rank, stored in held.items()]
    kind: LayoutKind = "replicated" if world_size > 1 else "whole"
    return PlacedTensor(first.shape, parts, kind, f"replicated x{world_size}" if world_size > 1 else "", check_copies=True)


def _placed_sharded(name: str, held: Mapping[int, ShardedLocal]) -> PlacedTensor:
    first = next(iter(held.values()))
    _check_same(name, {rank: local.shape for rank, local in held.items()})
    parts = [
        RankPart(rank, stored, box, (0,) * len(box.offset))
        for rank, local in held.items()
        for stored, box in local.shards
        if box.numel or not first.shape
    ]
    cut = sum(1 for _, box in first.everywhere if box.numel)
    return PlacedTensor(first.shape, parts, "sharded", f"ShardedTensor x{cut}")


def _placed_distributed(
    name: str,
    held: Mapping[int, DistributedLocal],
    world_size: int,
    missing: tuple[int, ...],
    options: ReadOptions,
    notes: dict[str, Note],
) -> PlacedTensor:
    first = next(iter(held.values()))
    _check_same(name, {rank: local.shape for rank, local in held.items()})
    _check_same(name, {rank: local.placements for rank, local in held.items()})
    parts = _distributed_parts(name, held, options.shard_order, notes)
    shape = first.shape
    blocks = expert_blocks(name, first.shape, list(held.values()), world_size, missing, options.experts, has_config=options.has_config)
    if blocks is not None:
        count, block_of = blocks
        rows = shape[0]
        shape = (rows * count, *shape[1:])
        parts = [
            replace(
                part, box=Box((part.box.offset[0] + rows * block_of[held[part.rank].mesh.ranks], *part.box.offset[1:]), part.box.extent)
            )
            for part in parts
        ]
        notes["experts"] = Note("info", "expert-blocks", f"experts were split by hand into {count} blocks on dimension 0; joined again")
    placements = [p for p, size in zip(first.placements, first.mesh.shape, strict=True) if size > 1]
    sizes = [size for size in first.mesh.shape if size > 1]
    strided = any(placement.factor > 1 for placement in placements)
    cut = any(placement.kind != "Replicate" for placement in placements)
    layout = ", ".join(f"{placement} x{size}" for placement, size in zip(placements, sizes, strict=True))
    if first.padded:
        text = "torch 2.3 recorded one placement on a mesh of two dimensions: it belongs to the last one, the other holds replicas"
        notes["padded"] = Note("info", "hsdp-2.3", text)
    if blocks is not None:
        layout = f"{layout}, {blocks[0]} expert blocks" if layout else f"{blocks[0]} expert blocks"
    kind: LayoutKind = "strided" if strided else "sharded" if cut or blocks else "replicated" if len(held) > 1 else "whole"
    return PlacedTensor(shape, parts, kind, layout or ("replicated" if len(held) > 1 else ""), check_copies=True)


def _distributed_parts(name: str, held: Mapping[int, DistributedLocal], order: ShardOrder, notes: dict[str, Note]) -> list[RankPart]:
    """The boxes of every rank, by the first rule whose local shapes match the files of *all* ranks."""
    first = next(iter(held.values()))
    strided = any(placement.factor > 1 for placement in first.placements)
    found = _parts_by(name, held, strided, order, notes)
    if strided and isinstance(found, Inconsistent):
        found = _parts_by(name, held, False, order, notes)
    if isinstance(found, Inconsistent):
        raise _by_another_order(found, name, held, order)
    return found


def _by_another_order(error: Inconsistent, name: str, held: Mapping[int, DistributedLocal], order: ShardOrder) -> Inconsistent:
    """The error, with the order named with which the local shapes fit, if there is one."""
    others: tuple[ShardOrder, ...] = ("auto", "left-to-right")
    with contextlib.suppress(Undecidable):
        for other in others:
            if other != order and not isinstance(_parts_by(name, held, False, other, {}), Inconsistent):
                said = f"leave out --shard-order {order}" if other == "auto" else f"pass --shard-order {other}"
                error.hint = f"{said}: cut in that order, this tensor has the parts that the files hold"
                return error
    return error


def _parts_by(
    name: str, held: Mapping[int, DistributedLocal], nested: bool, order: ShardOrder, notes: dict[str, Note]
) -> list[RankPart] | Inconsistent:
    """The boxes of every rank by one rule, or the error that contradicts it."""
    parts: list[RankPart] = []
    for rank, local in held.items():
        intervals = [split_dimension(length, splits_of(name, local, dim, nested, order, notes)) for dim, length in enumerate(local.shape)]
        extent = tuple(sum(size for _, size in axis) for axis in intervals)
        if extent != local.stored.shape:
            return Inconsistent(
                f"rank {rank} should hold a part of shape {list(extent)} by its placements, but the file holds {list(local.stored.shape)}",
                tensor=name,
                hint="files from two saves may be mixed, or the tensor was cut by a rule that placements do not record",
            )
        if math.prod(len(axis) for axis in intervals) > MAX_BOXES:
            raise CorruptFile("its placements cut the tensor into too many blocks", expected=f"at most {MAX_BOXES}")
        parts += [RankPart(rank, local.stored, box, place) for box, place in boxes_of(intervals) if box.numel]
    return parts


def _check_same(name: str, values: Mapping[int, object]) -> None:
    first_rank, first = next(iter(values.items()))
    for rank, value in values.items():
        if value != first:
            raise Inconsistent(
                f"the ranks disagree: {_plain(first)} on rank {first_rank}, {_plain(value)} on rank {rank}",
                tensor=name,
                hint="files from two saves may be mixed",
            )


def _plain(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return f"shape {list(value)}" if all(isinstance(n, int) for n in value) else f"({', '.join(map(str, value))})"


def cut_layout(shape: Shape, boxes: Iterable[Box]) -> tuple[LayoutKind, str]:
    """Kind and layout of a tensor whose chunks say where they lie: "dim 0 x4" is cut into four along dimension 0."""
    listed = list(boxes)
    cuts = [len({box.offset[d] for box in listed}) for d in range(len(shape))]
    layout = ", ".join(f"dim {d} x{count}" for d, count in enumerate(cuts) if count > 1)
    return ("sharded" if layout else "whole"), layout


def stored_entry(entry: Entry, source: Source) -> StoredTensor:
    """A tensor of a safetensors file in the terms of torch files."""
    storage = Storage(source, entry.name, entry.offset, entry.nbytes, None)
    return StoredTensor(storage, entry.dtype, entry.shape, contiguous_strides(entry.shape), entry.offset)


# -- pieces, copies, coverage ----------------------------------------------------------------------------------------


def tile(name: str, dtype: Dtype, placed: PlacedTensor, world_size: int, missing: tuple[int, ...]) -> Tensor:
    """Separate pieces from replicas (the same box again) and prove that the pieces tile the tensor."""
    parts = map(_piece, sorted(placed.parts, key=lambda part: part.rank))
    lacking = f"{ranks_of(missing, world_size)} missing" if missing else None
    return tiled(name, dtype, placed.shape, parts, placed.kind, placed.layout, check_copies=placed.check_copies, lacking=lacking)


def one_piece(name: str, stored: StoredTensor, rank: int) -> Tensor:
    """What one rank holds of a tensor, as a tensor of its own."""
    placed = PlacedTensor(stored.shape, [RankPart(rank, stored, whole(stored.shape), (0,) * len(stored.shape))], "whole", "")
    return tile(name, stored.dtype, placed, 0, ())


def tiled(
    name: str,
    dtype: Dtype,
    shape: Shape,
    parts: Iterable[Piece],
    kind: LayoutKind,
    layout: str,
    *,
    check_copies: bool = True,
    lacking: str | None = None,
) -> Tensor:
    """A tensor of these parts: a box that comes again is a replica. Raises Overlap, Gap, or MissingShard where ``lacking`` says what is."""
    pieces: dict[Box, Piece] = {}
    copies: list[Piece] = []
    for piece in parts:
        if piece.box in pieces:
            copies.append(piece)
        elif piece.box.numel:
            pieces[piece.box] = piece
    boxes = list(pieces)
    problem = check_tiling(shape, boxes)
    if isinstance(problem, Overlapping):
        first, second = pieces[boxes[problem.first]], pieces[boxes[problem.second]]
        raise Overlap(
            f"ranks {first.rank} and {second.rank} both hold {problem.box} of shape {list(shape)}",
            tensor=name,
            hint="files from two saves may be mixed",
        )
    if problem is not None:
        text = f"{problem.elements:,} elements of shape {list(shape)}, from {problem.box} on"
        if lacking is not None:
            raise MissingShard(lacking)
        hint = "files from two saves may be mixed, or files of some ranks may be missing"
        raise Gap(f"no rank holds {text}", tensor=name, hint=hint)
    return Tensor(
        name=name,
        dtype=dtype,
        shape=shape,
        pieces=tuple(pieces.values()),
        copies=tuple(copies),
        kind=kind,
        layout=layout,
        check_copies=check_copies and bool(copies),
    )


def _piece(part: RankPart) -> Piece:
    stored = part.stored
    start = sum(i * stride for i, stride in zip(part.place, stored.strides, strict=True))
    return Piece(
        source=stored.storage.source,
        offset=stored.offset + start * stored.dtype.itemsize,
        strides=stored.strides,
        box=part.box,
        rank=part.rank,
        swapped=stored.swapped,
        conj=stored.conj,
        neg=stored.neg,
        crc=stored.record_crc if part.box.extent == stored.shape else None,
    )


def with_aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names whose pieces are the same bytes of the same files share a storage: tied weights as FSDP2 saves them."""
    seen: dict[tuple[object, ...], str] = {}
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        key = (tensor.dtype, tensor.shape, *(piece.same_bytes_as for piece in tensor.pieces))
        first = seen.setdefault(key, name) if tensor.numel else name
        result[name] = tensor if first == name else replace(tensor, alias_of=first)
    return result


def ranks_of(ranks: Sequence[int], world_size: int) -> str:
    """The subject of a sentence: "rank 2 of 4 is", "ranks 1, 3 of 4 are"."""
    listed = ", ".join(map(str, ranks[:12])) + (f" and {len(ranks) - 12} more" if len(ranks) > 12 else "")
    return f"rank {listed} of {world_size} is" if len(ranks) == 1 else f"ranks {listed} of {world_size} are"
