"""An output against a base model: names, shapes, dtypes, and on request values. Values stream through two small buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckpt_cli.dtypes import numpy_dtype
from ckpt_cli.kernels import PieceIndex, cast, read_range, view_as
from ckpt_cli.model import Tensor
from ckpt_cli.plan import OutputTensor
from ckpt_cli.report import BaseComparison, TensorDrift

if TYPE_CHECKING:
    from ckpt_cli.kernels import Array

BLOCK = 1 << 20


def compare_with_base(outputs: Sequence[OutputTensor], base: Mapping[str, Tensor], folder: str, *, values: bool) -> BaseComparison:
    """Differences between planned tensors and the tensors of a base.

    ``values``: also the largest and the mean absolute difference of tensors that both have in one shape, in float64, after
    the cast of the output (drifts are sorted, the largest mean first, NaN before all). An element has changed if its bits
    differ, or between two dtypes its value; NaN is equal to NaN there.
    """
    mine = {output.name: output for output in outputs}
    common = [name for name in mine if name in base]
    alike = {name: None for name in common if mine[name].tensor.shape == base[name].shape}
    drifts = sorted((_drift(mine[name], base[name]) for name in alike), key=_by_drift) if values else []
    return BaseComparison(
        base=folder,
        common=len(common),
        missing=tuple(name for name in base if name not in mine),
        extra=tuple(name for name in mine if name not in base),
        reshaped=tuple(name for name in common if name not in alike),
        other_dtype=tuple(name for name in alike if mine[name].dtype != base[name].dtype),
        unchanged=sum(drift.changed == 0 for drift in drifts) if values else None,
        drifts=tuple(drift for drift in drifts if drift.changed),
    )


def _drift(output: OutputTensor, base: Tensor) -> TensorDrift:
    import numpy

    tensor = output.tensor
    itemsize = max(tensor.dtype.itemsize, base.dtype.itemsize)
    mine, theirs = PieceIndex(tensor.pieces), PieceIndex(base.pieces)
    changed, largest, total = 0, 0.0, 0.0
    for start in range(0, tensor.numel, BLOCK // itemsize):
        count = min(BLOCK // itemsize, tensor.numel - start)
        ours = _values(tensor, start, count, mine)
        if output.is_cast:
            rounded = numpy.empty(count, numpy_dtype(output.dtype))
            cast(ours, tensor.dtype, output.dtype, rounded)
            ours = rounded
        reference = _values(base, start, count, theirs)
        differs = _differs(ours, reference)
        if differs.any():
            wide = numpy.complex128 if "c" in ours.dtype.kind + reference.dtype.kind else numpy.float64
            with numpy.errstate(invalid="ignore", over="ignore"):
                delta = numpy.abs(ours[differs].astype(wide) - reference[differs].astype(wide))
                changed += len(delta)
                largest = float(numpy.maximum(largest, delta.max()))
                total += float(delta.sum())
    return TensorDrift(name=output.name, elements=tensor.numel, changed=changed, max_abs=largest, mean_abs=total / max(tensor.numel, 1))


def _by_drift(drift: TensorDrift) -> tuple[bool, float]:
    return not math.isnan(drift.mean_abs), -drift.mean_abs


def _differs(ours: Array, reference: Array) -> Array:
    """Which elements have changed. Bits tell within one dtype, so that neither NaN nor a large integer is mistaken."""
    import numpy

    if ours.dtype == reference.dtype:
        rows = [values.view(numpy.uint8).reshape(len(values), values.dtype.itemsize) for values in (ours, reference)]
        changed: Array = (rows[0] != rows[1]).any(axis=1)
        return changed
    with numpy.errstate(invalid="ignore"):
        differs: Array = (ours != reference) & ~((ours != ours) & (reference != reference))
    return differs


def _values(tensor: Tensor, start: int, count: int, index: PieceIndex) -> Array:
    buffer = bytearray(count * tensor.dtype.itemsize)
    read_range(tensor, start, count, buffer, index)
    return view_as(buffer, tensor.dtype, count)
