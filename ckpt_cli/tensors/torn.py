"""Files from an interrupted copy: of full size, with zeros or holes where weights should be.

A safetensors file and a ``.distcp`` file have their headers first and no checksum, so that nothing else tells. Zeros may also be what
was trained or a padded vocabulary; what is said is therefore a warning, and only of zeros that a trained model hardly has.
"""

from __future__ import annotations

import bisect
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.boxes import Shape
from ckpt_cli.dtypes import Dtype
from ckpt_cli.files.source import FileSource
from ckpt_cli.names import printable
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.masks import is_mask
from ckpt_cli.tensors.tensor import Piece, Tensor

LEAST_HOLE = 1 << 20
"""Bytes. Programs that resume downloads write in far larger parts; smaller holes are zeros that ``cp`` left out."""

LEAST_ZEROS = 4096
"""Bytes. Copies are cut off between pages of memory or larger units."""

MOST_READ = 64 << 20
"""Bytes that are read from the end of a file on, looking for the first that is not zero."""

MOST_HOLES = 10_000
NORM = re.compile(r"(^|[._])(\w*norm\w*|ln(_?\w+)?)([.][0-9]+)?[.]weight$", re.ASCII | re.IGNORECASE)
"""The scales of norms. Some classes begin with zeros there, but a sparse copy has no hole for so few, unless all around are zeros too."""

VOCABULARY = re.compile(r"embed|\bwt?[tp]e\b|lm_head|vocab|position", re.ASCII)
"""Matrices whose last rows may be zero because nothing was ever looked up there: padding."""


@dataclass(frozen=True, slots=True)
class Torn:
    """The signs of an interrupted copy: ``size``, ``holes`` and ``zeros`` are bytes; ``tensor`` is where the zeros at its end begin.

    ``unwritten`` is a tensor all of which lies in holes, and which no trained model has as zeros.
    """

    path: str
    size: int
    holes: int = 0
    zeros: int = 0
    tensor: str | None = None
    unwritten: str | None = None

    @property
    def code(self) -> str:
        if self.unwritten is not None:
            return "unwritten-weights"
        return "sparse-file" if self.holes else "zero-tail"

    @property
    def text(self) -> str:
        """The message, without the name of the file."""
        if self.holes:
            whole = f", and of {printable(self.unwritten)} none" if self.unwritten is not None else ""
            return f"{self.holes} of {self.size} bytes were never written{whole}, as after an interrupted download or copy"
        return f"the last {self.zeros} of {self.size} bytes are zeros, from {self.tensor} on, as after an interrupted copy"


def torn_notes(tensors: Iterable[Tensor]) -> list[Note]:
    """Warnings about the files that tensors are read from."""
    return [Note("warning", one.code, f"{Path(one.path).name}: {one.text}") for one in torn_files(tensors)]


def torn_files(tensors: Iterable[Tensor], *, ends: bool = True) -> list[Torn]:
    """The files that look like an interrupted copy; ``ends`` also reads the end of each."""
    held: dict[str, tuple[FileSource, list[tuple[Piece, Tensor]]]] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            if isinstance(piece.source, FileSource) and piece.box.numel:
                held.setdefault(piece.source.path, (piece.source, []))[1].append((piece, tensor))
    found = []
    for path, (source, pieces) in held.items():
        holes = holes_of(source)
        if holes:
            lost = sum(end - begin for begin, end in holes)
            found.append(Torn(path, source.size, holes=lost, unwritten=_unwritten(pieces, holes, most=lost > source.size // 2)))
        elif ends and (zeros := _zeros_at_the_end(source, pieces)) is not None:
            found.append(zeros)
    return found


def may_end_in_zeros(name: str, shape: Shape, dtype: Dtype) -> bool:
    """Whether zeros at the end of a tensor mean nothing: biases, vectors, tensors that are not floats, and rows of a vocabulary."""
    return sum(n > 1 for n in shape) < 2 or dtype.kind != "float" or name.endswith("bias") or "lora_" in name or is_vocabulary(name)


def is_vocabulary(name: str) -> bool:
    """Whether rows of a matrix are looked up, so that the last may be padding."""
    return VOCABULARY.search(name) is not None


def holes_of(source: FileSource) -> list[tuple[int, int]]:
    """Where a file was never written, in bytes (begin, end), in holes of a size that matters; empty if the system does not tell."""
    if not (source.is_local and hasattr(os, "SEEK_HOLE")):
        return []
    found, position = list[tuple[int, int]](), 0
    with source.descriptor() as fd:
        try:
            for _ in range(MOST_HOLES):
                start = os.lseek(fd, position, os.SEEK_HOLE)
                if start >= source.size:
                    break
                try:
                    position = os.lseek(fd, start, os.SEEK_DATA)
                except OSError:  # ENXIO: there are no more data
                    position = source.size
                if position - start >= LEAST_HOLE:
                    found.append((start, position))
                if position >= source.size:
                    break
        except OSError:
            return found
    return found


def _unwritten(pieces: Iterable[tuple[Piece, Tensor]], holes: list[tuple[int, int]], *, most: bool) -> str | None:
    """A tensor that lies in one hole and that no trained model has as zeros: the scale of a norm, or any matrix where ``most`` is holes.

    Zeros that were trained and that ``cp --sparse`` left out, such as biases or the last layer of a block that was added, end at the next
    norm, and are the smaller part of a model.
    """
    begins = [begin for begin, _ in holes]
    for piece, tensor in pieces:
        begin, end = piece.span(tensor.dtype.itemsize)
        number = bisect.bisect_right(begins, begin) - 1
        is_inside = number >= 0 and end <= holes[number][1] and piece.box.numel == tensor.numel
        if is_inside and (NORM.search(tensor.name) or (most and not may_end_in_zeros(tensor.name, tensor.shape, tensor.dtype))):
            return tensor.name
    return None


def _zeros_at_the_end(source: FileSource, pieces: list[tuple[Piece, Tensor]]) -> Torn | None:
    """The zeros that a file ends with, if a trained model hardly has them."""
    end = max(piece.span(tensor.dtype.itemsize)[1] for piece, tensor in pieces)
    zeros = _trailing_zeros(source, min(piece.offset for piece, _ in pieces), end)
    if zeros < LEAST_ZEROS:
        return None
    start = end - zeros
    spans = sorted(((*piece.span(tensor.dtype.itemsize), tensor) for piece, tensor in pieces), key=lambda span: span[:2])
    doubtful = [
        tensor
        for begin, stop, tensor in spans
        if stop > start
        and min(stop - start, stop - begin) >= min(LEAST_ZEROS, (stop - begin) // 4)
        and not may_end_in_zeros(tensor.name, tensor.shape, tensor.dtype)
        and not is_mask(tensor.name, tensor)
    ]
    return Torn(source.path, source.size, zeros=zeros, tensor=doubtful[0].name) if doubtful else None


def _trailing_zeros(source: FileSource, begin: int, end: int) -> int:
    """How many bytes before ``end`` are zero, as far as they were read."""
    zeros, block = 0, LEAST_ZEROS
    while zeros < MOST_READ and zeros < end - begin:
        block = min(block, end - begin - zeros)
        kept = len(source.read(end - zeros - block, block).rstrip(b"\0"))
        zeros += block - kept
        if kept:
            break
        block = 1 << 20
    return zeros
