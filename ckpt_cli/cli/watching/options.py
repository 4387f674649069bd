"""The options that only `ckpt watch` has, or that mean something else there."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from ckpt_cli.cli.options import COMMON, OUTPUTS, STEPS, WRITE, option
from ckpt_cli.cli.words import complete, values

# ruff: noqa: UP045 - Typer evaluates these types on Python 3.10

Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders into which training saves its steps.", show_default=False)]
Output = Annotated[
    Optional[str], option(*OUTPUTS, metavar="DIR", help="Default: <run>_merged, beside the run; step N is DIR/step-N.", panel=COMMON)
]
Average = Annotated[
    Optional[str],
    option("--average", metavar="last=N", help="Average the newest N steps up to each, as ckpt average does.", panel=COMMON),
]
Execute = Annotated[
    Optional[str],
    option("--exec", metavar="COMMAND", help="Run this for every output; {output}, {step} and {run} are replaced.", panel=COMMON),
]
Every = Annotated[Optional[str], option("--every", metavar="N", help="Only steps that N divides.", panel=STEPS, read=values.whole)]
Since = Annotated[
    Optional[str],
    option("--since", metavar="STEP", help="Only from this step on.", panel=STEPS, completes=complete.steps, read=values.step),
]
Keep = Annotated[
    Optional[str], option("--keep", metavar="N", help="Remove all outputs of this watch but the newest N.", panel=WRITE, read=values.whole)
]
Once = Annotated[bool, option("--once", help="Make the steps that are there and end: for cron and Slurm.", panel=COMMON)]
Interval = Annotated[
    Optional[str],
    option("--interval", metavar="SECONDS", help="How often to look for steps, or 5m, 1h; default 30.", panel=STEPS, read=values.seconds),
]
Settle = Annotated[
    Optional[str],
    option(
        "--settle",
        metavar="SECONDS",
        help="Seconds, or 5m, for which files must not change if no tracker names the step; default 60.",
        panel=STEPS,
        read=values.seconds,
    ),
]
