"""How many ranks there should be a state of, and which of them lack one.

Few names of state files say how many there were, and the last ones leave no gap. So they are counted against what else tells of the
ranks that trained: the weights, the arguments of the training, the optimizer, files of another kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.discover.found import Place
from ckpt_cli.discover.optimizers.files import find_optimizer_files, optimizer_folders
from ckpt_cli.discover.state_files import StateFile
from ckpt_cli.errors import CkptError
from ckpt_cli.files.source import Files
from ckpt_cli.files.torch_file import TorchFile
from ckpt_cli.formats.assembly import ranks_of
from ckpt_cli.formats.base import MAX_RANKS, missing_of
from ckpt_cli.formats.registry import format_of, recognise
from ckpt_cli.tensors.component import Note

ARGUMENTS = "training_args.bin"
"""The arguments of transformers' Trainer, with the state of the processes that ran it."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A number of ranks, and what tells it: the subject of a sentence."""

    size: int
    by: str = "the weights are"


def counted_ranks(place: Place, homes: Sequence[Path], listed: Sequence[StateFile], held: int, files: Files) -> Counted | None:
    """How many ranks trained, as something else than state files tells; ``held`` is of how many ranks the weights have a state.

    Weights may tell less than there were, if some ranks wrote none. The optimizer is only asked where nothing else tells.
    """
    exact = place.match.world_size or held
    if exact:
        return Counted(exact)
    if not any(file.rank is not None for file in listed):
        return None
    weights = _told(place, files)
    told = [Counted(weights)] if weights else []
    told += [
        Counted(size, f"{ARGUMENTS} is") for file in listed if file.path.name == ARGUMENTS and (size := _of_arguments(file.path, files))
    ]
    told = told or [Counted(size, "the optimizer is") for size in (_of_optimizer(place, homes, files),) if size]
    return max((each for each in told if each.size <= MAX_RANKS), key=lambda each: each.size, default=None)


def _told(place: Place, files: Files) -> int | None:
    known = format_of(place.match)
    try:
        return known.ranks_told(place.match, files)
    except CkptError:
        return known.least_ranks(place.match)  # weights that cannot be read are no reason to withhold the state


def _of_arguments(path: Path, files: Files) -> int | None:
    """How many processes ran a training with accelerate, whose state is pickled with the arguments."""
    try:
        given = TorchFile(files.source(path)).root
    except CkptError:
        return None  # it is passed on as it is
    for name in ("distributed_state", "num_processes"):
        given = getattr(given, "state", None)
        given = given.get(name) if isinstance(given, dict) else None
    return given if type(given) is int and given > 0 else None


def _of_optimizer(place: Place, homes: Sequence[Path], files: Files) -> int | None:
    number = place.match.number
    try:
        folders = [match for folder in optimizer_folders(homes, number) for match in recognise(folder)]
        sizes = [size for match in folders if (size := format_of(match).ranks_told(match, files))]
        found = find_optimizer_files(homes, number)
    except CkptError:
        return None  # `--optimizer` refuses such files
    # A whole optimizer may have been gathered from any number of ranks.
    return max([*sizes, *([found.world_size] if found is not None and found.world_size > 1 else [])], default=None)


def checked_ranks(listed: Sequence[StateFile], there: set[int], counted: Counted | None, *, told: bool) -> tuple[int, list[Note]]:
    """The number of ranks, and warnings: which of them lack a state, whether it is of other ranks than trained, which files are missing.

    ``there`` are the ranks that have a state. ``told``: the format says of which ranks there should be one.
    """
    notes: list[Note] = []
    by_rank = [file for file in listed if file.rank is not None and file.kind != "copied"]
    world = max((file.world_size or (file.rank or 0) + 1 for file in by_rank), default=0)
    of_others = [file.world_size or (file.rank or 0) + 1 for file in listed if file.rank is not None and not file.grouped]
    expected = counted.size if counted is not None else max(of_others, default=0)
    if told or (by_rank and all(file.world_size is None for file in by_rank)):
        world = max(world, expected)
    text = _other_world("the state is", by_rank, counted)
    if text is not None:
        notes.append(Note("warning", "world-sizes-differ", text))
    missing = missing_of(world, there)
    if missing:
        other = f"; values that ranks share are those of rank {min(there)}" if 0 in missing and there else ""
        text = f"{ranks_of(missing, world)} missing from the training state: None in per-rank lists{other}"
        notes.append(Note("warning", "missing-rank", text))
    return world, [*notes, *_family_notes(listed, set(missing), counted, expected)]


def _other_world(what: str, files: Sequence[StateFile], counted: Counted | None) -> str | None:
    """The message for state files of a number of ranks that is not that of the training; None if they fit.

    Names without a world size tell by their highest rank: files that a run with more ranks left behind.
    """
    said = {file.world_size for file in files if file.world_size is not None}
    sizes = said or {file.rank + 1 for file in files if file.rank is not None}
    if counted is None:
        return None
    differing = max((size for size in sizes if size > counted.size or (said and size != counted.size)), default=None)
    return None if differing is None else f"{what} of {differing} ranks, {counted.by} of {counted.size}: they may be of different saves"


def _family_notes(listed: Sequence[StateFile], told: set[int], counted: Counted | None, expected: int) -> list[Note]:
    """Which ranks' files are missing among others of their name: of dataloaders, or of a rank that left another file.

    Random states may lie in either of two files, so that they are compared as values.
    """
    notes: list[Note] = []
    families: dict[str, list[StateFile]] = {}
    for file in listed:
        if file.family is not None and file.kind != "random":
            families.setdefault(file.family, []).append(file)
    for family, files in families.items():
        there = {file.rank for file in files if file.rank is not None}
        said = {file.world_size for file in files if file.world_size is not None}
        world = max({*there, *(size - 1 for size in said)}) + 1
        text = _other_world(f"{family} is", files, counted) if files[0].kind == "copied" else None
        if text is not None:
            notes.append(Note("warning", "world-sizes-differ", text))
        if not said and not files[0].grouped:
            world = max(world, expected)
        missing = [rank for rank in missing_of(world, there) if files[0].kind == "copied" or rank not in told]
        if missing:
            text = f"{ranks_of(missing, world)} missing among {family}: it cannot be passed on"
            notes.append(Note("warning", "missing-rank", text))
    return notes
