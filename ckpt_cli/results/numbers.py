"""Numbers as JSON has them: infinities and NaN are text."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import PlainSerializer


def _json_number(value: float | None) -> float | str | None:
    """JSON has no word for infinities and NaN: they are text there."""
    return value if value is None or math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


Number = Annotated[float | None, PlainSerializer(_json_number, when_used="json")]
"""A measured number, or None."""
