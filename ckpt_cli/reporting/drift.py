"""The drift of a run: how far each group of tensors moved from one step to the next, as one map with a column for each step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ckpt_cli.results.drift import DriftGroup, Heatmap, HeatmapBlock, HeatmapRow


def total(groups: Sequence[DriftGroup]) -> float | None:
    """The relative L2 of all tensors as one vector; None if nothing has numbers, or all were zero."""
    moved, base = ([group_value for group in groups if (group_value := getattr(group, name)) is not None] for name in ("l2", "base_norm"))
    norm = math.hypot(*base)
    return math.hypot(*moved) / norm if moved and norm else None


def run_map(steps: Mapping[int, Sequence[DriftGroup]]) -> Heatmap | None:
    """A row for each group of tensors with distances, a column for each step that has one before it; None if there is none."""
    steps = {step: [group for group in groups if group.kind == "floating"] for step, groups in steps.items()}
    if not steps:
        return None
    patterns = dict.fromkeys(group.pattern for groups in steps.values() for group in groups)
    found = {step: {group.pattern: group.relative_l2 for group in groups} for step, groups in steps.items()}
    rows = tuple(HeatmapRow(module=pattern, values=tuple(values.get(pattern) for values in found.values())) for pattern in patterns)
    return Heatmap(blocks=(HeatmapBlock(stack="the run", layers=tuple(found), rows=rows, axis="step"),))
