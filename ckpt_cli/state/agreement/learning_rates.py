"""Whether an optimizer and a scheduler are of one step, by their learning rates: a scheduler writes its own into the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note

ROUNDED = 1e-5
"""The part in which rates may differ that were kept as float32 on one side."""


def rate_notes(rates: object, groups: Sequence[Mapping[str, Any]]) -> list[Note]:
    """A warning if the scheduler's last ``rates`` are not those of as many parameter ``groups``."""
    held = [group.get("lr") for group in groups]
    if not isinstance(rates, (list, tuple)) or len(rates) != len(held):
        return []
    pairs = [(own, other) for own, other in zip(held, rates, strict=True) if isinstance(own, float) and isinstance(other, float)]
    differing = [(own, other) for own, other in pairs if not math.isclose(own, other, rel_tol=ROUNDED, abs_tol=1e-15)]
    if not differing:
        return []
    said = few([f"{own:.6g} and {other:.6g}" for own, other in differing], 3)
    text = f"optimizer and scheduler have other learning rates ({said}): they may be of different steps"
    return [Note("warning", "rates-differ", text)]
