"""Checkpoints of many tensors and few bytes, for what planning costs.

    python benchmarks/many_tensors.py sparse FOLDER TENSORS
    python benchmarks/many_tensors.py ranks FOLDER RANKS TENSORS

`sparse`: a Hugging Face folder of bf16 tensors of 2 MiB in files of 5 GB; headers are written, data are holes: 500 000 tensors are 1.05 TB
by their sizes, and 100 MB on the disk. `ranks`: FSDP2 files of as many ranks, each with a row of every tensor.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

SIDE = 1024
BYTES = 2 * SIDE * SIDE
PER_FILE = 5 * 10**9 // BYTES


def sparse(folder: Path, tensors: int) -> None:
    """Headers, an index, and holes."""
    folder.mkdir(parents=True)
    files = -(-tensors // PER_FILE)
    placed = {}
    for number in range(files):
        file = folder / f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        names = [
            f"model.layers.{i // 8}.mlp.experts.{i % 8}.down_proj.weight"
            for i in range(number * PER_FILE, min(tensors, (number + 1) * PER_FILE))
        ]
        entries = {
            name: {"dtype": "BF16", "shape": [SIDE, SIDE], "data_offsets": [i * BYTES, (i + 1) * BYTES]} for i, name in enumerate(names)
        }
        header = json.dumps(entries).encode()
        with file.open("wb") as out:
            out.write(struct.pack("<Q", len(header)) + header)
            out.truncate(8 + len(header) + len(names) * BYTES)
        placed |= dict.fromkeys(names, file.name)
    index = {"metadata": {"total_size": tensors * BYTES}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def ranks(folder: Path, count: int, tensors: int) -> None:
    """DTensors with a row per rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    folder.mkdir(parents=True)
    for rank in range(count):
        dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
        mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("fsdp",))
        state = {
            f"model.layers.{i}.weight": DTensor.from_local(torch.full((1, 4), float(rank)), mesh, [Shard(0)], run_check=False)
            for i in range(tensors)
        }
        torch.save(state, folder / f"model_world_size_{count}_rank_{rank}.pt")
        dist.destroy_process_group()


if __name__ == "__main__":
    kind, place, *numbers = sys.argv[1:]
    {"sparse": sparse, "ranks": ranks}[kind](Path(place), *map(int, numbers))
