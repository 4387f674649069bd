"""The drift of a run: how far each group of tensors moved from one step to the next, as one map with a column for each step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckpt_cli.results.drift import DriftGroup, Heatmap, HeatmapBlock, HeatmapRow


def total(groups: Sequence[DriftGroup]) -> float | None:
    """The relative L2 of all tensors as one vector; None if nothing has numbers, or all were zero."""
    moved, base = ([group_value for group in groups if (group_value := getattr(group, name)) is not None] for name in ("l2", "base_norm"))
    norm = math.hypot(*base)
    return math.hypot(*moved) / norm if moved and norm else None


def run_map(steps: Sequence[tuple[int, str | None, Sequence[DriftGroup]]]) -> Heatmap | None:
    """A row for each group of tensors with distances, a column for each of these steps, by its number and label; None if there is none."""
    if not steps:
        return None
    found = [{group.pattern: group.relative_l2 for group in groups if group.kind == "floating"} for _, _, groups in steps]
    patterns = dict.fromkeys(pattern for values in found for pattern in values)
    rows = tuple(HeatmapRow(module=pattern, values=tuple(values.get(pattern) for values in found)) for pattern in patterns)
    labels = tuple(label for _, label, _ in steps if label is not None)
    return Heatmap(
        blocks=(HeatmapBlock(stack="the run", layers=tuple(step for step, _, _ in steps), rows=rows, axis="step", labels=labels),)
    )
