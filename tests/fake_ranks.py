"""Every rank of larger meshes, one after the other on this machine: torch's fake process group shards, and nothing is sent.

With ``src_data_rank=None`` torch cuts the local part out of the full tensor that every rank has: the oracle of where a rank's part lies.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SHAPES = ((1,), (7,), (8, 3), (13, 5), (5, 13), (3, 4, 6), (16, 16))
MESHES = {4: ((4,), (2, 2)), 6: ((3, 2), (2, 3)), 8: ((2, 2, 2), (4, 2))}


def check(rank: int, world: int, path: Path) -> int:
    """All placements of plain shards on all meshes, then FSDP2, hybrid or not, on top of tensor parallelism; how many were compared."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        compared = 0
        for shape in MESHES[world]:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"m{i}" for i in range(len(shape))))
            compared += check_placements(mesh, path)
        if world == 8:
            cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
            compared += check_stacked(cube["tp"], cube["replicate", "shard"], path)
        if world == 6:
            for shape in MESHES[6]:
                grid = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "tp"))
                compared += check_stacked(grid["tp"], grid["shard"], path)
        return compared
    finally:
        dist.destroy_process_group()


def check_placements(mesh: Any, path: Path) -> int:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    full = load(path)
    wanted, model = nn.Module(), nn.Module()
    for name, values in full.items():
        ways = [Replicate(), *(Shard(dim) for dim in range(values.dim()))]
        for number, placements in enumerate(itertools.product(ways, repeat=mesh.ndim)):
            for each, start in ((wanted, values), (model, torch.full_like(values, 77))):
                parameter = nn.Parameter(distribute_tensor(start.clone(), mesh, placements, src_data_rank=None))
                each.register_parameter(f"{name}_{number}", parameter)
    return compare(model, wanted, path, {f"{name}_{number}": name for name in full for number in range(1 << 9)})


def check_stacked(tp: Any, dp: Any, path: Path) -> int:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    full = {name: values for name, values in load(path).items() if values.dim() == 2}
    wanted, model = nn.Module(), nn.Module()
    for name, values in full.items():
        for dim in (0, 1):
            for each, start in ((wanted, values), (model, torch.full_like(values, 77))):
                parameter = nn.Parameter(distribute_tensor(start.clone(), tp, [Shard(dim)], src_data_rank=None))
                each.register_parameter(f"{name}_{dim}", parameter)
    for each in (wanted, model):
        fully_shard(each, mesh=dp)
    assert any("Strided" in str(parameter.placements) for parameter in model.parameters())
    return compare(model, wanted, path, {f"{name}_{dim}": name for name in full for dim in (0, 1)})


def compare(model: nn.Module, wanted: nn.Module, path: Path, homes: dict[str, str]) -> int:
    """Fill the model from a file that has every tensor under all of its names."""
    import ckpt_cli
    from tests.live_models import held, unequal

    names = dict(model.named_parameters())
    stored = load(path)
    target = path.with_name("all.pt")
    torch.save({name: stored[homes[name]] for name in names}, target)
    result = ckpt_cli.load_into(model, target)
    assert unequal(held(model), held(wanted)) == []
    assert result.tensors == len(names)
    return len(names)


def load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


if __name__ == "__main__":
    from tests.live_models import load_modules

    load_modules()
    # A process for each rank, as torch keeps what it computed for a mesh, whose rank it takes for granted.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(sum(pool.starmap(check, [(rank, int(sys.argv[1]), Path(sys.argv[2])) for rank in range(int(sys.argv[1]))], chunksize=1)))
