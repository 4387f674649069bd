"""In which order several mesh dimensions cut one dimension of a tensor: what files record, and what only their names tell."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_cli.boxes import Split, nested_order
from ckpt_cli.errors import Undecidable
from ckpt_cli.formats.rank_files.dtensor import DistributedLocal
from ckpt_cli.names import ShardOrder, few
from ckpt_cli.tensors.component import Note

TP = "tp"
"""What a mesh dimension of tensor parallelism is called; FSDP2 of torch <= 2.4 cuts what that has cut before."""


DECIDED = frozenset({"tp-first", "left-to-right", "order-contradicted"})
"""Notes about tensors whose files do not record the order."""


def splits_of(name: str, local: DistributedLocal, dim: int, nested: bool, order: ShardOrder, notes: dict[str, Note]) -> list[Split]:
    """How mesh dimensions cut tensor dimension ``dim``, outermost cut first. Raises Undecidable where nothing tells.

    ``order`` decides only where files do not: placements of torch > 2.4 stand for cuts from left to right.
    """
    mesh = local.mesh
    cutting = [i for i, p in enumerate(local.placements) if p.dim == dim and p.kind != "Replicate" and mesh.shape[i] > 1]
    splits = {i: Split(mesh.shape[i], mesh.coordinate[i], local.placements[i].factor) for i in cutting}
    in_order = list(splits.values())
    strided = any(split.factor > 1 for split in in_order)
    recorded = local.order.get(dim) if local.order else None
    listed = recorded is not None and set(recorded) >= set(cutting)
    if len(cutting) > 1 and order != "auto" and (strided or listed or not local.old):
        text = f"--shard-order {order} has no effect on tensors whose files record the order in which they were cut"
        notes["shard-order"] = Note("info", "shard-order", text)
    if strided:
        return (nested_order(in_order) or in_order) if nested else in_order
    if recorded is not None and listed:
        return [splits[i] for i in recorded if i in splits]
    if len(cutting) < 2 or not local.old:
        return in_order
    tp = [i for i in cutting if mesh.names[i] == TP]
    tp_first = [splits[i] for i in (*tp, *(i for i in cutting if i not in tp))]
    if order == "left-to-right":
        if tp and tp_first != in_order:
            first, names = mesh.names[cutting[0]], few([mesh.names[i] for i in cutting])
            text = (
                f"--shard-order {order} cuts by {first} first, but the files name a mesh dimension tp (of {names}), by which FSDP2 of "
                "torch <= 2.4 cuts first: without the option they are read like that, and with it rows would change places"
            )
            notes["order-contradicted"] = Note("warning", "order-contradicted", text)
        else:
            text = f"torch <= 2.4 cut these tensors by {few([mesh.names[i] for i in cutting])} in this order, as --shard-order {order} says"
            notes["left-to-right"] = Note("info", "left-to-right", text)
        return in_order
    if not tp:
        raise Undecidable(
            f"torch <= 2.4 cut dimension {dim} twice and did not record the order (mesh {', '.join(mesh.names)})",
            tensor=name,
            expected="a mesh dimension named tp, which is cut first",
            hint="pass --shard-order left-to-right if the first mesh dimension was cut first",
        )
    notes["tp-first"] = Note(
        "info", "tp-first", "torch <= 2.4 cut these tensors by tp first, then by fsdp (not recorded in its placements)"
    )
    return tp_first


def order_notes(notes: Sequence[Note], order: ShardOrder) -> tuple[Note, ...]:
    """The notes about a component, with a warning if an ``order`` was asked for that decided nothing in any of its tensors."""
    if order == "auto" or not DECIDED.isdisjoint(note.code for note in notes):
        return tuple(notes)
    why = next((note.text for note in notes if note.code == "shard-order"), None)
    text = why or f"--shard-order {order} has no effect here: no tensor was cut by two mesh dimensions of torch <= 2.4"
    return (*(note for note in notes if note.code != "shard-order"), Note("warning", "shard-order", text))
