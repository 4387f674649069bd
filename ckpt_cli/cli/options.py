"""Every option of every command, declared once: its names, help, panel, and what completes its value.

An option that is a field of a command's ``...Options`` is called like the field, in CamelCase: `cli.words.declare` finds it by
that name. Values arrive as text or flags; `cli.words.values` and `given` read them, so that what is wrong is said in our words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Optional, get_args

import typer

from ckpt_cli.averaging.options import DecayShape as DecayShapeName
from ckpt_cli.averaging.options import Method as MethodName
from ckpt_cli.cli.session import ColorMode, ProgressMode
from ckpt_cli.cli.words import complete, values
from ckpt_cli.names import LoraMode, Naming
from ckpt_cli.names import ShardOrder as ShardOrderName
from ckpt_cli.names import Write as WriteName
from ckpt_cli.output.part import Engine as EngineName

# ruff: noqa: UP045 - Typer evaluates these types on Python 3.10

if TYPE_CHECKING:
    Whole = Optional[int]
    Order = ShardOrderName
else:  # text, which functions of ours read: Typer's words about what is wrong would be pydantic's
    Whole = Optional[str]
    Order = str

# The panels of --help, in their order.
COMMON = "Most common"
STEPS = "Which steps"
METHOD = "Weighting"
READ = "What to read"
WRITE = "What to write"
BASE = "With a base"
LORA = "LoRA and EMA"
CHECKS = "Checks"
HUB = "To the Hub"
PARTS = "On several machines"
SOURCE = "How the source was merged (else read from the manifest)"
OUTPUT = "Output"
PANELS = (COMMON, STEPS, METHOD, READ, WRITE, BASE, LORA, CHECKS, HUB, PARTS, SOURCE, OUTPUT)


def option(
    *names: str,
    help: str,
    panel: str,
    metavar: str | None = None,
    words: Sequence[str] = (),
    completes: Callable[..., list[str]] | None = None,
    read: Callable[..., Any] | None = None,
    **more: Any,
) -> Any:
    """An option: its value is one of ``words``, or ``completes`` lists what it can be; ``read`` makes a value of its text.

    Long names after the first are synonyms: help and completion omit them.
    """
    if words:
        completes, read = complete.words(words), values.one_of(words)
    return typer.Option(
        *names, help=help, rich_help_panel=panel, metavar=metavar, autocompletion=completes, callback=read, show_default=False, **more
    )


# -- what is read ----------------------------------------------------------------------------------------------------

Path = Annotated[str, typer.Argument(metavar="PATH", help="A run, a step, a component folder or a file.", show_default=False)]
Paths = Annotated[
    list[str], typer.Argument(metavar="PATH...", help="Runs, steps, component folders or files, oldest first.", show_default=False)
]
Scanned = Annotated[str, typer.Argument(metavar="PATH", help="Any file or folder.", show_default=False)]
Type = Annotated[
    Optional[str],
    option(
        "--type",
        "--component",
        metavar="NAME",
        help="Component: model, ema, both, all, or a name listed by detect.",
        panel=COMMON,
        completes=complete.components,
    ),
]
StateType = Annotated[
    Optional[str],
    option(
        "--type",
        "--component",
        metavar="NAME",
        help="Component: model, or a name listed by detect.",
        panel=COMMON,
        completes=complete.components,
    ),
]
Step = Annotated[
    Whole,
    option(
        "--step",
        "--tag",
        metavar="N",
        help="A step of a run; default: the newest complete one.",
        panel=COMMON,
        completes=complete.steps,
        read=values.step,
    ),
]
Also = Annotated[Optional[list[str]], option("--also", metavar="DIR", help="Files of the same checkpoint from another node.", panel=READ)]
ShardOrder = Annotated[
    Order,
    option(
        "--shard-order",
        metavar="ORDER",
        help="How two mesh dimensions shard a tensor (torch <= 2.4): auto, tp-first, left-to-right.",
        panel=READ,
        words=get_args(ShardOrderName),
    ),
]
AllowUnequalReplicas = Annotated[
    bool, option("--allow-unequal-replicas", help="Where replicas differ, use the lowest rank's values.", panel=READ)
]
Stats = Annotated[bool, option("--stats", help="Read all values: absmax, mean, std, zeros, NaN; -v: histograms.", panel=COMMON)]
ShowAll = Annotated[bool, option("--all", help="One row per tensor.", panel=COMMON)]

# -- which steps of an average, and their weights --------------------------------------------------------------------

Everything = Annotated[bool, option("--all", help="All complete steps of the run.", panel=STEPS)]
Last = Annotated[Optional[str], option("--last", metavar="N", help="The newest N complete steps.", panel=STEPS, read=values.whole)]
Begin = Annotated[
    Optional[str], option("--from", metavar="STEP", help="From this step on.", panel=STEPS, completes=complete.steps, read=values.step)
]
End = Annotated[
    Optional[str], option("--to", metavar="STEP", help="Up to this step.", panel=STEPS, completes=complete.steps, read=values.step)
]
Every = Annotated[Optional[str], option("--every", metavar="N", help="Every N steps, from the first.", panel=STEPS, read=values.whole)]
Steps = Annotated[Optional[str], option("--steps", metavar="A,B,...", help="Exactly these steps.", panel=STEPS)]
Method = Annotated[
    Optional[str],
    option(
        "--method",
        metavar="NAME",
        help="uniform (default), weighted, linear, ema, wsm or posthoc-ema.",
        panel=METHOD,
        words=get_args(MethodName),
    ),
]
Weights = Annotated[Optional[str], option("--weights", metavar="A,B,...", help="One per checkpoint; may be negative.", panel=METHOD)]
Normalize = Annotated[bool, option(" /--no-normalize", help="Do not divide by the sum of the weights.", panel=METHOD)]
Decay = Annotated[
    Optional[str], option("--decay", metavar="D", help="ema: share of the average kept per checkpoint.", panel=METHOD, read=values.real)
]
HalfLife = Annotated[
    Optional[str], option("--half-life", metavar="STEPS", help="ema: steps after which half is kept.", panel=METHOD, read=values.real)
]
DecayShape = Annotated[
    Optional[str],
    option("--decay-shape", metavar="NAME", help="wsm: linear (default), cosine or 1-sqrt.", panel=METHOD, words=get_args(DecayShapeName)),
]
SigmaRel = Annotated[
    Optional[str], option("--sigma-rel", metavar="S", help="posthoc-ema: target relative width.", panel=METHOD, read=values.real)
]
SourceSigmaRel = Annotated[
    Optional[str],
    option("--source-sigma-rel", metavar="S", help="posthoc-ema: relative width of the saved averages.", panel=METHOD, read=values.real),
]

# -- what is written -------------------------------------------------------------------------------------------------

OUTPUTS = ("--output", "-o", "--out", "--output-dir", "--output-path", "--target-dir", "--save-dir")
"""How the option that says where to write is called: here, and in the tools that people come from."""

Output = Annotated[
    Optional[str], option(*OUTPUTS, metavar="DIR", help="Default: <checkpoint>_merged, beside it (a step's is in its run).", panel=COMMON)
]
RequiredOutput = Annotated[str, option(*OUTPUTS, metavar="DIR", help="The folder to write.", panel=COMMON)]
StateOutput = Annotated[
    Optional[str], option(*OUTPUTS, metavar="DIR", help="Default: <checkpoint>_state, beside it (a step's is in its run).", panel=COMMON)
]
SecondPath = Annotated[Optional[str], typer.Argument(metavar="OUTPUT", hidden=True, show_default=False)]
Dtype = Annotated[
    Optional[str],
    option(
        "--dtype",
        "--torch-dtype",
        metavar="DTYPE",
        help="keep (default), fp32, bf16, fp16, or base; only floats are cast.",
        panel=COMMON,
        completes=complete.words(complete.DTYPES),
    ),
]
CastAll = Annotated[bool, option("--cast-all", help="Cast also what transformers keeps in fp32 in a model of 16 bits.", panel=WRITE)]
DryRun = Annotated[bool, option("--dry-run", help="Plan and print, write nothing.", panel=COMMON)]
Names = Annotated[
    str,
    option(
        "--names",
        metavar="hub|native",
        help="Tensor names and layouts: as save_pretrained writes them (default), or as the training named them.",
        panel=WRITE,
        words=get_args(Naming),
    ),
]
KeyMap = Annotated[
    Optional[list[str]],
    option("--key-map", metavar="A=B|FILE", help="Rename tensors: net=model, net= to take net. off, or a file of rules.", panel=WRITE),
]
Include = Annotated[Optional[list[str]], option("--include", metavar="GLOB", help="Write only these tensors.", panel=WRITE)]
Exclude = Annotated[Optional[list[str]], option("--exclude", metavar="GLOB", help="Leave out these tensors.", panel=WRITE)]
WithState = Annotated[bool, option("--with-state", help="Also write what extract-state writes, beside the weights.", panel=WRITE)]
Optimizer = Annotated[bool, option("--optimizer", help="Also merge the optimizer state, per parameter.", panel=COMMON)]
MaxShardSize = Annotated[
    Optional[str],
    option(
        "--max-shard-size", metavar="SIZE", help="Largest output file; default 5GB. Finished files outlive an interrupted run.", panel=WRITE
    ),
]
WeightsName = Annotated[
    Optional[str],
    option("--weights-name", metavar="NAME", help="Name of the weights file; default model.safetensors.", panel=WRITE),
]
InPlace = Annotated[bool, option("--in-place", help="Write into the checkpoint folder; never replaces a file.", panel=WRITE)]
Overwrite = Annotated[bool, option("--overwrite", "--force", "-f", help="Replace an output that ckpt wrote.", panel=WRITE)]
Jobs = Annotated[Whole, option("--jobs", "-j", metavar="N", help="Worker threads.", panel=WRITE, read=values.threads)]
Write = Annotated[
    str,
    option(
        "--write",
        metavar="HOW",
        help="positioned, sequential (front to back, for append-only mounts), or auto: what the file system takes.",
        panel=WRITE,
        words=get_args(WriteName),
    ),
]
Intersect = Annotated[bool, option("--intersect", help="Average only tensors that match in all checkpoints.", panel=WRITE)]

# -- a base ----------------------------------------------------------------------------------------------------------

Base = Annotated[
    Optional[str],
    option(
        "--base",
        "--base-model",
        "--hf-model-path",
        metavar="DIR",
        help="The model training started from; supplies what the run lacks.",
        panel=COMMON,
    ),
]
MatchBase = Annotated[bool, option("--match-base", help="Give the output the names, shapes and dtypes of the base.", panel=COMMON)]
FillMissingFromBase = Annotated[
    bool, option("--fill-missing-from-base", help="Take all tensors that the run lacks from the base.", panel=BASE)
]
CarryFromBase = Annotated[
    Optional[list[str]],
    option("--carry-from-base", metavar="GLOB", help="Take these tensors, which the run lacks, from the base.", panel=BASE),
]
DropExtra = Annotated[bool, option("--drop-extra", help="Leave out tensors that the base lacks.", panel=BASE)]
Compare = Annotated[bool, option("--compare", help="Also compare the values with the base.", panel=BASE)]

# -- adapters and averages -------------------------------------------------------------------------------------------

Lora = Annotated[
    Optional[str],
    option(
        "--lora",
        metavar="MODE",
        help="fuse adapters into the weights (default), export them as a PEFT folder (default for adapters alone), both, or keep.",
        panel=LORA,
        words=get_args(LoraMode),
    ),
]
LoraAlpha = Annotated[
    Optional[str], option("--lora-alpha", metavar="X", help="LoRA alpha, if no file states it.", panel=LORA, read=values.real)
]
EmaFromModel = Annotated[bool, option("--ema-from-model", help="Write the model as the EMA if the run has none.", panel=LORA)]

# -- checks ----------------------------------------------------------------------------------------------------------

Verify = Annotated[bool, option("--verify", help="Compare the output with the source, bit for bit.", panel=COMMON)]
Part = Annotated[
    Optional[str],
    option(
        "--part",
        metavar="K/N",
        help="Write part K (from 0) of N; auto: as torchrun or srun say; :files: uncut files.",
        panel=PARTS,
    ),
]
CheckedPart = Annotated[
    Optional[str],
    option("--part", metavar="K/N", help="Check part K (from 0) of N, with --json; auto: as torchrun or srun say.", panel=PARTS),
]
Gather = Annotated[bool, option("--gather", help="The result, from what all parts printed (--part --json).", panel=PARTS)]
Documents = Annotated[
    Optional[list[str]], typer.Argument(metavar="[PART...]", help="What --part --json printed, for --gather.", show_default=False)
]
Engine = Annotated[
    str,
    option("--engine", metavar="NAME", help="local (default), or ray: a Ray cluster.", panel=PARTS, words=get_args(EngineName)),
]
RayAddress = Annotated[
    Optional[str], option("--ray-address", metavar="ADDRESS", help="Of the cluster; default: what Ray finds, or starts here.", panel=PARTS)
]
RayParts = Annotated[
    Whole, option("--ray-parts", metavar="N", help="Cut into N parts; default: one for each output file.", panel=PARTS, read=values.whole)
]
SourceRayParts = Annotated[
    Whole, option("--ray-parts", metavar="N", help="Cut into N parts; default: as many as run at once.", panel=PARTS, read=values.whole)
]
Outputs = Annotated[list[str], typer.Argument(metavar="OUTPUT...", help="What the parts were given with -o.", show_default=False)]
Checksum = Annotated[bool, option("--checksum", help="Compare and store the checksums of all tensors; needs a second read.", panel=CHECKS)]
AllowMissing = Annotated[
    Optional[list[str]],
    option("--allow-missing", metavar="GLOB", help="Allow these tensors of the model class to be missing.", panel=CHECKS),
]
AllowOverflow = Annotated[bool, option("--allow-overflow", help="Let values too large for fp16 become infinite.", panel=CHECKS)]
AllowNonFinite = Annotated[bool, option("--allow-non-finite", help="Average NaN and infinite values instead of refusing.", panel=CHECKS)]
Strict = Annotated[bool, option("--strict", help="Warnings are errors: exit code 1, nothing written.", panel=CHECKS)]
Sarif = Annotated[bool, option("--sarif", help="Print the findings as one SARIF 2.1.0 document.", panel=COMMON)]
Full = Annotated[bool, option("--full", help="Read every byte: NaN, zeros, checksums, replicas.", panel=COMMON)]
Sample = Annotated[
    Optional[str],
    option("--sample", metavar="SHARE", help="Read only this share of the values, such as 5% (--full, --base).", panel=COMMON),
]
Against = Annotated[
    Optional[str],
    option("--against", "--source", metavar="SRC", help="The run or folder it must equal, bit for bit.", panel=COMMON),
]
CompareWith = Annotated[
    Optional[str], option("--base", metavar="DIR", help="Compare the values with this model or checkpoint.", panel=COMMON)
]
Plot = Annotated[
    Optional[str],
    option("--plot", metavar="FILE", help="Draw how far tensors moved from the base: .png, .svg or .html.", panel=COMMON),
]

# -- to the Hub ------------------------------------------------------------------------------------------------------

PushToHub = Annotated[
    Optional[str], option("--push-to-hub", metavar="REPO", help="Verify the output, then push it to this repository.", panel=HUB)
]
Private = Annotated[bool, option("--private", help="Make the repository private; a public one is refused.", panel=HUB)]
Branch = Annotated[
    Optional[str],
    option("--branch", "--revision", metavar="NAME", help="Branch of it, default main; {step} and {run} are replaced.", panel=HUB),
]

# -- how the source of a verification was merged ---------------------------------------------------------------------

SourceNames = Annotated[
    Optional[str],
    option(
        "--names",
        metavar="hub|native",
        help="Names in the output: as on the hub, or as the training named them.",
        panel=SOURCE,
        words=get_args(Naming),
    ),
]
SourceKeyMap = Annotated[Optional[list[str]], option("--key-map", metavar="A=B|FILE", help="The rules that renamed tensors.", panel=SOURCE)]
SourceInclude = Annotated[Optional[list[str]], option("--include", metavar="GLOB", help="Only these tensors were written.", panel=SOURCE)]
SourceExclude = Annotated[Optional[list[str]], option("--exclude", metavar="GLOB", help="These tensors were left out.", panel=SOURCE)]
SourceLoraAlpha = Annotated[Optional[str], option("--lora-alpha", metavar="X", help="LoRA alpha.", panel=SOURCE, read=values.real)]

# -- what is printed -------------------------------------------------------------------------------------------------

Json = Annotated[bool, option("--json", help="One JSON document on stdout, even on failure.", panel=COMMON)]
Quiet = Annotated[
    int,
    option("--quiet", "-q", count=True, metavar="", help="Only the result and warnings (stderr); -qq: no warnings.", panel=OUTPUT),
]
Verbose = Annotated[bool, option("--verbose", "-v", help="Show notes and details too.", panel=OUTPUT)]
Debug = Annotated[bool, option("--debug", help="Show tracebacks.", envvar="CKPT_DEBUG", panel=OUTPUT)]
Color = Annotated[
    str,
    option(
        "--color",
        "--colour",
        metavar="WHEN",
        help="auto (default), always or never.",
        envvar="CKPT_COLOR",
        panel=OUTPUT,
        words=get_args(ColorMode),
    ),
]
Progress = Annotated[
    str,
    option(
        "--progress",
        metavar="HOW",
        help="auto (default), plain, json or off; on stderr.",
        envvar="CKPT_PROGRESS",
        panel=OUTPUT,
        words=get_args(ProgressMode),
    ),
]
ReadingStrict = Annotated[bool, option("--strict", help="Exit with code 1 if there are warnings.", panel=OUTPUT)]
