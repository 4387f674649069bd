"""Codes that are stored as floats beside their scales: an average of codes is none, and means something else with another scale."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_cli.hub.classes.computed.codes import SCALES
from ckpt_cli.tensors.reading import elements
from ckpt_cli.tensors.tensor import Tensor

SAMPLE = 4096
"""Elements of each weight that are looked at."""

MOST = 255
"""The largest code of eight bits."""


def coded_floats(tensors: Mapping[str, Tensor]) -> set[str]:
    """Matrices of floats beside scales whose values are integers of eight bits or those of a float of eight bits, and these scales."""
    scales: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if SCALES.fullmatch(leaf) and tensor.dtype.kind == "float":
            scales.setdefault(module, []).append(name)
    found: set[str] = set()
    for name, tensor in tensors.items() if scales else ():
        module, _, leaf = name.rpartition(".")
        if module in scales and leaf.endswith("weight") and len(tensor.shape) > 1 and name not in scales[module] and _holds_codes(tensor):
            found |= {name, *scales[module]}
    return found


def _holds_codes(tensor: Tensor) -> bool:
    """Whether a sample of the values, from the middle, could be codes; a matrix that holds nothing but zeros holds none."""
    import ml_dtypes
    import numpy

    if tensor.dtype.kind != "float" or any(piece.source.forward_only for piece in tensor.pieces):
        return False
    count = min(SAMPLE, tensor.numel)
    values = elements(tensor, (tensor.numel - count) // 2, count).astype(numpy.float32)
    if not numpy.isfinite(values).all() or len(numpy.unique(values)) < 2:
        return False
    whole = bool((values == numpy.round(values)).all() and numpy.abs(values).max() <= MOST)
    eight = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    with numpy.errstate(all="ignore"):
        return whole or any(bool((values.astype(dtype).astype(numpy.float32) == values).all()) for dtype in eight)
