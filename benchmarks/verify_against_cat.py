"""Verify against reading the same bytes once: wall time and peak memory, in pairs, with medians.

    python benchmarks/verify_against_cat.py OUTPUT RUN [--pairs 5]

OUTPUT is a folder that `ckpt merge RUN` wrote. Each pair runs `cat` of the weights to /dev/null and `ckpt verify` right before or
after, in alternating order: `--full` with the output alone, `--against RUN` and `--base RUN` with output and shards. Both read from the
page cache as far as it holds them, so the ratios say what checking costs beside moving the bytes.

The last lines give the medians of the ratios; times of single runs are not comparable between machines.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from measure import ckpt, timed
from merge_against_cp import SHARDS


def pair(files: Sequence[Path], options: Sequence[str], output: Path, *, verify_first: bool) -> tuple[float, int]:
    """Seconds of verifying over seconds of reading, and the peak memory of verifying in bytes."""
    command = ckpt("verify", output, "--quiet", *options)
    read = ["cat", *map(str, files)]
    if verify_first:
        verified, moved = timed(command), timed(read)
    else:
        moved, verified = timed(read), timed(command)
    return verified.seconds / moved.seconds, verified.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    weights, shards = sorted(options.output.glob("*.safetensors")), sorted(options.run.rglob(SHARDS))
    if not weights or not shards:
        raise SystemExit(f"no safetensors in {options.output}, or no {SHARDS} below {options.run}")
    levels = {"--full": (weights, ["--full"]), "--against": (weights + shards, ["--against", str(options.run)])}
    levels["--base"] = weights + shards, ["--base", str(options.run)]
    for name, (files, arguments) in levels.items():
        pairs = [pair(files, arguments, options.output, verify_first=bool(i % 2)) for i in range(options.pairs)]
        ratio, peak = statistics.median(ratio for ratio, _ in pairs), max(peak for _, peak in pairs)
        total = sum(file.stat().st_size for file in files) / 1e9
        print(f"{name}: {ratio:.2f} times as long as reading {total:.2f} GB (median of {len(pairs)}), {peak / 1e6:.0f} MB resident")


if __name__ == "__main__":
    main()
