"""Merge against cp: wall time, processor time and peak memory, in pairs, with medians.

    python benchmarks/merge_against_cp.py CHECKPOINT [--pairs 5] [--output FOLDER] [--cold]

Each pair runs `cp` of the shard files (followed by a sync of what it wrote) and `ckpt merge` right after each other, in
alternating order, so that a noisy machine hits both. The last lines give the median of the ratios, which is the figure to
quote; times of single runs are not comparable between machines. With `--cold` the shards are dropped from the page cache before each.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

from measure import Cost, ckpt, forget, in_turn, median, ratio, timed

SHARDS = "model_world_size_*_rank_*.pt"
DTYPES = ("keep", "bf16")


@dataclass(frozen=True)
class Row:
    """A merge beside cp: medians of the costs of both (`measure.median`), and what part of cp's time a merge takes."""

    bytes: int
    dtype: str
    cold: bool
    pairs: int
    copy: dict[str, float]
    ours: dict[str, float]
    ours_unsynced: dict[str, float]
    of_cp_durable: float
    of_cp_unsynced: float


def compare(checkpoint: Path, folder: Path, dtype: str, pairs: int, *, cold: bool) -> Row:
    """cp, merge, and a merge without its syncs, in turn."""
    sources = sorted(checkpoint.rglob(SHARDS))
    target = folder / "output"
    merge = ("merge", checkpoint, "-o", target, "--dtype", dtype)
    commands = {"copy": ["cp", *map(str, sources), str(target)], "ours": ckpt(*merge), "ours_unsynced": ckpt(*merge, synced=False)}

    def run(name: str) -> Cost:
        if cold:
            forget(sources)
        if name == "copy":
            target.mkdir()
        cost = timed(commands[name], target)
        shutil.rmtree(target)
        return cost

    # The first merge of a config asks transformers in a child process which tensors its class has, and keeps the answer.
    timed([*commands["ours"], "--dry-run"])
    costs = in_turn(pairs, {name: lambda name=name: run(name) for name in commands})
    return Row(
        bytes=sum(source.stat().st_size for source in sources),
        dtype=dtype,
        cold=cold,
        pairs=pairs,
        **{name: median(found) for name, found in costs.items()},
        of_cp_durable=ratio(costs["copy"], costs["ours"], "durable"),
        of_cp_unsynced=ratio(costs["copy"], costs["ours_unsynced"], "seconds"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="where to write; default: beside the checkpoint")
    parser.add_argument("--cold", action="store_true", help="drop the shards from the page cache before every measurement")
    options = parser.parse_args()
    for dtype in DTYPES:
        row = compare(options.checkpoint, options.output or options.checkpoint, dtype, options.pairs, cold=options.cold)
        print(
            f"{row.bytes / 1e9:.2f} GB, {dtype}: cp + sync {row.copy['durable']:.2f} s, merge {row.ours['durable']:.2f} s,"
            f" median ratio {row.of_cp_durable:.2f} (without syncs {row.of_cp_unsynced:.2f}),"
            f" processor {row.ours['cpu']:.1f} s, peak memory {row.ours['peak'] / 1e6:.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
