"""Buffers that an average mixes like weights: running statistics, ranges of quantisers, tables, spectral vectors, masks of pruning."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_cli.errors import Unsupported
from ckpt_cli.hub.classes.computed.parametrized import computed
from ckpt_cli.hub.second_component import RECOMPUTED, STATISTICS, VARIANCE
from ckpt_cli.name_patterns import grouped
from ckpt_cli.names import few
from ckpt_cli.output.plan import Combination
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import same_values
from ckpt_cli.tensors.masks import is_mask
from ckpt_cli.tensors.reading import elements
from ckpt_cli.tensors.tensor import Tensor

RANGES = re.compile(r"_?amax(_history)?|(min|max)_val|(running|act|activation|input|output)_(min|max|amax|absmax)")
"""Last parts of names of the ranges that observers and quantisers found (torch.ao, ModelOpt)."""

MASK = re.compile(r"(.*_)?mask")
EQUAL_MASKS = "equal masks in all checkpoints"

TABLES = re.compile(r"((.+_)?inv_freq|(cos|sin)_cached|(.+_)?alphas_cumprod(_.+)?)")
"""Last parts of names of tables that follow from settings: of rotary embeddings, of schedules of noise."""

COMPARED = 1 << 16
"""Elements of a table or a mask that are looked at: it may have a row for each position."""

NEARLY = 1e-3
"""By so much of their size tables may differ that two processors computed from the same settings."""


def refuse_other_masks(combinations: Mapping[str, Combination]) -> None:
    """Raise Unsupported for masks of pruning that differ: the mean of weights and that of masks give other weights than the mean has."""
    for name, of in computed(combinations).items():
        for mask in of.masks:
            if _differ(combinations[mask]):
                raise Unsupported(
                    f"{name} is computed with it whenever it is used, and the checkpoints have other masks",
                    tensor=mask,
                    expected=EQUAL_MASKS,
                    hint=f"average checkpoints of one mask, or make one tensor of each weight with {of.remove} before they are saved",
                )
    for name, combination in combinations.items():
        if MASK.fullmatch(name.rpartition(".")[2]) and _is_binary(combination) and _differ(combination):
            raise Unsupported(
                "it is a mask of zeros and ones, and the checkpoints have other masks",
                tensor=name,
                expected=EQUAL_MASKS,
                hint="average checkpoints of one mask, or leave it out with --exclude",
            )


def is_equal_mask(name: str, tensors: Sequence[Tensor]) -> bool:
    """Whether checkpoints hold the same mask with infinities, of which a sum of weights makes NaN: it is copied, as equal integers are."""
    first, *others = (replace(tensor, alias_of=None) for tensor in tensors)
    return is_mask(name, first) and all(same_values(first, other) for other in others)


def buffer_notes(combinations: Mapping[str, Combination]) -> list[Note]:
    """Warnings about averaged buffers that are not those of the averaged model."""
    return [
        *_statistics_notes(combinations),
        *_ranges_notes(combinations),
        *_tables_notes(combinations),
        *_variance_notes(combinations),
        *_vectors_notes(combinations),
    ]


def _vectors_notes(combinations: Mapping[str, Combination]) -> list[Note]:
    """A warning about singular vectors that differ: their mean has another length, by which spectral norms scale the weight."""
    vectors = {name: of.remove for of in computed(combinations).values() for name in of.vectors}
    mixed = {name: remove for name, remove in vectors.items() if _differ(combinations[name])}
    if not mixed:
        return []
    text = f"{few(list(mixed), 4)}: vectors of spectral norms were averaged like weights, are no unit vectors and scale the weights wrongly"
    removes = " or ".join(dict.fromkeys(mixed.values()))
    hint = f"recompute them with some forward passes in training mode, or make one tensor of each weight with {removes} before saving"
    return [Note("warning", "spectral-vectors", f"{text}; {hint}")]


def _statistics_notes(combinations: Mapping[str, Combination]) -> list[Note]:
    """A warning about running statistics of activations (batch normalisation) that differ: those of the average are others."""
    mixed = [name for name, combination in combinations.items() if name.rpartition(".")[2] in STATISTICS and _differ(combination)]
    if not mixed:
        return []
    text = f"{few(mixed, 4)}: statistics of activations were averaged like weights and are not those of the averaged model"
    return [Note("warning", "batch-statistics", f"{text}; {RECOMPUTED}")]


def _ranges_notes(combinations: Mapping[str, Combination]) -> list[Note]:
    """A warning about ranges of quantisers that differ: those of the averaged model are others."""
    mixed = [name for name, combination in combinations.items() if RANGES.fullmatch(name.rpartition(".")[2]) and _differ(combination)]
    if not mixed:
        return []
    text = f"{few(grouped(mixed), 4)}: ranges that quantisers found were averaged like weights and are not those of the averaged model"
    return [Note("warning", "batch-statistics", f"{text}; calibrate it again")]


def _tables_notes(combinations: Mapping[str, Combination]) -> list[Note]:
    """A warning about tables that differ: the checkpoints have other settings, and a mean of two tables is that of none."""
    mixed = [name for name, combination in combinations.items() if TABLES.fullmatch(name.rpartition(".")[2]) and _apart(combination)]
    if not mixed:
        return []
    text = f"{few(grouped(mixed), 4)}: the checkpoints computed this from other settings, and the mean belongs to none of them"
    return [Note("warning", "tables-differ", f"{text}; average checkpoints of one setting, or leave it out with --exclude")]


def _is_binary(combination: Combination) -> bool:
    """Whether all of a sample of the values are zeros and ones, both of them: those of a mask that is learned lie between."""
    import numpy

    values = {tuple(numpy.unique(elements(replace(tensor, alias_of=None), 0, min(COMPARED, tensor.numel)).astype(numpy.float32)))
              for tensor in combination.tensors}  # fmt: skip
    return values == {(0.0, 1.0)}


def _apart(combination: Combination) -> bool:
    """Whether the values of a tensor differ by more than rounding."""
    import numpy

    held = (elements(replace(tensor, alias_of=None), 0, min(COMPARED, tensor.numel)) for tensor in combination.tensors)
    first, *others = (values.astype(numpy.float64) for values in held)
    return any(not numpy.allclose(first, other, rtol=NEARLY, atol=0) for other in others)


def _variance_notes(combinations: Mapping[str, Combination]) -> list[Note]:
    """A warning about running variances that an extrapolation (weights below 0) takes below 0."""
    import numpy

    found = []
    for name, combination in combinations.items():
        formula = combination.formula
        if name.rpartition(".")[2] != VARIANCE or all(weight / formula.divisor >= 0 for weight in formula.weights):
            continue
        held = [elements(tensor).astype(numpy.float64) for tensor in combination.tensors]
        with numpy.errstate(all="ignore"):
            total = sum(weight * values for weight, values in zip(formula.weights, held, strict=True)) / formula.divisor
        found += [name] if bool(numpy.any(total < 0)) else []
    if not found:
        return []
    text = f"{few(found, 4)}: with these weights a running variance is below 0, of which batch normalisation makes NaN"
    return [Note("warning", "negative-variance", f"{text}; {RECOMPUTED}")]


def _differ(combination: Combination) -> bool:
    first, *others = (replace(tensor, alias_of=None) for tensor in combination.tensors)
    return any(not same_values(tensor, first) for tensor in others)
