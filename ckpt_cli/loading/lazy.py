"""A checkpoint as a mapping of lazy tensors: they know name, shape and dtype, and read their values when asked for them."""

from __future__ import annotations

import difflib
import html
import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckpt_cli.boxes import Shape, shape_text
from ckpt_cli.dtypes import Dtype
from ckpt_cli.errors import NotFound
from ckpt_cli.files.source import Files
from ckpt_cli.given import DtypeLike, boundary, dtype_of
from ckpt_cli.loading.elements import all_bytes, as_dtype, as_numpy, as_torch, overflow, target_dtype
from ckpt_cli.loading.indexing import indexed
from ckpt_cli.names import plural, printable
from ckpt_cli.results.checkpoint import NoteInfo
from ckpt_cli.tensors.tensor import Tensor

if TYPE_CHECKING:
    import torch

    from ckpt_cli.loading.elements import Array

ROWS = 50
"""Tensors that are listed in a notebook."""


class UnknownTensor(NotFound, KeyError):
    """A name that a checkpoint does not have; also a KeyError, as of any mapping."""


class LazyTensor:
    """A tensor of a checkpoint, or a slice of one. Nothing is read before `numpy` or `torch`.

    ``t[0:4, :8]`` is again lazy, and only what it covers is read.
    """

    __slots__ = ("_before", "_checksum", "_dtype", "_tensor")

    def __init__(self, tensor: Tensor, dtype: Dtype, *, checksum: bool = False, before: tuple[Dtype, ...] = ()) -> None:
        """``before``: the dtypes that the values are cast to on the way to ``dtype``, in their order."""
        self._tensor = tensor
        self._dtype = dtype
        self._checksum = checksum
        self._before = before

    @property
    def name(self) -> str:
        """The name of the tensor in its checkpoint."""
        return self._tensor.name

    @property
    def shape(self) -> Shape:
        """Elements per dimension."""
        return self._tensor.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements in all."""
        return self._tensor.numel

    @property
    def nbytes(self) -> int:
        """Bytes of the values in memory."""
        return self.size * self._dtype.itemsize

    @property
    def dtype(self) -> str:
        """The dtype of the values as torch calls it, such as "bfloat16"."""
        return self._dtype.torch

    @property
    def layout(self) -> str:
        """How it lies on the ranks, such as "Shard(0) x8"; empty for a tensor that is whole."""
        return self._tensor.layout

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for tensors of one checkpoint that are the same stored elements, such as tied ones."""
        return (self.shape, *self._before, self._dtype, *(piece.same_bytes_as for piece in self._tensor.pieces))

    def to(self, dtype: DtypeLike) -> LazyTensor:
        """The tensor cast to fp32, bf16 or fp16 when it is read, rounded to nearest even; integers and bools stay.

        Casts of casts are made one after the other, as those of torch: in fp32, what was bf16 has the values of bf16.
        """
        target = target_dtype(dtype_of(dtype), self._dtype)
        is_first = not self._before and self._dtype == self._tensor.dtype
        known = self._before if is_first or self._dtype == target else (*self._before, self._dtype)
        return LazyTensor(self._tensor, target, checksum=self._checksum, before=known)

    def numpy(self) -> Array:
        """The values as a new array; bfloat16 and 8-bit floats are dtypes of ml_dtypes.

        Raises Unsupported for dtypes that numpy lacks, CastOverflow, SourceChanged for files that are not those that were opened, and what
        reading raises: CorruptFile for a record that does not have its checksum, if the checkpoint was opened with ``checksum``.
        """
        return as_numpy(self._read(), self._dtype, self.shape, self.name)

    def unchecked(self) -> torch.Tensor:
        """What `torch` gives, for who reads many and asks once, at the end, whether files changed."""
        return as_torch(self._values(), self._dtype, self.shape, self.name)

    def torch(self) -> torch.Tensor:
        """The values as a new tensor in CPU memory. Raises Unsupported if torch is not installed, and as `numpy` does."""
        return as_torch(self._read(), self._dtype, self.shape, self.name)

    @boundary
    def _read(self) -> bytearray:
        data = self._values()
        # Afterwards, and also where a descriptor stayed open: what was just read may lie in a file that was rewritten in place.
        for origin in {origin.path: origin for piece in self._tensor.pieces for origin in piece.source.origins}.values():
            origin.check_unchanged()
        return data

    def _values(self) -> bytearray:
        first, *others = (*self._before, self._dtype)
        data, now = all_bytes(self._tensor, first, checksum=self._checksum), first
        for dtype in others:
            data, infinite = as_dtype(data, now, dtype, self._tensor.numel)
            if infinite:
                raise overflow(self.name, infinite, dtype)
            now = dtype
        return data

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        values = self.numpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __getitem__(self, key: object) -> LazyTensor:
        return LazyTensor(indexed(self._tensor, key), self._dtype, checksum=self._checksum, before=self._before)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        layout = f", {self.layout}" if self.layout else ""
        return f"<{printable(self.name)}: {self.dtype} {shape_text(self.shape)}{layout}>"


class LazyCheckpoint(Mapping[str, LazyTensor]):
    """The tensors of one component of a checkpoint by name.

    ``component`` is what was opened, ``components`` what there is, ``notes`` what was noticed. Files are closed by `close`, at the
    end of a with block, or with the object; a tensor that is read later opens them again. Reading notices if they changed.
    """

    def __init__(
        self,
        tensors: Mapping[str, LazyTensor],
        files: Files,
        *,
        path: str,
        step: int | None,
        component: str,
        components: tuple[str, ...],
        notes: tuple[NoteInfo, ...],
    ) -> None:
        self._tensors = dict(tensors)
        self._close = weakref.finalize(self, files.close)
        self._files = files
        self.path = path
        self.step = step
        self.component = component
        self.components = components
        self.notes = notes

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors, in their order."""
        return tuple(self._tensors)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def read_all(self) -> dict[str, torch.Tensor]:
        """All tensors in CPU memory, those of the same elements as one. Files are asked once, at the end, whether they changed."""
        made: dict[tuple[object, ...], torch.Tensor] = {}
        for tensor in self.values():
            if tensor.identity not in made:
                made[tensor.identity] = tensor.unchecked()
        self._files.check_unchanged()
        return {name: made[tensor.identity] for name, tensor in self.items()}

    def __getitem__(self, name: str) -> LazyTensor:
        try:
            return self._tensors[name]
        except (KeyError, TypeError):
            close = difflib.get_close_matches(str(name), self._tensors, n=1)
            hint = f"did you mean {printable(close[0])}?" if close else None
            raise UnknownTensor(f"there is no tensor {printable(name)} in {self.component}", path=self.path, hint=hint) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> LazyCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{printable(self.component)} of {printable(self.path)}: {plural(len(self), 'tensor')}>"

    def _repr_html_(self) -> str:
        """A table, as notebooks show it."""
        rows = [
            "<tr>"
            + "".join(f"<td>{html.escape(printable(cell))}</td>" for cell in (t.name, t.dtype, shape_text(t.shape), t.layout))
            + "</tr>"
            for t in list(self.values())[:ROWS]
        ]
        more = f"<p>... and {len(self) - ROWS} more</p>" if len(self) > ROWS else ""
        heads = "<tr><th>tensor</th><th>dtype</th><th>shape</th><th>layout</th></tr>"
        return f"<p>{html.escape(repr(self)[1:-1])}</p><table>{heads}{''.join(rows)}</table>{more}"
