"""Merge of a ZeRO stage 3 save against DeepSpeed's zero_to_fp32: wall time and peak memory, in pairs, with medians.

    python benchmarks/deepspeed_against_zero_to_fp32.py FOLDER [--billions 1.1] [--ranks 4] [--pairs 3]

Writes a save of real layout into FOLDER (random weights under the names of a Llama; 12 bytes per parameter: fp32 weights and two
moments), if there is none, and converts it with both. The peer runs only where deepspeed is installed; it writes sharded safetensors too.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

TAG = "global_step100"
PEER = (
    "import sys; from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert; "
    "convert(sys.argv[1], sys.argv[2], safe_serialization=True)"
)


def shapes_of(billions: float) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama with about this many parameters."""
    width, vocabulary = 2048, 32000
    layers = max(1, round((billions * 1e9 - 2 * vocabulary * width) / (12 * width * width)))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(layers):
        head = f"model.layers.{layer}"
        shapes |= {f"{head}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"{head}.mlp.{name}_proj.weight": (width * 8 // 3, width) for name in ("gate", "up")}
        shapes[f"{head}.mlp.down_proj.weight"] = (width, width * 8 // 3)
        shapes |= {f"{head}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}


def write_save(folder: Path, billions: float, ranks: int) -> None:
    """A stage 3 save of bf16 training."""
    import torch

    shapes = shapes_of(billions)
    (folder / TAG).mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    for rank in range(ranks):
        sizes = [-(-math.prod(shape) // ranks) for shape in shapes.values()]
        vectors = [torch.randn(sum(sizes)) * 0.02 for _ in range(3)]
        module = {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes}
        states = {
            "module": module,
            "buffer_names": [],
            "param_shapes": [{name: torch.Size(shape) for name, shape in shapes.items()}],
            "frozen_param_shapes": {},
            "frozen_param_fragments": {},
            "shared_params": {},
            "optimizer": None,
            "lr_scheduler": None,
            "global_steps": 100,
            "skipped_steps": 0,
            "dp_world_size": ranks,
            "mp_world_size": 1,
            "ds_config": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
            "ds_version": "0.19.8",
        }
        torch.save(states, folder / TAG / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        inner = {
            "state": {0: {"step": torch.tensor(100.0), "exp_avg": vectors[1], "exp_avg_sq": vectors[2]}},
            "param_groups": [{"lr": 1e-4, "params": [0]}],
        }
        own = {"zero_stage": 3, "partition_count": ranks, "optimizer_state_dict": inner, "fp32_flat_groups": [vectors[0]]}
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": own, "ds_version": "0.19.8"}, folder / TAG / name)


def timed(command: list[str]) -> tuple[float, int]:
    """Seconds and peak resident bytes of a command, begun when the disk is quiet."""
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    complaint = process.stderr.read() if process.stderr else ""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}\n{complaint}")
    return time.perf_counter() - started, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--billions", type=float, default=1.1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--peer", default=sys.executable, help="a Python with deepspeed")
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_save(options.folder, options.billions, options.ranks)
        return
    if not (options.folder / TAG).exists():
        # In a process of its own: the peak memory of a process is passed on to those that it starts.
        subprocess.run([sys.executable, *sys.argv, "--write"], check=True)
    total = sum(path.stat().st_size for path in (options.folder / TAG).iterdir())
    print(f"{options.ranks} ranks, {total / 1e9:.2f} GB, of which {total / 3e9:.2f} GB are fp32 weights")
    found = subprocess.run([options.peer, "-c", "import deepspeed"], capture_output=True, check=False)
    out = options.folder / "out"
    own = [sys.executable, "-m", "ckpt_cli", "merge", str(options.folder), "-o", str(out)]
    peer = [options.peer, "-c", PEER, str(options.folder), str(out)]
    ratios, memory = [], []
    for pair in range(options.pairs):
        results: dict[str, tuple[float, int]] = {}
        for name, command in (("ckpt", own), ("zero_to_fp32", peer))[:: 1 if pair % 2 else -1]:
            if name == "zero_to_fp32" and found.returncode:
                continue
            results[name] = timed(command)
            shutil.rmtree(out)
            print(f"  {name:14}{results[name][0]:8.1f} s {results[name][1] / 1e9:8.2f} GB peak")
        if len(results) == 2:
            ratios.append(results["ckpt"][0] / results["zero_to_fp32"][0])
            memory.append(results["ckpt"][1] / results["zero_to_fp32"][1])
    if ratios:
        print(
            f"time ckpt / zero_to_fp32: {statistics.median(ratios):.2f}, memory: {statistics.median(memory):.3f} (medians of {len(ratios)})"
        )


if __name__ == "__main__":
    main()
