"""Whether the files of a legacy step are those that their names say, and of one run: by what each records, and by their weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckpt_cli.errors import Inconsistent
from ckpt_cli.files.source import Files
from ckpt_cli.formats.assembly import one_piece
from ckpt_cli.formats.megatron.common import SCHEDULER, SHOWN, SIZES
from ckpt_cli.formats.megatron.ranks import RankFile, Sizes, read_ranks
from ckpt_cli.formats.sets.recorded import HINT, Recorded, refuse_exchanged
from ckpt_cli.names import few
from ckpt_cli.tensors.component import Note
from ckpt_cli.tensors.equality import alike
from ckpt_cli.tensors.plain_values import equal

OF_RANK = frozenset({"rank", "local_rank"})
"""Arguments that ranks of one run do not share."""

OF_RUN = frozenset({*SHOWN, *SIZES.values(), "seed", "save", "lr", "global_batch_size", "train_iters", "train_samples"})
"""Arguments that all ranks of one run share; others may be those of a node."""


def read_save(paths: Sequence[Path], files: Files) -> tuple[Sizes, list[RankFile], list[Note]]:
    """The files of all ranks, proved to be of one save as far as they tell, and warnings. Raises what `read_ranks` raises."""
    sizes, ranks = read_ranks(paths, files)
    notes = _of_one_run(ranks)
    # Whatever the order of the axes, a run counts tensor ranks first and stages after expert ranks, of those that write files.
    by_rank = sorted(ranks, key=lambda rank: (rank.pp, rank.ep, rank.tp))
    refuse_exchanged([Recorded(rank.path.parent.name, rank.path, _recorded(rank)) for rank in by_rank])
    return sizes, ranks, [*notes, *_without_copies(ranks)]


def _recorded(rank: RankFile) -> int | None:
    found = rank.common.arguments.get("rank")
    return found if type(found) is int and found >= 0 else None


def _of_one_run(ranks: Sequence[RankFile]) -> list[Note]:
    """A warning about arguments that differ. Raises Inconsistent for those, and for schedulers, that a run has once."""
    first = ranks[0]
    differing: dict[str, None] = {}
    for rank in ranks[1:]:
        held, other = rank.common.arguments, first.common.arguments
        names = [name for name in {**other, **held} if name not in OF_RANK and not equal(held.get(name), other.get(name))]
        name = next((name for name in names if name in OF_RUN), None)
        if name is not None or not equal(rank.common.values.get(SCHEDULER), first.common.values.get(SCHEDULER)):
            said = f"{name} {str(held.get(name))[:80]} ({str(other.get(name))[:80]} in {first.path.parent.name})" if name else SCHEDULER
            raise Inconsistent(
                f"it is of another run or iteration than {first.path.parent.name}: {said} differs",
                path=rank.path,
                expected="files of one save",
                hint="move the files of the other save away",
            )
        differing |= dict.fromkeys(names)
    if not differing:
        return []
    return [
        Note("warning", "arguments-differ", f"the files of ranks record other arguments ({few(list(differing))}): are they of one run?")
    ]


def _without_copies(ranks: Sequence[RankFile]) -> list[Note]:
    """A warning about expert ranks with equal weights, as after upcycling. Raises Inconsistent for other files with equal weights."""
    held = [
        {f"{chunk}.{name}": one_piece(name, stored, rank.number) for chunk, part in enumerate(rank.chunks) for name, stored in part.items()}
        for rank in ranks
    ]
    equals: list[str] = []
    for first, second in alike(held):
        other, rank = ranks[first], ranks[second]
        label, twin = rank.path.parent.name, other.path.parent.name
        if (rank.tp, rank.pp) != (other.tp, other.pp):
            raise Inconsistent(f"{twin} and {label} hold the same weights", path=rank.path, expected="a part in each file", hint=HINT)
        if _recorded(rank) is None or _recorded(rank) == _recorded(other):
            equals.append(f"{twin} and {label}")
    if not equals:
        return []
    text = f"{few(equals)} hold equal experts: if the model was not just made from a dense one, a file was copied over another"
    return [Note("warning", "equal-experts", text)]
