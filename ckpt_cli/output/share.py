"""One part of a plan, for processes that know nothing of each other: which of them writes what follows from the plan alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckpt_cli.errors import UsageError
from ckpt_cli.files.source import Source
from ckpt_cli.output.plan import CopyWork, OutputFile, Plan, TileWork, work_of

MAX_PARTS = 100_000
TEXT = re.compile(r"([0-9]{1,6})/([0-9]{1,6})", re.ASCII)


LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
"""The variables by which torchrun, srun and Open MPI tell a process its number and how many there are."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part ``number`` of ``count``, counted from 0. ``launched``: of one run, so that the part which is done last publishes."""

    number: int
    count: int
    launched: bool = False

    @classmethod
    def of(cls, text: str) -> Part:
        """The part that "3/8" names. Raises UsageError."""
        match = TEXT.fullmatch(text)
        number, count = (int(match[1]), int(match[2])) if match else (0, 0)
        if not number < count <= MAX_PARTS:
            last = f"0/{count} to {count - 1}/{count}" if match and 0 < count <= MAX_PARTS else "K/N, such as 0/8 to 7/8"
            raise UsageError(f"--part {text[:40]} is no part", expected=last, hint="parts are counted from 0")
        return cls(number, count)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Part:
        """The part of this process among those that a launcher started. Raises UsageError if none of `LAUNCHERS` did."""
        for number, count in LAUNCHERS:
            if number in environment and count in environment:
                try:
                    return replace(cls.of(f"{environment[number]}/{environment[count]}"), launched=True)
                except UsageError as error:
                    raise UsageError(f"{number} is {environment[number][:40]}, {count} is {environment[count][:40]}") from error
        listed = ", ".join(f"{number} and {count}" for number, count in LAUNCHERS)
        raise UsageError(
            "--part auto: no launcher says which part this is",
            expected=f"{listed} in the environment, as torchrun, srun and mpirun set them",
            hint="pass --part K/N, such as 0/8 to 7/8",
        )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@dataclass(frozen=True, slots=True)
class Portion:
    """What one part writes of a file."""

    file: OutputFile
    work: tuple[CopyWork | TileWork, ...]
    with_header: bool


@dataclass(frozen=True, slots=True)
class Share:
    """What one part writes; ``nbytes`` is how much it reads for that, ``sources`` from where."""

    part: Part
    files: tuple[Portion, ...]
    nbytes: int
    sources: tuple[Source, ...]


def share_of(plan: Plan, part: Part) -> Share:
    """The part of a plan: every piece of work belongs to one part, by where its bytes lie among all that are written.

    The header of a file belongs to the part with its first byte, which has the header of an empty file as well.
    """
    total = sum(file.size for file in plan.files)
    first, last = part.number * total // part.count, (part.number + 1) * total // part.count
    portions, nbytes, begin = [], 0, 0
    for file in plan.files:
        end = begin + file.size
        if begin < last and end > first:
            work = tuple(each for each in work_of(file) if first <= begin + each.target_offset < last)
            with_header = first <= begin < last
            if work or with_header:
                portions.append(Portion(file, work, with_header))
                nbytes += sum(_nbytes(each) for each in work)
        begin = end
    return Share(part, tuple(portions), nbytes, tuple(_sources(portions)))


def _nbytes(work: CopyWork | TileWork) -> int:
    if isinstance(work, CopyWork):
        return work.nbytes
    return work.tile.numel * sum(tensor.dtype.itemsize for tensor in work.output.origins)


def _sources(portions: list[Portion]) -> list[Source]:
    found = {}
    for portion in portions:
        for work in portion.work:
            tensors = () if isinstance(work, CopyWork) else work.output.origins
            pieces = [work.piece] if isinstance(work, CopyWork) else [piece for tensor in tensors for piece in tensor.pieces]
            for piece in pieces:
                found.update({origin.identity.path: origin for origin in piece.source.origins})
    return list(found.values())
