"""Comparing what was merged with what it should be, with the safetensors library and torch as judges."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]


def load(path: Path) -> Tensors:
    """All tensors of a safetensors file, or of every such file in a folder."""
    if path.is_dir():
        return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    return load_file(path)


def differences(found: Tensors, expected: Tensors, *, nan_payload: bool = True) -> list[str]:
    """One line per tensor that is missing, unexpected, or differs in shape, dtype or bytes; NaNs may be alike in being NaN only."""
    lines = [f"{name} is missing" for name in expected if name not in found]
    lines += [f"{name} is unexpected" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        have, want = found[name], expected[name]
        if (have.dtype, have.shape) != (want.dtype, want.shape):
            lines.append(f"{name} is {have.dtype} {list(have.shape)}, not {want.dtype} {list(want.shape)}")
            continue
        if not nan_payload and want.is_floating_point():
            have, want = have.masked_fill(have.isnan(), 0), want.masked_fill(want.isnan() & found[name].isnan(), 0)
        if not torch.equal(_bytes(have), _bytes(want)):
            lines.append(f"{name} has other bytes")
    return sorted(lines)


def cast_floats(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
