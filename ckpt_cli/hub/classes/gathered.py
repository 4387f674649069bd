"""Tensors that a hub rule gathers must be complete: every source, every element of a list, one tensor per name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ckpt_cli.errors import CkptError, Inconsistent
from ckpt_cli.hub.classes.rules import Conversion
from ckpt_cli.names import few
from ckpt_cli.tensors.tensor import Tensor

JOINING = ("Concatenate", "MergeModulelist")
"""Operations that make one tensor of several."""

MAX_PARTS = 1 << 16
"""The largest number of parts (experts, heads, shards) of a tensor; no model has more."""

NATIVE = "pass --names native to write the tensors that are there under the names of training"
MODEL = "config and tensors belong to different models; pass --names native to write them as the training named them"


class TwoForms(Inconsistent):
    """Tensors that would get one name on the hub; ``names`` are theirs in memory."""

    def __init__(self, names: Sequence[str], final: str) -> None:
        super().__init__(f"two tensors get the same name on the hub: {few(names)}", tensor=final)
        self.names = tuple(names)


@contextmanager
def applying(conversion: Conversion, tensor: str) -> Iterator[None]:
    """Attach the tensor and the rule to errors; input that an operation cannot use is Inconsistent."""
    try:
        yield
    except CkptError as error:
        error.tensor = error.tensor or tensor
        error.details = error.details or (rule_text(conversion),)
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        raise Inconsistent(
            "tensor and config do not fit the rule that gives it its name on the hub",
            tensor=tensor,
            details=(rule_text(conversion),),
            hint=MODEL,
        ) from None


def rule_text(conversion: Conversion) -> str:
    """A rule as text: sources, targets, operations."""
    renaming, operations = conversion.renaming, [str(operation["name"]) for operation in conversion.operations]
    return f"rule: {' + '.join(renaming.sources)} -> {' + '.join(renaming.targets)} ({', '.join(operations)})"


def check_gathered(conversion: Conversion, names: Mapping[str, Sequence[str]]) -> None:
    """Raise Inconsistent unless a rule gathered all that it joins; ``names`` are those of the tensors for each of its sources."""
    joins = any(operation["name"] in JOINING for operation in conversion.operations)
    if not joins:
        for listed in names.values():
            if len(listed) > 1 or len(names) > 1:
                raise TwoForms([name for each in names.values() for name in each], listed[0])
        return
    there = next(listed[0] for listed in names.values())
    lacking = [source for source in conversion.renaming.sources if source not in names]
    if lacking:
        raise Inconsistent(
            f"{few(lacking)} is missing, which together with it becomes one tensor on the hub",
            tensor=there,
            expected=f"all of {' + '.join(conversion.renaming.sources)}",
            hint=NATIVE,
        )
    counts = {len(listed) for listed in names.values()}
    if len(counts) > 1:
        text = ", ".join(f"{len(listed)} of {source}" for source, listed in names.items())
        raise Inconsistent(f"lists of different lengths become one tensor on the hub: {text}", tensor=there, hint=NATIVE)
    for listed in names.values():
        if len(listed) > 1:
            _check_numbers(listed)


def _check_numbers(names: Sequence[str]) -> None:
    """A gathered list is numbered from 0 without gaps."""
    parts = [name.split(".") for name in names]
    if len({len(split) for split in parts}) > 1:
        raise TwoForms(names, names[0])
    columns = [set(column) for column in zip(*parts, strict=True)]
    varying = [index for index, column in enumerate(columns) if len(column) > 1]
    numbers = [split[varying[0]] for split in parts] if len(varying) == 1 else []
    if not numbers or not all(number.isascii() and number.isdecimal() for number in numbers):
        raise TwoForms(names, names[0])
    absent = next((index for index, number in enumerate(sorted(map(int, numbers))) if number != index), None)
    if absent is not None:
        start, stop = parts[0][: varying[0]], parts[0][varying[0] + 1 :]
        raise Inconsistent(
            f"number {absent} of a list that becomes one tensor on the hub is missing; {len(names)} are there",
            tensor=".".join([*start, str(absent), *stop]),
            expected=f"numbers from 0 to {len(names) - 1}",
            hint=NATIVE,
        )


def checked_axis(tensor: Tensor, dim: int, least: int = 1) -> int:
    """A dimension counted from the front. Raises Inconsistent if the tensor lacks it, or fewer than ``least`` dimensions."""
    rank = len(tensor.shape)
    if rank < least or not -rank <= dim < rank:
        wanted = max(least, dim + 1 if dim >= 0 else -dim)
        raise Inconsistent(
            f"shape {list(tensor.shape)} has too few dimensions to be re-cut",
            tensor=tensor.name,
            expected=f"at least {wanted} dimensions",
            hint=MODEL,
        )
    return dim % rank


def checked_parts(tensor: Tensor, length: int, parts: object, what: str) -> int:
    """The number of equal parts of a length. Raises Inconsistent unless it is a sensible number that divides it."""
    if type(parts) is not int or not 1 <= parts <= MAX_PARTS or length % parts:
        raise Inconsistent(
            f"{length} elements cannot be cut into {str(parts)[:20]} {what}",
            tensor=tensor.name,
            expected="a number that divides them" if type(parts) is not int or parts <= MAX_PARTS else f"at most {MAX_PARTS} {what}",
            hint=MODEL,
        )
    return parts
