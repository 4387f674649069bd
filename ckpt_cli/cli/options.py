"""Options that mean the same everywhere, declared once."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from ckpt_cli.cli.session import ColorMode, ProgressMode
from ckpt_cli.formats.base import ShardOrder
from ckpt_cli.names import Naming

OUTPUT_PANEL = "Printed output"
BASE_PANEL = "Base model"

Path = Annotated[str, typer.Argument(metavar="PATH", help="A run, a step, a component folder or a file.", show_default=False)]
Type = Annotated[
    Optional[str],  # noqa: UP045 - Typer evaluates this on Python 3.10
    typer.Option("--type", metavar="NAME", help="Component: model, ema, both, all, or a name listed by detect.", show_default=False),
]
Step = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--step", metavar="N", help="A step of a run; default: the newest complete one.", show_default=False),
]
Also = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--also", metavar="DIR", help="Files of the same checkpoint from another node.", show_default=False),
]
Base = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--base", metavar="DIR", help="The model training started from; supplies what the run lacks.", show_default=False),
]
Order = Annotated[
    ShardOrder,
    typer.Option("--shard-order", help="Order in which two mesh dimensions shard a tensor (torch <= 2.4)."),
]
Output = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--output", "-o", metavar="DIR", help="Default: <checkpoint>_merged, beside the checkpoint.", show_default=False),
]
Dtype = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--dtype", metavar="DTYPE", help="keep (default), fp32, bf16, fp16, or base; only floats are cast.", show_default=False),
]
Names = Annotated[Naming, typer.Option("--names", help="Tensor names and layouts: as save_pretrained writes them, or as trained.")]
KeyMap = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--key-map", metavar="FILE", help="Rules that rename tensors, JSON or TOML.", show_default=False),
]
MaxShardSize = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--max-shard-size", metavar="SIZE", help="Largest output file; default 5GB.", show_default=False),
]
WeightsName = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--weights-name", metavar="FILE", help="Name of the weights file; default model.safetensors.", show_default=False),
]
Include = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--include", metavar="GLOB", help="Write only these tensors.", show_default=False),
]
Exclude = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--exclude", metavar="GLOB", help="Leave out these tensors.", show_default=False),
]
CarryFromBase = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--carry-from-base",
        metavar="GLOB",
        help="Take these tensors, which the run lacks, from the base.",
        show_default=False,
        rich_help_panel=BASE_PANEL,
    ),
]
AllowMissing = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--allow-missing", metavar="GLOB", help="Allow these tensors of the model class to be missing.", show_default=False),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an output that ckpt wrote.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Plan and print, write nothing.")]
Jobs = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--jobs", "-j", metavar="N", help="Worker threads.", show_default=False),
]
Checksum = Annotated[bool, typer.Option("--checksum", help="Store checksums of all tensors for verify; needs a second read.")]
AllowOverflow = Annotated[bool, typer.Option("--allow-overflow", help="Let values too large for fp16 become infinite.")]
AllowUnequalReplicas = Annotated[
    bool, typer.Option("--allow-unequal-replicas", help="Where replicas differ, use the lowest rank's values.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, even on failure.", rich_help_panel=OUTPUT_PANEL)]
Quiet = Annotated[
    int,
    typer.Option(
        "--quiet",
        "-q",
        count=True,
        metavar="",
        show_default=False,
        help="Only the result and warnings (stderr); -qq: no warnings.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Treat warnings as errors: exit code 1, nothing written.", rich_help_panel=OUTPUT_PANEL)
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show notes and details too.", rich_help_panel=OUTPUT_PANEL)]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.", envvar="CKPT_DEBUG", rich_help_panel=OUTPUT_PANEL)]
Color = Annotated[ColorMode, typer.Option("--color", help="When to use colours.", envvar="CKPT_COLOR", rich_help_panel=OUTPUT_PANEL)]
Progress = Annotated[
    ProgressMode, typer.Option("--progress", help="How progress is shown on stderr.", envvar="CKPT_PROGRESS", rich_help_panel=OUTPUT_PANEL)
]
