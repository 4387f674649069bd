"""One save in several folders: without a shared disk, each node keeps the files of its own ranks."""

from __future__ import annotations

from dataclasses import replace

from ckpt_cli.errors import Inconsistent, MixedWorldSizes
from ckpt_cli.files.folders import is_file
from ckpt_cli.formats.base import Match
from ckpt_cli.formats.dcp.metadata import METADATA


def joined(first: Match, second: Match) -> Match:
    """Two matches of the same component as one. What contradicts becomes its ``trouble``; nothing is read."""
    more = tuple(dict.fromkeys((*first.more_roots, second.root, *second.more_roots)))
    files = (*first.files, *second.files)
    if first.format != second.format:
        return replace(first, trouble=Inconsistent(f"{first.root} is {first.format}, {second.root} is {second.format}"))
    if first.ranks:
        trouble = first.trouble or second.trouble
        if first.world_size != second.world_size:
            trouble = trouble or MixedWorldSizes(f"{first.root} is of {first.world_size} ranks, {second.root} of {second.world_size}")
        twice = sorted(set(first.ranks) & set(second.ranks))
        if twice:
            trouble = trouble or Inconsistent(f"rank {twice[0]} is in both {first.root} and {second.root}")
        return replace(first, files=files, ranks={**second.ranks, **first.ranks}, trouble=trouble, more_roots=more)
    if first.trouble is not None and second.trouble is None:
        # The metadata of a DCP is on one node only.
        return replace(second, files=files, more_roots=tuple(root for root in (first.root, *more) if root != second.root))
    return replace(first, files=files, more_roots=more)


def counts_no_ranks(match: Match) -> bool:
    """Whether nothing in the files says how many ranks wrote them: DCP with metadata of each rank alone."""
    return match.format == "dcp" and match.trouble is None and not any(is_file(root / METADATA) for root in (match.root, *match.more_roots))


def complement(first: Match, second: Match) -> bool:
    """Whether two matches look like parts of one save: they have no file in common, and neither has the files of all ranks."""
    if (first.format, first.component) != (second.format, second.component):
        return False
    if first.ranks:
        apart = not set(first.ranks) & set(second.ranks) and first.world_size == second.world_size
        return apart and bool(first.missing_ranks) and bool(second.missing_ranks)
    names = [{path.name for path in match.files if path.suffix == ".distcp"} for match in (first, second)]
    return first.format == "dcp" and not names[0] & names[1]
