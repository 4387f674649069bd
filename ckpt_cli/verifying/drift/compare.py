"""Tensors against a base: names, shapes, dtypes, and on request values. Values stream through small buffers, a thread per tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt_cli.dtypes import Dtype
from ckpt_cli.errors import UsageError, reading
from ckpt_cli.hub.bagel import bagel_facts
from ckpt_cli.hub.classes.dtypes import packed_weights, without_packed_floats
from ckpt_cli.output.plan import OutputTensor
from ckpt_cli.progress import Progress
from ckpt_cli.results.drift import BaseComparison, Coverage, FormatFact, FormChange, Kind, TensorDrift
from ckpt_cli.tensors.parallel import Advance, with_progress
from ckpt_cli.tensors.reading import element_bytes, elements
from ckpt_cli.tensors.records import Records
from ckpt_cli.tensors.tensor import Tensor
from ckpt_cli.verifying.drift.distances import Accumulator, Distances, changed_elements
from ckpt_cli.verifying.drift.groups import by_drift, frozen_parts, group_drifts, heatmap_of

BLOCK = 128 << 10
"""Elements that are compared at a time: their float64 copies stay in the cache."""

PACKED = ("F4", "QINT8", "QUINT8", "QINT32")
"""Elements that are not numbers on their own: their bytes are equal or not."""

LABEL = "comparing values"


@dataclass(frozen=True, slots=True)
class Compared:
    """A tensor, the ``dtype`` that its values are cast to before they are compared, and the base's tensor."""

    name: str
    mine: Tensor
    dtype: Dtype
    base: Tensor

    @property
    def alike(self) -> bool:
        return self.mine.shape == self.base.shape

    @property
    def kind(self) -> Kind:
        dtypes = (self.mine.dtype, self.base.dtype)
        if any(dtype.code in PACKED for dtype in dtypes):
            return "packed"
        return "integer" if any(dtype.kind in ("int", "bool") for dtype in dtypes) else "floating"

    @property
    def nbytes(self) -> int:
        return self.mine.nbytes + self.base.nbytes


def compare_tensors(
    mine: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    folder: str,
    *,
    values: bool = True,
    jobs: int | None = None,
    progress: Progress | None = None,
    sample: float | None = None,
) -> BaseComparison:
    """Differences between two sets of described tensors; ``folder`` is what the base is called in the result.

    ``values``: how far every tensor that both have in one shape is from the base (`distances` says what is counted), the
    biggest drift first. ``jobs``: threads, each with one tensor at a time. ``sample``: compare about this share of the
    elements only (0 < sample <= 1), in blocks that lie evenly in every tensor, at least one block of each.

    Raises UsageError for a share out of range, InputError if a source fails.
    """
    wanted = {name: (tensor, tensor.dtype) for name, tensor in mine.items()}
    return _compare(wanted, base, folder, values=values, jobs=jobs, progress=progress, sample=sample)


