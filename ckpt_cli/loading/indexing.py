"""Indexing of tensors that are only described, with the meaning that numpy gives to integers, slices and the ellipsis."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

from ckpt_cli.boxes import Shape
from ckpt_cli.errors import UsageError
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.tensors.views import selected, sliced


class OutOfRange(UsageError, IndexError):
    """An index beyond the end of a dimension; the IndexError ends a loop over a tensor."""


def indexed(tensor: Tensor, key: object) -> Tensor:
    """``tensor[key]``: integers drop a dimension, slices with a positive step cut it, "..." stands for all that are not named.

    Nothing is read. Raises UsageError for anything else, and for indices out of range.
    """
    result, axis = tensor, 0
    for part, length in zip(_complete(key, tensor), tensor.shape, strict=True):
        if isinstance(part, slice):
            try:
                start, stop, step = part.indices(length)
            except Exception as error:  # arrays and tensors raise what they like
                raise UsageError("this is not a slice of integers with a step other than 0", tensor=tensor.name) from error
            if step < 0:
                raise UsageError("slices of a lazy tensor cannot run backwards", tensor=tensor.name, hint="reverse what numpy() returns")
            if (start, max(start, stop), step) != (0, length, 1):
                result = sliced(result, axis, start, max(start, stop), step)
            axis += 1
        else:
            result = selected(result, axis, _position(part, length, tensor))
    return result


def _complete(key: object, tensor: Tensor) -> list[Any]:
    """One integer or slice per dimension."""
    given = key if isinstance(key, tuple) else (key,)
    parts = [part if part is Ellipsis or isinstance(part, slice) else _integer(part, tensor) for part in given]
    rank = len(tensor.shape)
    dots = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise UsageError("an index has only one ellipsis", tensor=tensor.name)
    if len(parts) - len(dots) > rank:
        raise OutOfRange(f"{len(parts) - len(dots)} indices for a tensor of shape {list(tensor.shape)}", tensor=tensor.name)
    rest = [slice(None)] * (rank - len(parts) + len(dots))
    return [*parts[: dots[0]], *rest, *parts[dots[0] + 1 :]] if dots else [*parts, *rest]


def _position(position: int, length: int, tensor: Tensor) -> int:
    if not -length <= position < length:
        raise OutOfRange(f"index {position} is out of range for a dimension of {length}", tensor=tensor.name)
    return position % length


def _integer(part: Any, tensor: Tensor) -> int:
    """An integer of any library. Raises UsageError for what numpy takes for a mask, a list of positions or a new dimension, and all else.

    Arrays of one element have ``__index__`` too, but keep their dimensions when they are used as an index.
    """
    many = isinstance(part, (list, tuple, range)) or getattr(part, "shape", ()) != ()
    if not many and not isinstance(part, bool) and "bool" not in str(getattr(part, "dtype", "")):
        with contextlib.suppress(Exception):  # arrays and tensors raise what they like
            return operator.index(part)
    kind = f"a mask or an array of positions ({type(part).__name__})" if many else type(part).__name__
    text = f"a lazy tensor takes integers, slices and '...' as its index, not {kind}"
    raise UsageError(text, tensor=tensor.name, hint="index what numpy() returns")


def parse_index(text: str, shape: Shape) -> tuple[object, ...]:
    """The index that a text such as "0:4,:8", "3" or "...,0" means. Raises UsageError for another form."""
    return tuple(_part(part.strip(), text) for part in text.strip().removeprefix("[").removesuffix("]").split(",")) if shape else ()


def _part(part: str, text: str) -> object:
    if part == "...":
        return Ellipsis
    try:
        numbers = [int(number) if number.strip() else None for number in part.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] is not None:
        return numbers[0]
    if len(numbers) in (2, 3):
        return slice(*numbers)
    raise UsageError(f"{text!r} is not a slice", expected="integers and ranges separated by commas, such as 0:4,:8")
