"""Folders that hold one part of a model each: ``pp_0``, ``pipeline_stage_1``, ``tp_rank_00``; and ``stage0``, which may be one.

No format of a trainer is meant, but scripts in which every stage of a parallel model saves a checkpoint of its own, in any format.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from ckpt_cli.errors import PartOfSet
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.step_names import step_of
from ckpt_cli.name_patterns import pattern_of
from ckpt_cli.names import few

RANKED = re.compile(
    r"(.*[-_.])?((pp|tp|ep|pipe(line)?|tensor|expert)([-_]?(model[-_]?)?parallel)?[-_]?rank|(pp|pipe(line)?)[-_]?stage)[-_]?[0-9]{1,6}",
    re.ASCII | re.IGNORECASE,
)
"""Names that say so by themselves."""

BARE = re.compile(r"(pp|tp|pipe(line)?)[-_]?(?P<number>[0-9]{1,6})", re.ASCII | re.IGNORECASE)
"""Names that say so if a number 0 is among them: ``tp4`` may be the number of ranks that saved a whole model."""

NUMBERED = re.compile(r".*?(?P<number>[0-9]{1,6})", re.ASCII)
HINT = "save all parts into one folder (torch.distributed.checkpoint does), or put them together with the program that wrote them"


def stage_error(folder: Path, there: Folders) -> PartOfSet | None:
    """Why what a folder holds is only a part, by the folder's name; None if the name does not say so."""
    bare = BARE.fullmatch(folder.name)
    if bare is None and RANKED.fullmatch(folder.name) is None:
        return None
    others = siblings(folder, there)
    if bare is not None and not any(int(found["number"]) == 0 for path in (folder, *others) if (found := BARE.fullmatch(path.name))):
        return None
    hint = HINT if others else f"{HINT}; if it is a whole model, rename the folder"
    return part_of_stages(folder, others, hint)


def part_of_stages(folder: Path, others: list[Path], hint: str = HINT) -> PartOfSet:
    """The error for a folder that holds one part of a model; ``others`` are those beside it."""
    beside = f"; beside it: {few([path.name for path in others], 5)}" if others else ""
    return PartOfSet(f"{folder.name} holds one part of a parallel model", path=folder, expected=f"all parts{beside}", hint=hint)


def siblings(folder: Path, there: Folders) -> list[Path]:
    """The folders beside one that differ from it only in the number at the end of their name, the nearest first; none for steps."""
    fields = NUMBERED.fullmatch(folder.name)
    if fields is None or step_of(folder) is not None:
        return []
    like = re.compile(re.escape(folder.name[: fields.start("number")]) + "([0-9]{1,6})", re.ASCII)
    found = {int(match[1]): path for path in there.folders(folder.parent, like.fullmatch) if (match := like.fullmatch(path.name))}
    own = int(fields["number"])
    return [found[number] for number in sorted(found, key=lambda number: (abs(number - own), number)) if found[number].name != folder.name]


def complement(mine: Collection[str], others: Collection[str]) -> bool:
    """Whether two sets of tensors have none in common, but the same modules under other numbers.

    Numbers that names begin with are those of an ``nn.Sequential``, of which two models may use others: stages have a run of them each.
    """
    if not {*mine}.isdisjoint(others):
        return False
    kinds = [{pattern for name in names if (pattern := pattern_of(name)[0]) != name} for names in (mine, others)]
    return bool(kinds[0] & kinds[1]) or _runs(mine, others)


def _runs(mine: Collection[str], others: Collection[str]) -> bool:
    """Whether two sets hold two runs of the modules of one sequence, one after the other, and nothing else."""
    heads = [{name.partition(".")[0] for name in names} for names in (mine, others)]
    if not all(heads) or not all(head.isdecimal() and head.isascii() for head in heads[0] | heads[1]):
        return False
    first, second = sorted(sorted(map(int, head)) for head in heads)
    return first[-1] < second[0]
