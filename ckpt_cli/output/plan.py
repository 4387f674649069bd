"""The output, decided before the first byte: files, headers, offsets, totals. Pure, no I/O."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ckpt_cli.boxes import Box, contiguous_strides
from ckpt_cli.dtypes import BY_CODE, CAST_NAMES, Dtype
from ckpt_cli.errors import Unsupported, UsageError
from ckpt_cli.files.crc32 import combined
from ckpt_cli.files.safetensors_file import build_header
from ckpt_cli.files.source import Source
from ckpt_cli.meant import dtype_meant
from ckpt_cli.tensors.reading import is_run, tiles
from ckpt_cli.tensors.tensor import Piece, Tensor
from ckpt_cli.tensors.weighted_sum import Formula

TILE = 4 << 20
"""Bytes of source data that one worker assembles at a time."""

COPY_STEP = 64 << 20
"""Bytes of one in-kernel copy, so that several workers share a large tensor and progress moves."""

WORTH_COPYING = 256 << 10
"""Pieces smaller than this on average are assembled in memory instead of copied one by one."""

SUM_ELEMENTS = 128 << 10
"""Elements of a tile of a weighted sum: of each source one tile is read after the other, and the sums stay in the cache."""

FORMAT_METADATA = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class Combination:
    """The same tensor of several checkpoints, and the formula that makes one of them; ``tensors`` has one per weight."""

    tensors: tuple[Tensor, ...]
    formula: Formula


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of an output file: where its bytes go (``offset`` from the start of the file) and what they become.

    ``combination``: it is computed from several tensors, of which ``tensor`` is one, for shape and dtype.
    """

    name: str
    dtype: Dtype
    tensor: Tensor
    offset: int = 0
    combination: Combination | None = None

    @property
    def origins(self) -> tuple[Tensor, ...]:
        """The tensors that are read."""
        return (self.tensor,) if self.combination is None else self.combination.tensors

    @property
    def nbytes(self) -> int:
        return self.tensor.numel * self.dtype.itemsize

    @property
    def is_cast(self) -> bool:
        return self.dtype is not self.tensor.dtype and self.dtype != self.tensor.dtype


@dataclass(frozen=True, slots=True)
class OutputFile:
    name: str
    header: bytes
    size: int
    tensors: tuple[OutputTensor, ...]


@dataclass(frozen=True, slots=True)
class CopyWork:
    """A byte range of a piece of a tensor that goes from source to output unchanged."""

    output: OutputTensor
    piece: Piece
    source_offset: int
    target_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TileWork:
    """A tile that is assembled, cast if needed, and written."""

    output: OutputTensor
    tile: Box
    target_offset: int


