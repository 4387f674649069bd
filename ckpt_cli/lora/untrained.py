"""Adapters that change nothing, or some of the rows alone: a factor is zero as PEFT initialises it, in full or for the most part."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_cli.hub.peft_names import Adapter
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.reading import element_bytes
from ckpt_cli.tensors.tensor import Tensor

SAMPLE = 4096
"""Elements of a factor that are read, in the middle; a trained one has some that are not zero in any stretch."""


def untrained_notes(adapters: Sequence[Adapter]) -> list[Note]:
    """A warning if no adapter changes anything, or none the last (or the first) rows of its weight.

    They are looked at one by one, up to the first that does.
    """
    if not adapters:
        return []
    if not all(map(_is_zero, adapters)):
        return _partial_notes(adapters)
    count = f"none of the {len(adapters)} adapters changes" if len(adapters) > 1 else "the adapter does not change"
    cause = "one of the two factors is zero, as before a training, or where a trainer saved factors that it had not gathered"
    text = f"{count} anything: {cause}"
    return [Note("warning", "untrained-adapter", text)]


def _partial_notes(adapters: Sequence[Adapter]) -> list[Note]:
    """A warning where ``lora_B`` has the rows of one rank alone, and zeros for those of the others.

    Trainers did so that saved a sharded adapter ungathered (axolotl #3772, accelerate #4206): shapes are whole, and nothing else shows it.
    One adapter with other rows is enough not to warn: rows that no gradient reached are zero too, such as those of experts never chosen.
    """
    for place in ("last", "first"):
        found = [adapter for adapter in adapters if _has_zero_rows(adapter.b, place)]
        if found and all(_has_zero_rows(adapter.b, place) or _is_zero(adapter) for adapter in adapters):
            whose = f"lora_B of all {len(adapters)} adapters" if len(adapters) > 1 else "lora_B of the adapter"
            text = f"{whose} is zero in the {place} quarter of its rows or more, which stay those of the base: a trainer may have saved"
            text += " the rows of one rank alone"
            return [Note("warning", "partial-adapter-rows", text)]
    return []


def _has_zero_rows(tensor: Tensor, place: str) -> bool:
    """Whether the last or first quarter of the rows is zero, by the elements at both ends of it, while others are not."""
    rows = tensor.shape[0] // 4
    if not rows or any(piece.source.forward_only for piece in tensor.pieces):
        return False
    length = rows * (tensor.numel // tensor.shape[0])
    begin = tensor.numel - length if place == "last" else 0
    count = min(SAMPLE, length)
    if any(_any_set(tensor, start, count) for start in (begin, begin + length - count)):
        return False
    other = 0 if place == "last" else tensor.numel - count
    middle = (tensor.numel - count) // 2
    return any(_any_set(tensor, start, count) for start in (other, middle))


def _any_set(tensor: Tensor, start: int, count: int) -> bool:
    return bool(bytes(element_bytes(tensor, start, count)).strip(b"\0"))


def _is_zero(adapter: Adapter) -> bool:
    return adapter.magnitude is None and adapter.bias is None and any(_is_zero_in_sample(factor) for factor in (adapter.b, adapter.a))


def _is_zero_in_sample(tensor: Tensor) -> bool:
    if any(piece.source.forward_only for piece in tensor.pieces):
        return False
    count = min(SAMPLE, tensor.numel)
    return not _any_set(tensor, (tensor.numel - count) // 2, count)
