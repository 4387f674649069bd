"""Indexing of tensors that are only described, with the meaning that numpy gives to integers, slices and the ellipsis."""

from __future__ import annotations

import operator

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
            except (TypeError, ValueError) as error:
                raise UsageError(f"{part} is not a slice of integers with a step other than 0", tensor=tensor.name) from error
            if step < 0:
                raise UsageError("slices of a lazy tensor cannot run backwards", tensor=tensor.name, hint="reverse what numpy() returns")
            if (start, max(start, stop), step) != (0, length, 1):
                result = sliced(result, axis, start, max(start, stop), step)
            axis += 1
        else:
            result = selected(result, axis, _position(part, length, tensor))
    return result


def _complete(key: object, tensor: Tensor) -> list[object]:
    """One integer or slice per dimension."""
    parts: list[object] = list(key) if isinstance(key, tuple) else [key]
    rank = len(tensor.shape)
    dots = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise UsageError("an index has only one ellipsis", tensor=tensor.name)
    if len(parts) - len(dots) > rank:
        raise OutOfRange(f"{len(parts) - len(dots)} indices for a tensor of shape {list(tensor.shape)}", tensor=tensor.name)
    rest: list[object] = [slice(None)] * (rank - len(parts) + len(dots))
    return [*parts[: dots[0]], *rest, *parts[dots[0] + 1 :]] if dots else [*parts, *rest]


def _position(part: object, length: int, tensor: Tensor) -> int:
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        text = f"a lazy tensor takes integers, slices and '...' as its index, not {type(part).__name__}"
        raise UsageError(text, tensor=tensor.name, hint="index what numpy() returns")
    position = operator.index(part)
    if not -length <= position < length:
        raise OutOfRange(f"index {position} is out of range for a dimension of {length}", tensor=tensor.name)
    return position % length


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
