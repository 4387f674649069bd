"""The options that only `ckpt detect`, `ckpt diff` and `ckpt show` have, or that mean something else there."""

from __future__ import annotations

from typing import Annotated, Optional, get_args

import typer

from ckpt_cli.cli.options import COMMON, READ, option
from ckpt_cli.names import Naming

# ruff: noqa: UP045 - Typer evaluates these types on Python 3.10

TensorName = Annotated[str, typer.Argument(metavar="TENSOR", help="Its name, as inspect or a merged folder has it.", show_default=False)]
Slice = Annotated[
    Optional[str], option("--slice", metavar="SLICE", help="Which elements, such as 0:4,:8; default: a corner.", panel=COMMON)
]
Before = Annotated[str, typer.Argument(metavar="A", help="A run, a step, a component folder or a file.", show_default=False)]
After = Annotated[
    Optional[str], typer.Argument(metavar="B", help="The same; without it, two steps or components of A.", show_default=False)
]
TwoSteps = Annotated[
    Optional[str], option("--steps", "--step", metavar="N,N", help="Steps of the two; one number is the step of both.", panel=COMMON)
]
TwoTypes = Annotated[
    Optional[str],
    option("--type", "--component", metavar="NAME,NAME", help="Components of the two; one name is that of both.", panel=COMMON),
]
Report = Annotated[
    bool,
    option("--report", help="A row for each step: sizes, what can be merged, what could be freed; FILE.html: a page.", panel=COMMON),
]
ReportPage = Annotated[Optional[str], option("--html", metavar="FILE", help="Write the report as a page.", panel=COMMON)]
Drift = Annotated[bool, option("--drift", help="In the report, how far weights moved from step to step: reads them all.", panel=COMMON)]
DriftSample = Annotated[
    Optional[str], option("--sample", metavar="SHARE", help="For --drift, compare only this share of the values, such as 5%.", panel=COMMON)
]
Html = Annotated[Optional[str], option("--html", metavar="FILE", help="Write a page with maps and a table that sorts.", panel=COMMON)]
Map = Annotated[Optional[str], option("--plot", metavar="FILE", help="Draw the map: .png, .svg or .html.", panel=COMMON)]
ExitCode = Annotated[bool, option("--exit-code", help="End with code 1 if anything differs.", panel=COMMON)]
Names = Annotated[
    Optional[str],
    option(
        "--names",
        metavar="hub|native",
        help="Names of the hub, or as the training has them; default: what both have.",
        panel=READ,
        words=get_args(Naming),
    ),
]
Include = Annotated[Optional[list[str]], option("--include", metavar="GLOB", help="Compare only these tensors.", panel=READ)]
Exclude = Annotated[Optional[list[str]], option("--exclude", metavar="GLOB", help="Leave out these tensors.", panel=READ)]
Sample = Annotated[
    Optional[str], option("--sample", metavar="SHARE", help="Compare only this share of the values, such as 5%.", panel=READ)
]
