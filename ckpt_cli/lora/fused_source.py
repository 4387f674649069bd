"""A weight with its LoRA update, as a source of bytes: rows are computed when they are read. A view of its piece is again pieces.

W' = W + scale * B A (Hu et al., 2021); with a magnitude m (DoRA, Liu et al., 2024) W' = m / ||W + scale * B A|| * (W + scale * B A), where
the norm is that of each output's row. Everything is computed in float64 and rounded once, so that the result is the exactly
rounded one but for about one element in 10^8, whatever part of it is read first.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpt_cli.boxes import contiguous_strides, whole
from ckpt_cli.dtypes import BY_CODE, Dtype, numpy_dtype, overflow_hint
from ckpt_cli.errors import CastOverflow, CorruptFile, NonFinite
from ckpt_cli.files.descriptors import Identity
from ckpt_cli.files.source import Source
from ckpt_cli.names import few
from ckpt_cli.tensors.casting import cast
from ckpt_cli.tensors.reading import elements
from ckpt_cli.tensors.records import Records
from ckpt_cli.tensors.tensor import Piece, Tensor

if TYPE_CHECKING:
    from ckpt_cli.tensors.reading import Array

BLOCK = 1 << 20
"""Bytes of float64 that are computed at a time; blocks always begin at the same rows, so that every reading gives the same bits."""

KEPT = 24 << 20
"""Bytes of blocks that are kept for the next reading, of all tensors together."""

TENSORS = 3
"""So many tensors have their factors in memory: files are written tensor by tensor, and two overlap."""


@dataclass(frozen=True, slots=True)
class Update:
    """What is added to a weight of ``groups`` matrices [rows, columns]: ``scale`` times left @ right of each.

    ``left`` [groups * rows, r] and ``right`` [groups * r, columns] are given by functions that read them, since views of small
    factors are cheaper as arrays; ``parts`` are the tensors that they read, ``magnitude`` [rows], or [columns] if ``by_column``.
    """

    weight: Tensor
    parts: tuple[Tensor, ...]
    left: Callable[[], Array]
    right: Callable[[], Array]
    scale: float
    rows: int
    columns: int
    groups: int = 1
    magnitude: Tensor | None = None
    by_column: bool = False
    layout: str = ""


class Scratch(threading.local):
    """Arrays of a thread that are used again for every block: memory that is new each time costs more than what is computed in it."""

    def __init__(self) -> None:
        self._held: dict[str, Array] = {}

    def array(self, use: str, rows: int, columns: int) -> Array:
        """An array of float64 [rows, columns] with any values, the same memory for the same ``use``."""
        import numpy

        if use not in self._held or self._held[use].size < rows * columns:
            self._held[use] = numpy.empty(rows * columns)
        return self._held[use][: rows * columns].reshape(rows, columns)


class Kept:
    """A cache of computed blocks, up to a number of bytes, shared by all fused tensors; also whether they may overflow."""

    def __init__(self, limit: int = KEPT, *, allow_overflow: bool = False) -> None:
        self.allow_overflow = allow_overflow
        self.scratch = Scratch()
        self._limit = limit
        self._held: OrderedDict[tuple[Any, ...], Array] = OrderedDict()
        self._factors: OrderedDict[Identity, tuple[Array, Array]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def factors(self, owner: Identity, update: Update) -> tuple[Array, Array]:
        """Both factors of an update. Those of the last few tensors stay, however large they are: every block needs them."""
        with self._lock:
            if owner in self._factors:
                self._factors.move_to_end(owner)
                return self._factors[owner]
        made = update.left(), update.right()
        if not self.allow_overflow:
            _refuse_non_finite(update, made)
        with self._lock:
            self._factors[owner] = made
            while len(self._factors) > TENSORS:
                self._factors.popitem(last=False)
        return made

    def get(self, key: tuple[Any, ...], make: Callable[[], Array]) -> Array:
        """The array of a key, made if it is not there (perhaps twice, if two threads ask at once)."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        made = make()
        with self._lock:
            if key not in self._held:
                self._held[key] = made
                self._size += made.nbytes
            while self._size > self._limit and len(self._held) > 1:
                self._size -= self._held.popitem(last=False)[1].nbytes
        return made


