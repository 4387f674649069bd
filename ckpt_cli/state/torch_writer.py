"""Plain values as a file of ``torch.save`` that ``torch.load(weights_only=True)`` reads. Nothing else in this process imports torch."""

from __future__ import annotations

import importlib.util
import io
import sys
from typing import Any

from ckpt_cli.errors import Unsupported, install
from ckpt_cli.paths import current_folder
from ckpt_cli.tensors.plain_values import TensorValue, TorchName

OVERHEAD, PER_TENSOR, ALIGNMENT = 1300, 350, 64
"""Bytes of an archive of torch besides its tensors, and of the records and the entry of each; its content is aligned."""

WIDER = {"uint16": "int32", "uint32": "int64"}
"""Unsigned dtypes that torch before 2.3 does not know, and what holds the same numbers."""


def torch_bytes(value: Any) -> bytes:
    """The content of a ``.pt`` file. Raises Unsupported if torch cannot be loaded, MemoryError if there is no room for it."""
    if "torch" not in sys.modules and current_folder() is None:  # Intel's library ends the process there
        text = "writing .pt files needs torch, which cannot be loaded where the current folder was removed"
        raise Unsupported(text, hint="go to a folder that is there")
    try:
        import torch
    except (ImportError, OSError) as error:
        if "failed to map segment" in str(error) or "Cannot allocate memory" in str(error):
            raise MemoryError from None
        if importlib.util.find_spec("torch") is not None:
            text = f"writing .pt files needs torch, which cannot be imported: {error}"
            raise Unsupported(text, hint="install torch again; its CPU build is enough") from None
        raise Unsupported("writing .pt files needs torch, which is not installed", hint=install("torch")) from None
    buffer = io.BytesIO()
    torch.save(_with_tensors(value, torch), buffer)
    return buffer.getvalue()


def about_torch_bytes(value: Any) -> bytes:
    """Zeros, about as many as the content of the ``.pt`` file would have: for a plan, which needs no torch."""
    sizes: list[int] = []
    text = repr(_sized(value, sizes))
    return bytes(OVERHEAD + len(text) + sum(-(-size // ALIGNMENT) * ALIGNMENT + PER_TENSOR for size in sizes))


def _sized(value: Any, sizes: list[int]) -> Any:
    """A value without its tensors, whose sizes in bytes are added to a list."""
    if isinstance(value, TensorValue):
        sizes.append(len(value.data))
        return None
    if isinstance(value, dict):
        return {key: _sized(item, sizes) for key, item in value.items()}
    return [_sized(item, sizes) for item in value] if isinstance(value, (list, tuple)) else value


def _with_tensors(value: Any, torch: Any) -> Any:
    if isinstance(value, TensorValue):
        dtype = getattr(torch, value.dtype.torch)
        tensor = torch.frombuffer(bytearray(value.data), dtype=dtype) if value.data else torch.empty(0, dtype=dtype)
        wider = WIDER.get(value.dtype.torch)
        return (tensor.to(getattr(torch, wider)) if wider else tensor).reshape(value.shape)
    if value == b"":
        # torch's own pickles hold this as a call of bytes, which weights_only does not allow.
        return bytearray()
    if isinstance(value, TorchName):
        return getattr(torch, value.name)
    if isinstance(value, dict):
        return {key: _with_tensors(item, torch) for key, item in value.items()}
    return type(value)(_with_tensors(item, torch) for item in value) if isinstance(value, (list, tuple)) else value
