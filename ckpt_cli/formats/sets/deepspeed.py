"""DeepSpeed's file names, and how to merge its files with its own script."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.source import read_small


@dataclass(frozen=True, slots=True)
class SetKind:
    """A naming scheme for the files of a set: ``part`` is a number in the expression, ``parts`` how many there are, if names say it.

    ``content_decides``: part 0 without siblings may be the whole model, which `sets.contents` finds out.
    """

    regex: re.Pattern[str]
    writer: str
    unit: str
    content_decides: bool = False


def set_kind(expression: str, writer: str, unit: str = "rank", content_decides: bool = False) -> SetKind:
    return SetKind(re.compile(expression, re.ASCII | re.IGNORECASE), writer, unit, content_decides)


DEEPSPEED = (
    set_kind(r"(bf16_|fp16_)?zero_pp_rank_(?P<part>\d+)_mp_rank_\d+_optim_states\.pt", "DeepSpeed ZeRO"),
    set_kind(r"zero_pp_rank_(?P<part>\d+)_mp_rank_\d+_model_states\.pt", "DeepSpeed ZeRO-3"),
    set_kind(r"expp_rank_(?P<part>\d+)_mp_rank_\d+_optim_states\.pt", "DeepSpeed MoE"),
    set_kind(r"layer_\d+_expert_(?P<part>\d+)_mp_rank_\d+_model_states\.pt", "DeepSpeed MoE", "expert"),
    set_kind(r"layer_(?P<part>\d+)(-model_\d+)?-model_states\.pt", "a DeepSpeed pipeline", "layer"),
    set_kind(r"mp_rank_(?P<part>\d+)_model_states\.pt", "DeepSpeed", content_decides=True),
)
"""What DeepSpeed writes, whole names."""

SCRIPT = "zero_to_fp32.py"
STAGE_3 = re.compile(r"zero_pp_rank_[0-9]+_mp_rank_[0-9]+_model_states\.pt", re.ASCII)
OUT_OF_SCRIPT = re.compile(r"layer_|expp_|mp_rank_0*[1-9]|.*_mp_rank_0*[1-9]", re.ASCII)


def unread_sets(names: Sequence[str]) -> list[str]:
    """The names of weight files that are parts of DeepSpeed sets."""
    return [name for name in names if any(kind.regex.fullmatch(name) for kind in DEEPSPEED)]


def deepspeed_hint(folder: Path, there: Folders) -> str:
    """DeepSpeed puts a script beside the folder of a step, which knows ZeRO, but no experts, pipelines or tensor parallelism.

    Of stage 1 it leaves frozen tensors out, of ZeRO++ it writes the codes of quantised ones, and it refuses what BF16_Optimizer
    wrote: names do not distinguish these from others.
    """
    names = [entry.name for entry in there.entries(folder)]
    plain = not any(OUT_OF_SCRIPT.match(name) for name in names) and any("zero_pp_rank_" in name for name in names)
    home = next((home for home in (folder, *folder.parents[:2]) if there.is_file(home / SCRIPT)), None)
    if home is None or not plain:
        return "load the set with DeepSpeed, and save one state dict"
    tag = os.path.relpath(folder, home)
    chosen = "" if _latest(home, there) == tag else f" -t {shlex.quote(tag)}"
    stage_3 = any(STAGE_3.fullmatch(name) for name in names)
    may = "write quantised frozen tensors as codes" if stage_3 else "leave frozen tensors out (stage 1), and refuses BF16_Optimizer"
    command = f"python {SCRIPT} . OUTPUT{chosen}"
    return f"{home / SCRIPT} puts the set together where deepspeed is installed: in its folder, {command}; it may {may}"


def _latest(home: Path, there: Folders) -> str | None:
    """The step that DeepSpeed's tools use by default."""
    try:
        return read_small(home / "latest", 1 << 10).decode("utf-8", "replace").strip() if there.is_file(home / "latest") else None
    except CkptError:
        return None  # only asked for the hint