@dataclass(frozen=True)
class Plan:
    """Everything that `ckpt_cli.output.writer` will do, and nothing more."""

    files: tuple[OutputFile, ...]
    index: bytes | None
    index_name: str | None
    dropped: Mapping[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    """Tensors that are in fp32 whatever the others are cast to."""

    @property
    def tensors(self) -> list[OutputTensor]:
        return [tensor for file in self.files for tensor in file.tensors]

    @property
    def elements(self) -> int:
        return sum(output.tensor.numel for output in self.tensors)

    @property
    def bytes_read(self) -> int:
        return sum(tensor.nbytes for output in self.tensors for tensor in output.origins)

    @property
    def bytes_written(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def header_checksums(self) -> dict[str, int]:
        """The CRC-32 of the header of each file."""
        return {file.name: zlib.crc32(file.header) for file in self.files}

    @property
    def sources(self) -> list[Source]:
        """Everything that bytes are read from, each once."""
        tensors = (tensor for output in self.tensors for tensor in output.origins)
        sources = {piece.source.identity.path: piece.source for tensor in tensors for piece in tensor.pieces}
        found = {origin.identity.path: origin for source in sources.values() for origin in source.origins}
        return list(found.values())

    @cached_property
    def digest(self) -> str:
        """SHA-256 of names, dtypes, shapes, layout of the output, of where every byte comes from, and of its CRC-32 where that is known."""
        state = hashlib.sha256()
        for file in self.files:
            state.update(file.name.encode() + file.header)
            for output in file.tensors:
                if output.combination is not None:
                    state.update(repr(output.combination.formula).encode())
                for piece in (piece for tensor in output.origins for piece in tensor.pieces):
                    state.update(piece.text.encode("utf-8", "surrogateescape"))
        return state.hexdigest()


def make_plan(
    tensors: Mapping[str, Tensor],
    *,
    dtype: str = "keep",
    dtypes: Mapping[str, Dtype] | None = None,
    max_shard_size: int | None = None,
    weights_name: str = "model.safetensors",
    quantised: bool = False,
    dropped: Mapping[str, str] | None = None,
    combinations: Mapping[str, Combination] | None = None,
    kept: frozenset[str] = frozenset(),
    metadata: Mapping[str, str] | None = None,
) -> Plan:
    """Plan the output of ``tensors`` (output name -> tensor); those in ``combinations`` are computed from several.

    ``dtype`` is "keep" or a name of `CAST_NAMES`; ``dtypes`` (by name) goes before it, and so does ``kept``, which names those that
    are fp32; ``max_shard_size`` is in bytes, None never splits; every header has ``metadata``. Raises UsageError for an unknown dtype,
    Unsupported for tensors that safetensors cannot hold or that must not be cast.
    """
    wanted, combined = {**(dtypes or {}), **dict.fromkeys(kept, BY_CODE["F32"])}, combinations or {}
    outputs = [
        OutputTensor(
            name, wanted[name] if name in wanted else output_dtype(tensor, dtype, quantised), tensor, combination=combined.get(name)
        )
        for name, tensor in tensors.items()
    ]
    for output in outputs:
        if quantised and output.is_cast:
            raise Unsupported(
                f"the config says that weights are quantised: {output.tensor.dtype} is not cast to {output.dtype}",
                tensor=output.name,
                hint="pass --dtype keep",
            )
        if not output.dtype.storable:
            hint = "leave it out with --exclude"
            raise Unsupported(f"safetensors cannot store dtype {output.dtype}", tensor=output.name, hint=hint)
    groups = _split(outputs, max_shard_size)
    stem = weights_name.removesuffix(".safetensors")
    names = [weights_name] if len(groups) == 1 else [f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    files = tuple(_lay_out(name, group, {**(metadata or {}), **FORMAT_METADATA}) for name, group in zip(names, groups, strict=True))
    index = index_name = None
    if len(files) > 1:
        weight_map = {output.name: file.name for file in files for output in file.tensors}
        total = sum(output.nbytes for output in outputs)
        ordered = {name: weight_map[name] for name in tensors}
        index = _index(ordered, total)
        index_name = f"{weights_name}.index.json"
    return Plan(files, index, index_name, dict(dropped or {}), kept)


def united(plans: Sequence[Plan], index_name: str | None, indexed: str | None) -> Plan:
    """Several plans for one folder, with an index that maps the tensors of the file ``indexed`` to it."""
    files = tuple(file for plan in plans for file in plan.files)
    index = plans[0].index if len(plans) == 1 else None
    for file in files:
        if file.name == indexed:
            index = _index({output.name: file.name for output in file.tensors}, sum(output.nbytes for output in file.tensors))
    dropped = {name: why for plan in plans for name, why in plan.dropped.items()}
    kept = frozenset(name for plan in plans for name in plan.kept)
    return Plan(files, index, index_name if index is not None else None, dropped, kept)


def _index(weight_map: Mapping[str, str], total: int) -> bytes:
    content = {"metadata": {"total_size": total}, "weight_map": dict(weight_map)}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def output_dtype(tensor: Tensor, dtype: str, quantised: bool = False) -> Dtype:
    """The dtype that ``--dtype`` gives a tensor: only floating tensors are cast, never ints, bools or quantised ones."""
    if dtype == "keep":
        return tensor.dtype
    if dtype not in CAST_NAMES:
        expected = f"keep, {', '.join(CAST_NAMES)}, or base (with --base)"
        raise UsageError(f"unknown dtype {dtype}", expected=expected, hint=dtype_meant(dtype))
    if tensor.dtype.kind == "opaque" or quantised:
        raise Unsupported(
            f"quantised weights cannot be cast to {dtype}" if quantised else f"{tensor.dtype} values are meaningless without their scales",
            tensor=tensor.name,
            hint="use --dtype keep",
        )
    return BY_CODE[CAST_NAMES[dtype]] if tensor.dtype.kind == "float" else tensor.dtype


def work_of(file: OutputFile, *, in_order: bool = False) -> Iterator[CopyWork | TileWork]:
    """The pieces of work that fill one file, in the order of the file. They write disjoint ranges, so any order is right.

    ``in_order``: copies too are in steps of the size of a tile, as those who write wait for each other.
    """
    copy_step = TILE if in_order else COPY_STEP
    for output in file.tensors:
        tensor = output.tensor
        if not tensor.numel:
            continue
        if output.combination is not None:
            written = 0
            for tile in tiles(tensor.shape, 1, SUM_ELEMENTS):
                yield TileWork(output, tile, output.offset + written)
                written += tile.numel * output.dtype.itemsize
        elif _is_copy(output):
            strides = contiguous_strides(tensor.shape)
            for piece in sorted(tensor.pieces, key=lambda piece: piece.box.offset):
                first = sum(i * stride for i, stride in zip(piece.box.offset, strides, strict=True)) * tensor.dtype.itemsize
                length = piece.box.numel * tensor.dtype.itemsize
                for start in range(0, length, copy_step):
                    count = min(copy_step, length - start)
                    yield CopyWork(output, piece, piece.offset + start, output.offset + first + start, count)
        else:
            written = 0
            for tile in tiles(tensor.shape, tensor.dtype.itemsize, TILE):
                yield TileWork(output, tile, output.offset + written)
                written += tile.numel * output.dtype.itemsize


def known_checksum(output: OutputTensor) -> int | None:
    """The CRC-32 of a tensor that is copied from records with a stored CRC-32. Nothing is read."""
    if output.combination is not None or not output.tensor.numel or not _is_copy(output):
        return None
    pieces = sorted(output.tensor.pieces, key=lambda piece: piece.box.offset)
    crcs = [(piece.crc, piece.box.numel * output.dtype.itemsize) for piece in pieces]
    return combined((crc, length) for crc, length in crcs if crc is not None) if all(crc is not None for crc, _ in crcs) else None


def known_checksums(file: OutputFile) -> dict[str, int]:
    """The CRC-32 of those tensors of a file of which it is known. Nothing is read."""
    known = {output.name: known_checksum(output) for output in file.tensors}
    return {name: crc for name, crc in known.items() if crc is not None}


def _is_copy(output: OutputTensor) -> bool:
    """Whether every piece is one contiguous range in both file and output, of bytes that stay as they are."""
    tensor = output.tensor
    if output.is_cast or tensor.nbytes < WORTH_COPYING * len(tensor.pieces):
        return False
    strides = contiguous_strides(tensor.shape)
    return all(piece.verbatim and is_run(piece.box.extent, piece.strides) and is_run(piece.box.extent, strides) for piece in tensor.pieces)


def _split(outputs: Sequence[OutputTensor], limit: int | None) -> list[list[OutputTensor]]:
    """Fill files in order up to ``limit`` bytes; a tensor larger than that gets a file of its own (as huggingface_hub does)."""
    if limit is None:
        return [list(outputs)]
    groups: list[list[OutputTensor]] = [[]]
    filled = 0
    for output in outputs:
        if groups[-1] and filled + output.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(output)
        filled += output.nbytes
    return groups


def _lay_out(name: str, outputs: Sequence[OutputTensor], metadata: Mapping[str, str]) -> OutputFile:
    """Wide dtypes first, so that every tensor begins at a multiple of its element size, as the safetensors library does."""
    ordered = sorted(outputs, key=lambda output: -output.dtype.itemsize)
    header, offsets = build_header(((o.name, o.dtype, o.tensor.shape) for o in ordered), metadata)
    placed = tuple(replace(output, offset=offset) for output, offset in zip(ordered, offsets, strict=True))
    size = placed[-1].offset + placed[-1].nbytes if placed else len(header)
    return OutputFile(name, header, size, placed)