def compare_with_base(
    outputs: Sequence[OutputTensor],
    base: Mapping[str, Tensor],
    folder: str,
    *,
    values: bool,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> BaseComparison:
    """The same for planned tensors, after the cast of the output."""
    wanted = {output.name: (output.tensor, output.dtype) for output in outputs}
    return _compare(wanted, base, folder, values=values, jobs=jobs, progress=progress, sample=None)


def _compare(
    mine: Mapping[str, tuple[Tensor, Dtype]],
    base: Mapping[str, Tensor],
    folder: str,
    *,
    values: bool,
    jobs: int | None,
    progress: Progress | None,
    sample: float | None,
) -> BaseComparison:
    if sample is not None and not 0 < sample <= 1:
        raise UsageError(f"{sample:g} is not a share of the elements", expected="above 0, at most 1")
    plain = {name: tensor for name, (tensor, _) in mine.items()}
    codes, own, base = packed_weights(plain), without_packed_floats(plain), without_packed_floats(base)
    common = [
        Compared(name, own[name], own[name].dtype if name in codes else dtype, base[name])
        for name, (_, dtype) in mine.items()
        if name in base
    ]
    alike = [pair for pair in common if pair.alike]
    missing = tuple(name for name in base if name not in mine)
    extra = tuple(name for name in mine if name not in base)
    reshaped = tuple(pair.name for pair in common if not pair.alike)
    comparison = BaseComparison(
        base=folder,
        common=len(common),
        missing=missing,
        extra=extra,
        reshaped=reshaped,
        other_dtype=tuple(pair.name for pair in alike if pair.dtype != pair.base.dtype),
        changes=tuple(_change(pair) for pair in common if not pair.alike or pair.dtype != pair.base.dtype),
        formats=_format_facts(mine, base),
    )
    if not values:
        return comparison
    drifts = _drifts(alike, sample or 1.0, jobs, progress)
    return comparison.model_copy(
        update={
            "sample": sample,
            "coverage": Coverage(
                elements=sum(drift.elements for drift in drifts),
                mine=sum(tensor.numel for tensor, _ in mine.values()),
                base=sum(tensor.numel for tensor in base.values()),
            ),
            "unchanged": sum(drift.changed == 0 for drift in drifts),
            "drifts": tuple(sorted((drift for drift in drifts if drift.changed), key=by_drift)),
            "groups": group_drifts(drifts),
            "frozen": frozen_parts(drifts, (*missing, *extra, *reshaped)),
            "heatmap": heatmap_of(drifts),
        }
    )


def _format_facts(mine: Mapping[str, tuple[Tensor, Dtype]], base: Mapping[str, Tensor]) -> tuple[FormatFact, ...]:
    """Facts that distinguish two forms of one model."""
    facts = bagel_facts({name: tensor.shape for name, (tensor, _) in mine.items()}, {name: tensor.shape for name, tensor in base.items()})
    return tuple(FormatFact(what=what, mine=own, base=other) for what, own, other in facts)


def _change(pair: Compared) -> FormChange:
    return FormChange(
        name=pair.name, shape=pair.mine.shape, base_shape=pair.base.shape, dtype=pair.dtype.code, base_dtype=pair.base.dtype.code
    )


def _drifts(pairs: Sequence[Compared], share: float, jobs: int | None, progress: Progress | None) -> list[TensorDrift]:
    return with_progress(
        lambda pair, advance: _drift(pair, share, advance),
        pairs,
        (tensor for pair in pairs for tensor in (pair.mine, pair.base)),
        jobs=jobs,
        progress=progress,
        total=sum(pair.nbytes for pair in pairs),
        label=LABEL,
    )


def _drift(pair: Compared, share: float, advance: Advance) -> TensorDrift:
    apart, numel, records, kind = Accumulator(), pair.base.numel, Records(), pair.kind
    compared = changed = 0
    with reading(tensor=pair.name):
        for start, count in _blocks(numel, share):
            if kind == "packed":
                raw = [element_bytes(tensor, start, count, records) for tensor in (pair.mine, pair.base)]
                changed += count if pair.mine.dtype != pair.base.dtype else _changed_bytes(raw, count)
            else:
                ours = elements(pair.mine, start, count, pair.dtype, records)
                theirs = elements(pair.base, start, count, records=records)
                if kind == "integer":
                    changed += int(changed_elements(ours, theirs).sum())
                else:
                    apart.add(ours, theirs)
            compared += count
            advance(count * pair.nbytes // numel, LABEL)
        if share == 1.0:
            records.check_rest()
    if kind != "floating":
        return TensorDrift(name=pair.name, kind=kind, elements=numel, compared=compared, changed=changed)
    return _tensor_drift(pair.name, numel, apart.result())


def _tensor_drift(name: str, numel: int, apart: Distances) -> TensorDrift:
    # The norms of a sample stand for those of the whole tensor.
    scale = (numel / apart.elements) ** 0.5 if apart.elements else 1.0
    return TensorDrift(
        name=name,
        elements=numel,
        compared=apart.elements,
        changed=apart.changed,
        max_abs=apart.max_abs,
        mean_abs=apart.mean_abs,
        l2=apart.l2 * scale,
        base_norm=apart.base_norm * scale,
        relative_l2=apart.relative_l2,
        cosine=None if apart.cosine_distance is None else 1.0 - apart.cosine_distance,
        cosine_distance=apart.cosine_distance,
    )


def _blocks(numel: int, share: float) -> Iterator[tuple[int, int]]:
    """Start and length of the blocks to compare: all of them, or about a ``share`` that lies evenly."""
    blocks = -(-numel // BLOCK)
    wanted = min(blocks, max(1, round(blocks * share)))
    for i in range(wanted):
        start = i * blocks // wanted * BLOCK
        yield start, min(BLOCK, numel - start)


def _changed_bytes(raw: Sequence[bytearray], count: int) -> int:
    import numpy

    ours, base = (numpy.frombuffer(data, numpy.uint8).reshape(count, -1) for data in raw)
    return int(numpy.count_nonzero((ours != base).any(axis=1)))
