"""Merge against the programs that people use today: wall time and peak memory, in pairs, with medians.

    python benchmarks/against_peers.py FOLDER [--peers PYTHON] [--billions 1.1] [--ranks 4] [--pairs 3]

Writes a checkpoint per format into FOLDER (`checkpoints.py`), and converts each with its peer and with ckpt right after each other, in
alternating order. PYTHON is an interpreter with the peers (verl, accelerate, deepspeed); those that are not installed are left out.
Both sides write what they write by default where it is the same dtype: verl's merger casts to bf16, so ckpt does too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Peer:
    """A program: what it reads (``kind`` of `checkpoints.py`, and where in its folder), how it is called, and our options."""

    name: str
    module: str
    kind: str
    place: str
    command: tuple[str, ...]
    options: tuple[str, ...] = ()


PEERS = (
    Peer(
        "verl.model_merger",
        "verl",
        "rank-files",
        "global_step_100/actor",
        ("-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", "{source}", "--target_dir", "{target}"),
        ("--dtype", "bf16"),
    ),
    Peer(
        "accelerate merge-weights",
        "accelerate",
        "dcp",
        "checkpoint-100/pytorch_model_fsdp_0",
        ("-c", "from accelerate.utils import merge_fsdp_weights as m; m('{source}', '{target}', safe_serialization=True)"),
    ),
    Peer(
        "dcp_to_torch_save",
        "torch",
        "dcp",
        "checkpoint-100/pytorch_model_fsdp_0",
        (
            "-c",
            "import os; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as d; "
            "os.makedirs('{target}'); d('{source}', '{target}/model.pt')",
        ),
    ),
    Peer(
        "zero_to_fp32",
        "deepspeed",
        "zero-3",
        ".",
        (
            "-c",
            "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as c; "
            "c('{source}', '{target}', safe_serialization=True)",
        ),
    ),
)


def timed(command: list[str]) -> tuple[float, int]:
    """Seconds and peak resident bytes of a command, with a sync of the disk before and after."""
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    complaint = process.stderr.read() if process.stderr else ""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}\n{complaint[-2000:]}")
    os.sync()
    return time.perf_counter() - started, usage.ru_maxrss * 1024


def measure(peer: Peer, options: argparse.Namespace) -> None:
    folder = options.folder / peer.kind
    if not folder.exists():
        # In a process of its own: the peak memory of a process is passed on to those that it starts.
        sizes = ["--billions", str(options.billions), "--ranks", str(options.ranks)]
        subprocess.run([sys.executable, str(HERE / "checkpoints.py"), peer.kind, str(folder), *sizes], check=True)
    source, target = folder / peer.place, options.folder / "out"
    theirs = [options.peers, *(part.format(source=source, target=target) for part in peer.command)]
    own = [sys.executable, "-m", "ckpt_cli", "merge", str(folder), "-o", str(target), *peer.options]
    found: dict[str, list[tuple[float, int]]] = {"ckpt": [], peer.name: []}
    for pair in range(options.pairs):
        for name, command in (("ckpt", own), (peer.name, theirs))[:: 1 if pair % 2 else -1]:
            found[name].append(timed(command))
            shutil.rmtree(target)
    seconds = [[run[0] for run in runs] for runs in found.values()]
    memory = [max(run[1] for run in runs) / 1e9 for runs in found.values()]
    ratio = statistics.median(theirs / mine for mine, theirs in zip(*seconds, strict=True))
    print(
        f"{peer.name:26}{statistics.median(seconds[1]):8.1f} s{memory[1]:8.2f} GB   "
        f"ckpt{statistics.median(seconds[0]):8.1f} s{memory[0]:8.2f} GB   {ratio:5.1f} times as fast (median of {options.pairs} pairs)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers", default=sys.executable, help="a Python with the peers; default: this one")
    parser.add_argument("--billions", type=float, default=1.1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for peer in PEERS:
        if subprocess.run([options.peers, "-c", f"import {peer.module}"], capture_output=True, check=False).returncode:
            print(f"{peer.name:26}not installed")
            continue
        measure(peer, options)


if __name__ == "__main__":
    main()
