"""One part of a plan, for processes that know nothing of each other: which of them writes what follows from the plan alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ckpt_cli import __version__
from ckpt_cli.files.source import Source
from ckpt_cli.output import plan
from ckpt_cli.output.part import WHOLE_FILES, Part
from ckpt_cli.output.plan import CopyWork, OutputFile, Plan, TileWork, work_of
from ckpt_cli.tensors.reading import Read, reads_of_tile

MOST_SAMPLES, SAMPLE = 256, 1 << 12


def cutting(part: Part) -> str:
    """What decides where a plan is cut, besides the plan: parts are put together only if they agree on it."""
    return f"{__version__}/{plan.TILE}/{plan.COPY_STEP}/{plan.SUM_ELEMENTS}{WHOLE_FILES if part.whole_files else ''}"


@dataclass(frozen=True, slots=True)
class Portion:
    """What one part writes of a file."""

    file: OutputFile
    work: tuple[CopyWork | TileWork, ...]
    with_header: bool


@dataclass(frozen=True, slots=True)
class Share:
    """What one part writes: ``wrote`` bytes by file; ``nbytes`` is how much it reads for that, ``sources`` from where."""

    part: Part
    files: tuple[Portion, ...]
    wrote: dict[str, int]
    nbytes: int
    sources: tuple[Source, ...]

    @property
    def samples(self) -> dict[str, list[tuple[int, int]]]:
        """Places (position, length) in what it writes of each file, from the first work to the last; work writes its bytes in a row."""
        most = max(2, MOST_SAMPLES // max(1, len(self.files)))
        return {portion.file.name: [_sample(work) for work in _spread(portion.work, most)] for portion in self.files if portion.work}

    @property
    def reads(self) -> Iterator[Read]:
        """What is read of sources elsewhere than on this machine, in this order."""
        for work in (work for portion in self.files for work in portion.work):
            if isinstance(work, CopyWork):
                yield work.piece.source, work.source_offset, work.source_offset + work.nbytes
            else:
                yield from (read for tensor in work.output.origins for read in reads_of_tile(tensor, work.tile))


def share_of(whole: Plan, part: Part) -> Share:
    """The part of a plan: every piece of work belongs to one part, by where its bytes lie among all that are written.

    The header of a file belongs to the part that has its first byte.
    """
    first, last = _place(whole, part, part.number), _place(whole, part, part.number + 1)
    portions, wrote, nbytes, begin = [], {}, 0, 0
    for file in whole.files:
        end = begin + file.size
        if begin < last and end > first:
            work = tuple(each for each in work_of(file) if first <= begin + each.target_offset < last)
            with_header = first <= begin < last
            if work or with_header:
                portions.append(Portion(file, work, with_header))
                wrote[file.name] = with_header * len(file.header) + sum(_written(each) for each in work)
                nbytes += sum(_read(each) for each in work)
        begin = end
    return Share(part, tuple(portions), wrote, nbytes, tuple(_sources(portions)))


def _place(whole: Plan, part: Part, number: int) -> int:
    """Where a part begins among all bytes that are written: where a file begins, if files are not to be cut."""
    starts = [0, *accumulate(file.size for file in whole.files)]
    return starts[-(-number * len(whole.files) // part.count)] if part.whole_files else number * starts[-1] // part.count


def _spread(work: Sequence[CopyWork | TileWork], most: int) -> list[CopyWork | TileWork]:
    """At most so many of them, the first and the last among these."""
    if len(work) <= most:
        return list(work)
    return [work[place * (len(work) - 1) // (most - 1)] for place in range(most)]


def _sample(work: CopyWork | TileWork) -> tuple[int, int]:
    return work.target_offset, min(SAMPLE, _written(work))


def _written(work: CopyWork | TileWork) -> int:
    return work.nbytes if isinstance(work, CopyWork) else work.tile.numel * work.output.dtype.itemsize


def _read(work: CopyWork | TileWork) -> int:
    if isinstance(work, CopyWork):
        return work.nbytes
    return work.tile.numel * sum(tensor.dtype.itemsize for tensor in work.output.origins)


def _sources(portions: list[Portion]) -> list[Source]:
    work = [each for portion in portions for each in portion.work]
    pieces = [each.piece for each in work if isinstance(each, CopyWork)]
    outputs = {each.output.name: each.output for each in work if isinstance(each, TileWork)}
    pieces += [piece for output in outputs.values() for tensor in output.origins for piece in tensor.pieces]
    return list({origin.identity.path: origin for piece in pieces for origin in piece.source.origins}.values())
