"""Memory is bounded by buffers, not by the model: a merge of 0.5 GB stays under 100 MB, whatever has to be done to it.

An average stays under 150 MB, however many checkpoints it reads, and so do fused adapters; verifying stays under 120 MB.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckpt_cli
from ckpt_cli.files.pickle_nodes import Call
from ckpt_cli.formats.assembly import assemble
from tests.cli import ROOT

torch = pytest.importorskip("torch")

LIMIT = 100_000_000
"""Bytes of resident memory."""

AVERAGE_LIMIT = 150_000_000
"""The same for an average: two workers keep sums beside their tiles."""

PER_TENSOR, PER_PIECE = 2_000, 2_500
"""Bytes that a merge takes for each tensor of a safetensors file, and for each piece in a file of a rank (docs/performance.md)."""

VERIFY_LIMIT = 120_000_000
"""The same for all levels of `verify` at once."""

LORA_LIMIT = 150_000_000
"""The same for fused adapters: blocks of float64, and the factors of a few modules."""


def save_ranks(folder: Path, shape: tuple[int, int], tensors: int, dim: int, ranks: int = 2) -> None:
    """Rank files of DTensors that are sharded on ``dim``."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    folder.mkdir(parents=True)
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
            local = list(shape)
            local[dim] //= ranks
            state: dict[str, Any] = {}
            for i in range(tensors):
                part = torch.full(local, float(i + rank))
                state[f"model.layers.{i}.weight"] = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
            torch.save(state, folder / f"model_world_size_{ranks}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


def peak_of(*arguments: str) -> int:
    """Peak resident memory, in bytes, of one ckpt command.

    A process starts with the peak of the one that forked it, so a small one stands between it and pytest.
    """
    program = (
        "import resource, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'ckpt_cli', *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, env=environment, check=True)
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
def test_a_merge_of_half_a_gigabyte_stays_under_100_mb(tmp_path: Path, dim: int) -> None:
    run = tmp_path / "global_step_1"
    save_ranks(run, (8192, 2048), tensors=8, dim=dim)
    for dtype in ("keep", "bf16"):
        out = tmp_path / dtype
        assert peak_of("merge", str(run), "-o", str(out), "--dtype", dtype, "--jobs", "2") < LIMIT
        assert (out / "model.safetensors").stat().st_size > (1 << 29) / (2 if dtype == "bf16" else 1)
        assert peak_of("verify", str(out), "--full", "--against", str(run), "--base", str(run), "--jobs", "2") < VERIFY_LIMIT
        (out / "model.safetensors").unlink()


@pytest.mark.slow
def test_lora_is_fused_into_half_a_gigabyte_under_150_mb(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state: dict[str, Any] = {}
    for i in range(8):
        state[f"base_model.model.{i}.base_layer.weight"] = torch.full((8192, 4096), float(i), dtype=torch.bfloat16)
        state[f"base_model.model.{i}.lora_A.default.weight"] = torch.ones(16, 4096)
        state[f"base_model.model.{i}.lora_B.default.weight"] = torch.ones(8192, 16)
    (tmp_path / "run").mkdir()
    save_file(state, tmp_path / "run" / "model.safetensors")
    assert peak_of("merge", str(tmp_path / "run"), "-o", str(tmp_path / "out"), "--lora-alpha", "16", "--jobs", "2") < LORA_LIMIT


@pytest.mark.slow
def test_an_average_of_three_checkpoints_of_a_third_of_a_gigabyte_stays_under_150_mb(tmp_path: Path) -> None:
    for step, dim in enumerate((0, 1, 0), start=1):
        save_ranks(tmp_path / "run" / f"global_step_{step}", (8192, 2048), tensors=5, dim=dim)
    for name, options in (("uniform", []), ("weighted", ["--weights", "0.1,0.2,0.7", "--dtype", "bf16"])):
        out = tmp_path / name
        assert peak_of("average", str(tmp_path / "run"), "--all", *options, "-o", str(out), "--jobs", "2") < AVERAGE_LIMIT
        assert (out / "model.safetensors").stat().st_size > 5 * (1 << 26) / (2 if "bf16" in options else 1)
        (out / "model.safetensors").unlink()


def save_small(folder: Path, tensors: int) -> None:
    """One safetensors file of so many vectors of four float32."""
    names = [f"model.layers.{i // 300}.mlp.experts.{i // 3 % 100}.{'gud'[i % 3]}.weight" for i in range(tensors)]
    header = {name: {"dtype": "F32", "shape": [4], "data_offsets": [16 * i, 16 * i + 16]} for i, name in enumerate(names)}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + os.urandom(16 * tensors))


class TestWhatIsTakenForEach:
    """What does not lie in buffers grows with the numbers of tensors and pieces, never with their bytes."""

    def test_tensor(self, tmp_path: Path) -> None:
        few, many = 3_000, 18_000
        for count in (few, many):
            save_small(tmp_path / str(count), count)
        peaks = [peak_of("merge", str(tmp_path / str(count)), "-o", str(tmp_path / f"out{count}")) for count in (few, many)]
        assert (peaks[1] - peaks[0]) / (many - few) < PER_TENSOR

    def test_nothing_of_a_pickle_stays_when_its_tensors_are_known(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """However many ranks there are, the nodes of a few files are in memory."""
        alive: list[int] = []

        def counting(*arguments: Any) -> Any:
            alive.append(sum(type(each) is Call for each in gc.get_objects()))
            return assemble(*arguments)

        monkeypatch.setattr("ckpt_cli.formats.rank_files.reader.assemble", counting)
        for ranks in (4, 16):
            save_ranks(tmp_path / str(ranks), (16, 2), 10, 0, ranks)
            gc.collect()
            ckpt_cli.inspect(tmp_path / str(ranks))
        assert 0 < alive[1] < 1.5 * alive[0]

    def test_piece(self, tmp_path: Path) -> None:
        tensors, few, many = 300, 8, 48
        for ranks in (few, many):
            save_ranks(tmp_path / str(ranks), (64, 2), tensors, 0, ranks)
        peaks = [peak_of("merge", str(tmp_path / str(ranks)), "-o", str(tmp_path / f"out{ranks}")) for ranks in (few, many)]
        assert (peaks[1] - peaks[0]) / (tensors * (many - few)) < PER_PIECE
