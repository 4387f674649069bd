"""Merge against cp: wall time and peak memory, in pairs, with medians.

    python benchmarks/merge_against_cp.py CHECKPOINT [--pairs 5] [--output FOLDER]

Each pair runs `cp` of the shard files (followed by a sync of what it wrote) and `ckpt merge` right after each other, in
alternating order, so that a noisy machine hits both. The last lines give the median of the ratios, which is the figure to
quote; times of single runs are not comparable between machines.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path


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


def copied(sources: list[Path], target: Path) -> float:
    """Seconds of cp and a sync of the copies."""
    target.mkdir()
    command = 'cp "$@" && sync "${@: -1}"/*'
    seconds, _ = timed(["bash", "-c", command, "cp", *map(str, sources), str(target)])
    shutil.rmtree(target)
    return seconds


def merged(checkpoint: Path, target: Path, dtype: str) -> tuple[float, int]:
    """Seconds and peak memory of a merge."""
    result = timed([sys.executable, "-m", "ckpt_cli", "merge", str(checkpoint), "-o", str(target), "--dtype", dtype])
    shutil.rmtree(target)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="where to write; default: beside the checkpoint")
    options = parser.parse_args()
    sources = sorted(options.checkpoint.rglob("model_world_size_*_rank_*.pt"))
    folder = options.output or options.checkpoint
    total = sum(source.stat().st_size for source in sources)
    print(f"{len(sources)} shard files, {total / 1e9:.2f} GB")
    for dtype in ("keep", "bf16"):
        ratios, peaks = [], []
        for pair in range(options.pairs):
            if pair % 2:
                reference = copied(sources, folder / "copied")
                seconds, peak = merged(options.checkpoint, folder / "merged", dtype)
            else:
                seconds, peak = merged(options.checkpoint, folder / "merged", dtype)
                reference = copied(sources, folder / "copied")
            ratios.append(seconds / reference)
            peaks.append(peak)
            print(f"  {dtype}: merge {seconds:.2f} s, cp + sync {reference:.2f} s, ratio {ratios[-1]:.2f}, peak {peak / 1e6:.0f} MB")
        print(f"{dtype}: median ratio {statistics.median(ratios):.2f} (cp + sync = 1), peak memory {max(peaks) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
