"""Experts that were split by hand before FSDP saw them, so placements do not show it.

verl's VeOmni engine gives each expert-parallel rank its block of experts and shards the block over a sub-mesh: every
file then reports the global shape ``[experts / ep, ...]``, and files of different ep ranks hold *different* tensors under
one name. A parameter that tensor parallelism leaves alone looks the same, but there the files hold replicas. Only
the number of experts in the model's config tells the two apart, so without it such a tensor is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_cli.boxes import Shape
from ckpt_cli.errors import Inconsistent, MissingShard, Undecidable
from ckpt_cli.formats.rank_files.dtensor import DistributedLocal

Blocks = tuple[int, dict[tuple[int, ...], int]]


def expert_blocks(
    name: str,
    shape: Shape,
    held: Sequence[DistributedLocal],
    world_size: int,
    missing: tuple[int, ...],
    experts: int | None,
    *,
    has_config: bool,
) -> Blocks | None:
    """How many blocks the experts were cut into, and which block each sub-mesh (by its ranks) holds.

    None for a tensor that is no stack of experts or whose stack is whole. Raises Undecidable without the number of
    experts, MissingShard or Inconsistent if the blocks do not add up to it.
    """
    if not shape or not _is_stack_of_experts(name):
        return None
    meshes = {local.mesh.ranks: local.mesh for local in held}
    if all(len(ranks) >= world_size for ranks in meshes):
        return None
    if experts is None:
        if len(meshes) == 1 and not missing:
            return None
        raise Undecidable(
            f"{len(meshes)} groups of ranks hold a tensor of this name: they are replicas or different experts",
            tensor=name,
            expected="a config.json that states the number of experts",
            hint=None if has_config else "pass --base with the folder of the model that training started from",
        )
    if shape[0] == experts:
        return None
    count, rest = divmod(experts, shape[0]) if shape[0] else (0, 1)
    index: dict[tuple[int, ...], int] = {}
    for position, (ranks, mesh) in enumerate(sorted(meshes.items(), key=lambda item: min(item[0]))):
        expert_dims = [(size, own) for dim, size, own in mesh.outside or () if "ep" in dim.split("_")]
        index[ranks] = expert_dims[0][1] if len(expert_dims) == 1 and expert_dims[0][0] == count else position
    # No range over a number of the config: as many blocks as groups of ranks, each block once.
    if rest == 0 and count <= len(index) and set(index.values()) == set(range(count)):
        return count, index
    if missing:
        raise MissingShard(f"the experts of the missing ranks {', '.join(map(str, missing[:12]))} are in no other file", tensor=name)
    raise Inconsistent(
        f"the config has {experts} experts, but {len(meshes)} groups of ranks hold {shape[0]} each",
        tensor=name,
        hint="the config may belong to another model, or files of some ranks may be missing",
    )


def _is_stack_of_experts(name: str) -> bool:
    """Whether this is a stack, as "...mlp.experts.gate_up_proj", and not one expert, as "...experts.3.up_proj.weight"."""
    parts = name.split(".")
    return "experts" in parts and not any(part.isdigit() for part in parts[parts.index("experts") :])
