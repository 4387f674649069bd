"""Adapters that change nothing: one of their factors is zero, as PEFT initialises it, so that their product is too."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_cli.hub.peft_names import Adapter
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.reading import element_bytes
from ckpt_cli.tensors.tensor import Tensor

SAMPLE = 4096
"""Elements of a factor that are read, in the middle; a trained one has some that are not zero in any stretch."""


def untrained_notes(adapters: Sequence[Adapter]) -> list[Note]:
    """A warning if no adapter changes anything. They are looked at one by one, up to the first that does."""
    if not adapters or not all(map(_is_zero, adapters)):
        return []
    count = f"none of the {len(adapters)} adapters changes" if len(adapters) > 1 else "the adapter does not change"
    cause = "one of the two factors is zero, as before a training, or where a trainer saved factors that it had not gathered"
    text = f"{count} anything: {cause}"
    return [Note("warning", "untrained-adapter", text)]


def _is_zero(adapter: Adapter) -> bool:
    return adapter.magnitude is None and adapter.bias is None and any(_is_zero_in_sample(factor) for factor in (adapter.b, adapter.a))


def _is_zero_in_sample(tensor: Tensor) -> bool:
    if any(piece.source.forward_only for piece in tensor.pieces):
        return False
    count = min(SAMPLE, tensor.numel)
    return not bytes(element_bytes(tensor, (tensor.numel - count) // 2, count)).strip(b"\0")
