"""Whether the tensors of a model can be written at all: elements that share memory, and memory that may only be read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckpt_cli.errors import Unsupported
from ckpt_cli.loading.elements import torch_module

OWN = "give it memory of its own first: parameter.data = parameter.data.clone()"


def region(local: Any) -> tuple[object, ...]:
    """Equal for two tensors of one process that are the same elements of memory in the same order; of no elements: only for itself."""
    if not local.numel():
        return (id(local),)
    return (str(local.device), local.data_ptr(), local.dtype, tuple(local.shape), tuple(local.stride()), local.is_conj(), local.is_neg())


def refuse_shared(locals_of: Mapping[str, Any]) -> None:
    """Raise Unsupported for tensors that share some of their elements, and for those that have one element in several places.

    The same elements under two names are no fault: they are tied. Tensors whose elements only alternate in memory (columns
    of one matrix) share nothing.
    """
    storages: dict[tuple[object, ...], dict[tuple[object, ...], tuple[str, Any]]] = {}
    for name, local in locals_of.items():
        if local.numel():
            storage = (str(local.device), local.untyped_storage().data_ptr())
            storages.setdefault(storage, {}).setdefault(region(local), (name, local))
    for held in storages.values():
        if not _apart([local for _, local in held.values()]):
            _refuse_overlaps(list(held.values()))


def _apart(held: Iterable[Any]) -> bool:
    """Whether tensors of one storage certainly share nothing: they lie one after the other, and their strides nest."""
    end = -1
    for local in sorted(held, key=lambda local: local.data_ptr()):
        if local.data_ptr() < end:
            return False
        reach = 1
        for stride, count in sorted((s, n) for s, n in zip(local.stride(), local.shape, strict=True) if n > 1):
            if stride < reach:
                return False
            reach = stride * (count - 1) + reach
        end = local.data_ptr() + reach * local.element_size()
    return True


def _refuse_overlaps(held: list[tuple[str, Any]]) -> None:
    """Mark every element, in units of the smallest: what is marked twice is shared."""
    torch = torch_module()
    unit = min(local.element_size() for _, local in held)
    start = min(local.data_ptr() for _, local in held)
    end = max(local.data_ptr() + _span(local) * local.element_size() for _, local in held)
    marks = torch.zeros((end - start) // unit, dtype=torch.int32)
    for number, (name, local) in enumerate(held, 1):
        wide = local.element_size() // unit
        view = marks.as_strided((*local.shape, wide), (*(s * wide for s in local.stride()), 1), (local.data_ptr() - start) // unit)
        other = int(view.max())
        if other:
            raise Unsupported(f"shares a part of its memory with {held[other - 1][0]}", tensor=name, hint=OWN)
        view.fill_(number)
        if int((marks == number).sum()) != local.numel() * wide:
            raise Unsupported("has elements that are one place in memory, as expand() makes them", tensor=name, hint=OWN)


def _span(local: Any) -> int:
    return 1 + sum((int(n) - 1) * int(stride) for n, stride in zip(local.shape, local.stride(), strict=True))


def refuse_read_only(locals_of: Mapping[str, Any]) -> None:
    """Raise Unsupported for tensors in memory that the system protects, such as a mapped file: writing there would end the process.

    Only Linux lists the protection of memory; elsewhere nothing is noticed.
    """
    try:
        with open("/proc/self/maps") as file:
            listed = [line.split(maxsplit=2)[:2] for line in file]
    except OSError:
        return
    protected = [tuple(int(part, 16) for part in where.split("-")) for where, rights in listed if rights[1] != "w"]
    for name, local in locals_of.items():
        if local.numel() and local.device.type == "cpu" and any(start <= local.data_ptr() < end for start, end in protected):
            raise Unsupported("lies in memory that may only be read, such as a mapped file", tensor=name, hint=OWN)
