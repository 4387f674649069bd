"""Live models for tests of `load_into`, and what every rank of a process group does with them.

The oracle is torch: a model with the expected weights is sharded by torch itself, and what every rank then holds is what a model with
other weights, sharded in the same way, must hold after `load_into`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

Tensors = dict[str, torch.Tensor]
Shard = Callable[[nn.Module, Any], None]


class Tree(nn.Module):
    """A model with any names: floats become parameters (matrices of a projection a Linear), scalars and integers buffers."""

    def __init__(self, tensors: Tensors, tied: dict[str, str] | None = None) -> None:
        super().__init__()
        for name, values in tensors.items():
            *path, leaf = name.split(".")
            if path and path[-1].endswith("proj") and values.dim() == 2:
                linear = nn.Linear(values.shape[1], values.shape[0], bias=False, dtype=values.dtype)
                linear.weight = nn.Parameter(values.clone())
                self.at(path[:-1]).add_module(path[-1], linear)
            elif values.is_floating_point() and values.dim() and "inv_freq" not in name:
                self.at(path).register_parameter(leaf, nn.Parameter(values.clone()))
            else:
                self.at(path).register_buffer(leaf, values.clone())
        for name, partner in (tied or {}).items():
            *path, leaf = name.split(".")
            *other, last = partner.split(".")
            self.at(path).register_parameter(leaf, getattr(self.at(other), last))

    def at(self, path: list[str]) -> nn.Module:
        """The module of this name, made if it is not there."""
        module: nn.Module = self
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, Tree({}))
            module = getattr(module, part)
        return module

    def forward(self) -> torch.Tensor:
        return sum((parameter.float().sum() for parameter in self.parameters()), torch.zeros(()))


def other_values(tensors: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """Tensors of the same shapes with other values, floats as ``dtype``."""
    made = {}
    for name, values in tensors.items():
        made[name] = torch.full_like(values, 77, dtype=dtype if dtype is not None and values.is_floating_point() else None)
    return made


def in_dtype(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    return {name: values.to(dtype) if dtype is not None and values.is_floating_point() else values for name, values in tensors.items()}


def held(model: nn.Module) -> Tensors:
    """What this rank holds of every parameter and buffer."""
    found = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    with torch.no_grad():
        return {name: (values.to_local() if hasattr(values, "to_local") else values).detach().clone() for name, values in found.items()}


def unequal(found: Tensors, wanted: Tensors) -> list[str]:
    """Names whose local shape, dtype or bytes differ."""
    if found.keys() != wanted.keys():
        return sorted(found.keys() ^ wanted.keys())
    return [
        name
        for name, values in wanted.items()
        if (values.dtype, values.shape) != (found[name].dtype, found[name].shape)
        or not torch.equal(values.contiguous().flatten().view(torch.uint8), found[name].contiguous().flatten().view(torch.uint8))
    ]


# -- how torch shards ------------------------------------------------------------------------------------------------


def fsdp(model: nn.Module, mesh: Any, **options: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for name, module in list(model.named_modules()):
        if name.split(".")[-1].isdigit():
            fully_shard(module, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def tensor_parallel(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            plan[name] = RowwiseParallel() if name.endswith(("o_proj", "down_proj")) else ColwiseParallel()
    parallelize_module(model, mesh, plan)


def shardings(world: int) -> dict[str, Shard]:
    """How torch shards a model over so many ranks, by name."""
    from torch.distributed.device_mesh import init_device_mesh

    line = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    ways: dict[str, Shard] = {
        "fsdp": lambda model, _: fsdp(model, line),
        "tp": lambda model, _: tensor_parallel(model, line),
    }
    if world == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ways["hsdp"] = lambda model, _: fsdp(model, grid)

        def both(model: nn.Module, _: Any) -> None:
            tensor_parallel(model, grid["tp"])
            fsdp(model, grid["dp"])

        ways["fsdp and tp"] = both
    return ways


# -- what every rank does --------------------------------------------------------------------------------------------


def check_all(rank: int, world: int, folder: str, meeting: str) -> None:
    """All checks of one rank; an exception of one fails the test."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        for check in (check_shardings, check_reads, check_unsharded, check_errors, check_partial, check_experts):
            check(rank, world, Path(folder))
    finally:
        dist.destroy_process_group()


def load(path: Path) -> Tensors:
    from safetensors.torch import load_file

    return load_file(path)


def check_shardings(rank: int, world: int, folder: Path) -> None:
    """Every way of sharding holds, after `load_into`, what torch gives each rank of the expected weights: also cast, also tied."""
    import ckpt_cli

    for component, file in (("model", "expected.safetensors"), ("ema", "expected-ema.safetensors")):
        full = load(folder / "lmms-run" / file)
        for dtype in (None, torch.bfloat16):
            for name, shard in shardings(world).items():
                tied = {"lm_head.weight": "model.embed_tokens.weight"}
                wanted, model = Tree(in_dtype(full, dtype), tied), Tree(other_values(full, dtype), tied)
                shard(wanted, None)
                shard(model, None)
                result = ckpt_cli.load_into(model, folder / "lmms-run" / "run", type=component)
                assert unequal(held(model), held(wanted)) == [], (name, component, dtype)
                assert (result.tensors, result.missing, result.unexpected) == (len(full), (), ())
                assert result.cast == (sum(values.is_floating_point() for values in full.values()) if dtype else 0)
                owned = {id(p): p for p in (*model.parameters(), *model.buffers())}.values()
                assert result.local_elements == sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in owned)


