"""Golden screens of commands that are tested in files of their own: what is printed at some widths, and in a pipe."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.test_screens import GOLDEN, WIDTHS, screen

__all__ = ["WIDTHS", "check_golden", "screen"]


def check_golden(name: str, width: int | None, text: str) -> None:
    """Compare with the golden file, which ``GOLDEN_UPDATE=1`` writes; no line is wider than the screen."""
    text = re.sub(r" in [\d.]+ s", " in # s", text)
    if width is not None:
        assert all(len(line) <= width for line in text.splitlines() if not line.startswith(("warning:", "note:", "next:")))
    path = Path(GOLDEN) / f"{name}-{width or 'pipe'}.txt"
    if os.environ.get("GOLDEN_UPDATE"):
        path.write_text(text)
    assert text == path.read_text()
