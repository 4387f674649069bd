"""What training leaves of a model: files of ranks, and the config beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

RANKS = 2


def shard(state: Mapping[str, torch.Tensor], parameters: set[str], folder: Path) -> None:
    """Files of two ranks, parameters as DTensors that are cut along dimension 0; tied ones share their storage, as FSDP2 saves them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
            made: dict[int, Any] = {}
            held: dict[str, Any] = {}
            for name, tensor in state.items():
                if name not in parameters or tensor.dim() == 0:
                    held[name] = tensor
                    continue
                key = tensor.data_ptr() if tensor.numel() else id(tensor)
                if key not in made:
                    parts = list(tensor.chunk(RANKS))
                    local = parts[rank].clone() if rank < len(parts) else tensor[:0].clone()
                    made[key] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())
                held[name] = made[key]
            torch.save(held, folder / f"model_world_size_{RANKS}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


def trained(model: Any, folder: Path) -> Path:
    """What training would leave of a model, and beside it what `save_pretrained` makes of it."""
    run = folder / "global_step_1"
    (run / "huggingface").mkdir(parents=True)
    state = model.state_dict()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    shard(state, parameters, run)
    model.save_pretrained(folder / "saved")
    (run / "huggingface" / "config.json").write_bytes((folder / "saved" / "config.json").read_bytes())
    return run
