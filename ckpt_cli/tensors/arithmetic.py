"""Whether this thread computes as IEEE 754 says: results are rounded to nearest, and the smallest numbers are not taken for zero.

A program that calls ckpt may have changed that for its own speed (``torch.set_flush_denormal``, a library built with ``-ffast-math``).
"""

from __future__ import annotations

from ckpt_cli.errors import Unsupported

SUBNORMAL, NORMAL = 5e-324, 2.2250738585072014e-308
"""The smallest number, and the smallest that is not subnormal."""

ONE, HALF_STEP = 1.0, 2.0**-53
"""Half of the distance from one to the next number."""


def check_arithmetic() -> None:
    """Raise Unsupported where values would be lost or rounded otherwise without a word. Cheap enough for every block."""
    expected = "IEEE 754 arithmetic: subnormal numbers, and rounding to nearest"
    if not SUBNORMAL * 2 > 0 or not NORMAL / 2 > 0:
        raise Unsupported(
            "this process takes subnormal numbers for zero, so the smallest values would be lost",
            expected=expected,
            hint="call torch.set_flush_denormal(False) before, or run ckpt in a process of its own",
        )
    if ONE + HALF_STEP != 1 or ONE + 3 * HALF_STEP != 1 + 4 * HALF_STEP or -ONE - HALF_STEP != -1:
        raise Unsupported(
            "this process does not round to nearest, so results would be others", expected=expected, hint="run ckpt in a process of its own"
        )