def check_reads(rank: int, world: int, folder: Path) -> None:
    """A rank asks the system for the bytes of its own slices, and hardly more."""
    import ckpt_cli

    full = load(folder / "large" / "model.safetensors")
    model = Tree(other_values(full))
    shardings(world)["fsdp"](model, None)
    sizes: list[int] = []
    plain = os.preadv

    def counting(fd: int, buffers: Any, offset: int) -> int:
        count = plain(fd, buffers, offset)
        sizes.append(count)
        return count

    os.preadv = counting  # type: ignore[assignment]
    try:
        result = ckpt_cli.load_into(model, folder / "large" / "model.safetensors")
    finally:
        os.preadv = plain
    own = sum(values.numel() * 4 for values in held(model).values())
    assert own < sum(values.nbytes for values in full.values()) / world * 1.1
    assert result.bytes_read == own
    assert own <= sum(sizes) < own + (16 << 10), (own, sum(sizes))


def check_unsharded(rank: int, world: int, folder: Path) -> None:
    """Parameters that FSDP2 has gathered for a forward pass are sharded again first: the next pass must see what was loaded."""
    import ckpt_cli

    full = load(folder / "large" / "model.safetensors")
    model = Tree(other_values(full))
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, reshard_after_forward=False)
    assert model() != 0
    assert not any(hasattr(parameter, "to_local") for parameter in model.parameters())
    ckpt_cli.load_into(model, folder / "large" / "model.safetensors")
    assert torch.allclose(model(), sum((values.sum() for values in full.values()), torch.zeros(())), rtol=1e-3, atol=1e-2)


def check_errors(rank: int, world: int, folder: Path) -> None:
    """Differences are an error on every rank alike, also on ranks that hold no part of what differs, and nothing is written."""
    import ckpt_cli
    from ckpt_cli.errors import DifferentTensors, MissingTensors

    full = load(folder / "lmms-run" / "expected.safetensors")
    wrong = {**full, "model.two_rows": torch.zeros(1, 5), "extra.weight": torch.zeros(1, 2)}
    del wrong["model.norm.weight"]
    model = Tree(other_values(wrong))
    shardings(world)["fsdp"](model, None)
    before = held(model)
    for options, kind, lines in (
        ({}, DifferentTensors, {"other shape: model.two_rows is [2, 5] in the checkpoint, [1, 5] in the model"}),
        ({"exclude": ("model.two_rows", "model.norm.weight")}, MissingTensors, {"missing in the checkpoint: extra.weight"}),
    ):
        with pytest.raises(kind) as caught:
            ckpt_cli.load_into(model, folder / "lmms-run" / "run", **options)  # type: ignore[arg-type]
        assert lines < set(caught.value.details)
        assert unequal(held(model), before) == []


def check_partial(rank: int, world: int, folder: Path) -> None:
    """What a rank holds of a sum is no part of the tensor; a tensor of another mesh is filled by the ranks of that mesh."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    import ckpt_cli
    from ckpt_cli.errors import Unsupported

    model = nn.Module()
    model.register_parameter("a", nn.Parameter(DTensor.from_local(torch.ones(4), DeviceMesh("cpu", list(range(world))), [Partial()])))
    with pytest.raises(Unsupported, match="has the placement"):
        ckpt_cli.load_into(model, folder / "large")
    part = DTensor.from_local(torch.zeros(65), DeviceMesh("cpu", [0, 1]), [Shard(0)], shape=(130,), stride=(1,))
    alone = Tree({})
    alone.at(["norm"]).register_parameter("weight", nn.Parameter(part))
    ckpt_cli.load_into(alone, folder / "large", strict=False)
    if rank < 2:
        wanted = load(folder / "large" / "model.safetensors")["norm.weight"][65 * rank : 65 * rank + 65]
        assert torch.equal(alone.get_parameter("norm.weight").to_local().detach(), wanted)  # type: ignore[attr-defined]


def check_experts(rank: int, world: int, folder: Path) -> None:
    """A folder of the hub has one tensor per expert, the live model fused ones that FSDP2 cuts: every rank takes its experts."""
    import ckpt_cli

    full = load(folder / "experts-fused.safetensors")
    wanted, model = Tree(full), Tree(other_values(full))
    for each in (wanted, model):
        shardings(world)["fsdp"](each, None)
    result = ckpt_cli.load_into(model, folder / "experts-hub")
    assert unequal(held(model), held(wanted)) == []
    assert result.naming == "hub"


def load_modules() -> None:
    """What ranks import, before they are forked: it takes longer than what they do."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    import ckpt_cli

    for name in ckpt_cli.__all__:
        getattr(ckpt_cli, name)


def main(world: int, folder: str, meeting: str) -> None:
    """Start the ranks and wait for all of them; the first error is raised."""
    import torch.multiprocessing as mp

    load_modules()
    mp.start_processes(check_all, args=(world, folder, meeting), nprocs=world, start_method="fork")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
