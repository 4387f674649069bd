"""Which boxes of a DTensor this rank holds, from its placements: the rules that saved shards are read with, for live tensors."""

from __future__ import annotations

from typing import Any

from ckpt_cli.boxes import Box, Shape, Split, boxes_of, nested_order, split_dimension
from ckpt_cli.errors import Unsupported


def local_boxes(name: str, tensor: Any) -> list[tuple[Box, Shape]]:
    """Boxes of the whole tensor, each with its place in the local one; none on ranks outside of the mesh.

    ``_StridedShard`` (FSDP2 on top of tensor parallelism) says that mesh dimensions to its right were cut before; the local shape
    decides whether it is meant like this or as its definition says. Raises Unsupported for other placements, and where no rule gives
    the local shape.
    """
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    local = tuple(tensor.to_local().shape)
    sizes = tuple(mesh.shape)
    cuts: dict[int, dict[int, Split]] = {}
    for place, placement in enumerate(tensor.placements):
        kind = type(placement).__name__
        if kind not in ("Replicate", "Shard", "_StridedShard"):
            raise Unsupported(
                f"it has the placement {placement}: what a rank holds is no part of the tensor",
                tensor=name,
                hint="redistribute it to Shard or Replicate first",
            )
        if kind != "Replicate" and sizes[place] > 1:
            split = Split(sizes[place], coordinate[place], getattr(placement, "split_factor", 1))
            cuts.setdefault(placement.dim % len(shape), {})[place] = split
    order = _recorded_order(tensor)
    for nested in (True, False):
        intervals = [split_dimension(n, _in_order(cuts.get(dim, {}), order.get(dim), nested=nested)) for dim, n in enumerate(shape)]
        if tuple(sum(size for _, size in axis) for axis in intervals) == local:
            return [(box, place) for box, place in boxes_of(intervals) if box.numel]
    raise Unsupported(f"its placements do not say which part of shape {list(shape)} its local tensor {list(local)} is", tensor=name)


def _in_order(splits: dict[int, Split], recorded: tuple[int, ...] | None, *, nested: bool) -> list[Split]:
    """The cuts of one dimension, outermost first."""
    listed = list(splits.values())
    if any(split.factor > 1 for split in listed):
        return (nested_order(listed) or listed) if nested else listed
    if recorded is not None and set(recorded) >= set(splits):
        return [splits[place] for place in recorded if place in splits]
    return listed


def _recorded_order(tensor: Any) -> dict[int, tuple[int, ...]]:
    """Per tensor dimension the mesh dimensions in the order of cutting, where torch (2.10 and later) records it."""
    recorded = getattr(getattr(tensor, "_spec", None), "shard_order", None) or ()
    return {entry.tensor_dim: tuple(entry.mesh_dims) for entry in recorded}
