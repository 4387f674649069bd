"""Tensors inside of tensors: what a wrapper of torch or torchao holds as it is, and what only its own class can write."""

from __future__ import annotations

from typing import Any

from ckpt_cli.errors import Unsupported
from ckpt_cli.loading.elements import torch_module

HINT = "load before the model is converted"


def plain_inside(name: str, values: Any, *, inside: str = "") -> Any:
    """The plain tensor whose memory holds the elements of ``values``; ``inside`` says what they are a part of.

    torchao wraps a weight that is cast when it is gathered (float8 training) in a tensor of one inner one, of the same shape, dtype and
    strides. Raises Unsupported for other classes, and for wrappers that keep something besides, which may be computed from the weight.
    """
    torch = torch_module()
    if type(values) in (torch.Tensor, torch.nn.Parameter):
        return values
    if callable(getattr(values, "trigger_wait", None)) and type(values).__module__.startswith("torch."):
        return plain_inside(name, values.trigger_wait(), inside=inside)
    kind = f"a {type(values).__name__}{inside}"
    flatten = getattr(values, "__tensor_flatten__", None)
    if not callable(flatten) or type(values).__module__.partition(".")[0] != "torchao":
        raise Unsupported(f"{kind} cannot be filled, only tensors and DTensors", tensor=name, hint=HINT)
    parts = [*flatten()[0]]
    held = getattr(values, parts[0]) if len(parts) == 1 else None
    if held is None or _form(held) != _form(values):
        text = f"{kind} cannot be filled: it holds {', '.join(parts)}"
        raise Unsupported(text, tensor=name, expected="one tensor of its own shape and dtype", hint=HINT)
    return plain_inside(name, held, inside=inside)


def _form(values: Any) -> tuple[object, ...]:
    return (values.shape, values.dtype, values.stride(), values.device)