class FusedSource:
    """The bytes of a fused tensor in C order."""

    def __init__(self, update: Update, dtype: Dtype, kept: Kept) -> None:
        self._update = update
        self._dtype = dtype
        self._kept = kept
        self._records = Records()
        tensors = (update.weight, *update.parts, *([update.magnitude] if update.magnitude is not None else []))
        self.tensors = tensors
        found = {origin.identity: origin for tensor in tensors for p in tensor.pieces for origin in p.source.origins}
        self.origins: tuple[Source, ...] = tuple(found.values())
        self.forward_only = any(piece.source.forward_only for tensor in tensors for piece in tensor.pieces)
        self.size = update.weight.numel * dtype.itemsize
        self.identity = self._identified(tensors)
        self._rows = max(1, BLOCK // (8 * max(update.columns, 1)))

    @property
    def path(self) -> str:
        """The first file of the weight."""
        return self._update.weight.pieces[0].source.path

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on."""
        data = bytearray(length)
        self.read_at(offset, memoryview(data))
        return bytes(data)

    def read_at(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset`` on. Raises CorruptFile at the end, and what reading the files raises."""
        if offset + len(buffer) > self.size:
            raise CorruptFile(f"{len(buffer)} bytes at {offset} lie outside of a tensor of {self.size} bytes", path=self.path)
        stride = self._rows * self._update.columns * self._dtype.itemsize
        done = 0
        while done < len(buffer):
            number, inside = divmod(offset + done, stride)
            block = self._kept.get((self.identity, number), lambda number=number: self._block(number))  # type: ignore[misc]
            part = block.data[inside : inside + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)

    def check_unchanged(self) -> None:
        """Raise SourceChanged unless all files behind it are what they were."""
        for origin in self.origins:
            origin.check_unchanged()

    def _identified(self, tensors: Sequence[Tensor]) -> Identity:
        """Stands for every piece that takes part, and for the formula."""
        update, state = self._update, hashlib.sha256()
        state.update(f"{update.scale!r}:{update.rows}:{update.columns}:{update.groups}:{update.by_column}:{update.layout}".encode())
        for tensor in tensors:
            for piece in tensor.pieces:
                state.update(piece.text.encode("utf-8", "surrogateescape"))
        first = update.weight.pieces[0].source.identity
        return replace(first, path=f"{first.path}#{update.weight.name}:{self._dtype}:{state.hexdigest()[:32]}", size=self.size)

    def _block(self, number: int) -> Array:
        """The bytes of a block of rows, rounded."""
        import numpy

        start, update = number * self._rows, self._update
        # Norms of columns are computed in the same scratch memory, so before the block.
        columns = self._kept.get((self.identity, "norms"), lambda: self._column_factors(update)) if update.by_column else None
        values = self._values(start, min(self._rows, update.groups * update.rows - start))
        with numpy.errstate(all="ignore"):
            if columns is not None:
                values *= columns.reshape(1, -1)
            elif update.magnitude is not None:
                values *= self._row_factors(update.magnitude, values, start)
        rounded = numpy.empty(values.size, numpy_dtype(self._dtype))
        infinite = cast(values.reshape(-1), F64, self._dtype, rounded)
        if infinite and not self._kept.allow_overflow:
            raise CastOverflow(
                f"with its LoRA adapter, values are too large for {self._dtype}",
                tensor=self._update.weight.name,
                expected="values that stay finite",
                hint=overflow_hint([self._dtype]),
            )
        return rounded.view(numpy.uint8)

    def _values(self, start: int, count: int) -> Array:
        """W + scale * left @ right for some rows, in float64, in the scratch memory of the thread."""
        import numpy

        update, scratch = self._update, self._kept.scratch
        values = scratch.array("values", count, update.columns)
        weight = elements(update.weight, start * update.columns, count * update.columns, records=self._records)
        numpy.copyto(values.reshape(-1), weight, casting="unsafe")
        left, right = self._kept.factors(self.identity, update)
        rank = left.shape[1]
        with numpy.errstate(all="ignore"):
            while count > 0:
                group = start // update.rows
                here = min(count, (group + 1) * update.rows - start)
                product = scratch.array("product", here, update.columns)
                numpy.matmul(left[start : start + here], right[group * rank : (group + 1) * rank], out=product)
                product *= update.scale
                place = values[len(values) - count : len(values) - count + here]
                place += product
                start, count = start + here, count - here
        return values

    def _row_factors(self, magnitude: Tensor, values: Array, start: int) -> Array:
        """The magnitude of each row over its norm."""
        import numpy

        magnitudes = self._kept.get((self.identity, "magnitude"), lambda: _wide(magnitude))
        factors: Array = (magnitudes[start : start + len(values)] / numpy.linalg.norm(values, axis=1)).reshape(-1, 1)
        return factors

    def _column_factors(self, update: Update) -> Array:
        """Magnitudes over norms of columns: one more pass over the weight. Ones without a magnitude."""
        import numpy

        if update.magnitude is None:
            return numpy.ones(update.columns)
        squares = numpy.zeros(update.columns)
        with numpy.errstate(all="ignore"):
            for start in range(0, update.rows, self._rows):
                squares += (self._values(start, min(self._rows, update.rows - start)) ** 2).sum(axis=0)
            factors: Array = _wide(update.magnitude) / numpy.sqrt(squares)
        return factors


def fused(update: Update, name: str, dtype: Dtype, kept: Kept) -> Tensor:
    """The updated weight as a tensor of one piece."""
    weight = update.weight
    source = FusedSource(update, dtype, kept)
    piece = Piece(source, 0, contiguous_strides(weight.shape), whole(weight.shape))
    return Tensor(name, dtype, weight.shape, (piece,) if weight.numel else (), layout="fused", kind=weight.kind)


def matrix(tensor: Tensor, rows: int, columns: int) -> Array:
    """All of a small tensor in float64, as a matrix."""
    return _wide(tensor).reshape(rows, columns)


def _refuse_non_finite(update: Update, factors: tuple[Array, Array]) -> None:
    """Raise NonFinite for a factor with such values: one of them spoils a row or a column of the weight, or all of it."""
    import numpy

    if not all(numpy.isfinite(factor).all() for factor in factors):
        raise NonFinite(
            f"NaN or infinite values in the factors of its adapter: {few([part.name for part in update.parts], 2)}",
            tensor=update.weight.name,
            expected="finite values, as a training that did not diverge leaves them",
            hint="merge a step from before that, or pass --allow-overflow to write what comes of them",
        )


def _wide(tensor: Tensor) -> Array:
    import numpy

    return elements(tensor, records=Records()).astype(numpy.float64)


F64 = BY_CODE["F64"]
