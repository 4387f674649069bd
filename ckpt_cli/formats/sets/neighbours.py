"""Files that differ in a number alone, from 0 on (``model.00.pt``, ``model.01.pt``): parts of one model, or models of several epochs.

Their names do not tell, their content does: stages of a pipeline hold the same modules of other layers. Halves of every tensor have nothing
in common, and the same norms; models of one training have much in common, and of several trainings no norm is the same.
``checkpoint_1.pt`` is the file of rank 1 (torch.distributed.checkpoint._experimental, ``checkpoint_<rank>.pt``), or of the second epoch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ckpt_cli.errors import CkptError, PartOfSet
from ckpt_cli.files.folders import Folders
from ckpt_cli.formats.sets.kinds import COUNTER
from ckpt_cli.formats.sets.stages import complement
from ckpt_cli.names import few
from ckpt_cli.tensors.equality import same_samples
from ckpt_cli.tensors.kinship import unrelated
from ckpt_cli.tensors.reading import elements
from ckpt_cli.tensors.tensor import Tensor

FORMS = tuple(
    re.compile(rf"(?P<before>.*?)(?P<number>[0-9]{{1,4}})(?P<after>(_[0-9]{{1,4}}){{{count}}}(\.[a-z]+)+)", re.ASCII | re.IGNORECASE)
    for count in range(3)
)
"""A file's name with a number at the end, and with one or two more after it: smp names files ``<name>_<pipeline rank>_<tensor rank>.pt``,
later with the rank of the replica at the end."""

OF_RANKS = re.compile(r"model\.[0-9]{2}\.(pt|pth|bin)", re.ASCII)
"""What fairseq2 called the files of tensor parallelism, and programs call those of epochs: values alone tell."""

NORM = re.compile(r"norm|(^|[._])ln([._0-9]|$)", re.IGNORECASE)
"""In the names of vectors that all ranks of tensor parallelism have alike, and no two trainings of an ensemble."""

SAVED = re.compile(r"(?<![a-z])(checkpoints?|ckpts?)[-_. ]?$", re.IGNORECASE)
"""Words before the number that count what was saved: ranks as well as steps."""

OF_SAVERS = re.compile(r"(checkpoint|ckpt|model)[-_.]?$", re.IGNORECASE)
"""Names that say nothing of the content, where those of two models do (``net_g``): with a number behind it, one is a rank's or a step's."""

TOGETHER = 600
"""Seconds within which the ranks of one save have written their files."""

VECTORS = 8
"""So many of the vectors that both files have are compared."""

SAMPLE = 1024

Tensors = Mapping[str, Tensor]


def neighbour_error(tensors: Tensors, path: Path, there: Folders, read: Callable[[Path], Tensors]) -> PartOfSet | None:
    """Why a file is one of a set, by what the file with the next number holds, which ``read`` describes; None if that does not show it."""
    for others in filter(None, (_numbered(path, there, form) for form in FORMS)):
        try:
            held = read(others[0])
            if held and (complement(tensors, held) or _beside(tensors, held, path, others[0]) or _cut(tensors, held, path.name)):
                return PartOfSet(
                    f"{path.name} holds one part of a parallel model, and {others[0].name} another",
                    path=path,
                    expected=f"the whole set; beside it: {few([other.name for other in others])}",
                    hint="put the set together with the program that wrote it; if it is a whole model, rename it without the number",
                )
        except CkptError:
            continue  # what cannot be read proves nothing
    return None


def lone_part(path: Path, there: Folders) -> str | None:
    """What the name of a file says of ranks where no other one is there to compare with: smp's ``<name>_<rank>_<rank>.pt``."""
    for form, ranks in zip(FORMS[1:], ("pipeline and tensor rank", "ranks of pipeline, tensor and replica"), strict=True):
        fields = form.fullmatch(path.name)
        if fields is None or COUNTER.search(SAVED.sub("", fields["before"])) or re.search(r"[0-9_]$", fields["before"].rstrip("_")):
            continue
        like = re.compile(re.escape(fields["before"]) + r"[0-9]{1,4}(_[0-9]{1,4})*(\.[a-z]+)+", re.ASCII | re.IGNORECASE)
        if not [other for other in there.entries(path.parent) if like.fullmatch(other.name) and other.name != path.name]:
            return f"{path.name} is called as SageMaker's model parallelism calls the part of one rank ({ranks})"
    return None


def _numbered(path: Path, there: Folders, form: re.Pattern[str]) -> list[Path]:
    """The other files of a name, the nearest first, if they are numbered from 0 on without a gap."""
    fields = form.fullmatch(path.name)
    if fields is None:
        return []
    like = re.compile(re.escape(fields["before"]) + r"([0-9]{1,4})" + re.escape(fields["after"]), re.ASCII)
    found = {int(match[1]): other for other in there.entries(path.parent) if (match := like.fullmatch(other.name))}
    if sorted(found) != list(range(len(found))):
        return []
    own = int(fields["number"])
    return [found[number] for number in sorted(found, key=lambda number: (abs(number - own), number)) if number != own]


def _beside(mine: Tensors, others: Tensors, path: Path, other: Path) -> bool:
    """Whether two files of one save hold different tensors, under names of which nothing but the number tells them apart."""
    fields = FORMS[0].fullmatch(path.name)
    if fields is None or OF_SAVERS.fullmatch(fields["before"]) is None or not mine.keys().isdisjoint(others):
        return False
    try:
        first, second = (file.stat().st_mtime for file in (path, other))
    except OSError:
        return True  # elsewhere, where nothing tells of times
    return abs(first - second) <= TOGETHER


def _cut(mine: Tensors, others: Tensors, name: str) -> bool:
    """Whether two files hold other elements of the same tensors; those that count epochs or trainings do not."""
    counted = any((fields := form.fullmatch(name)) and COUNTER.search(SAVED.sub("", fields["before"])) for form in FORMS)
    if counted or mine.keys() != others.keys():
        return False
    of_ranks = OF_RANKS.fullmatch(name) is not None
    if unrelated(mine, others, 1 if of_ranks else None) is None:
        return False
    vectors = [each for each in mine if each.endswith((".weight", ".bias")) and len(mine[each].shape) == 1 and _tells(mine[each])]
    if of_ranks:
        norms = [each for each in vectors if NORM.search(each)]
        return not norms or any(same_samples(mine[each], others[each]) for each in norms)
    return any(same_samples(mine[each], others[each]) for each in vectors[:VECTORS])


def _tells(vector: Tensor) -> bool:
    """Whether a vector has several values: untrained norms are alike in all models."""
    values = elements(vector, 0, min(vector.numel, SAMPLE)) if vector.dtype.kind == "float" and vector.dtype.numpy is not None else ()
    return len({*map(float, values)}) > 2
