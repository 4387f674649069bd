"""Average against reading the same bytes once and writing the output once: wall time and peak memory, in pairs, with medians.

    python benchmarks/average_against_cat.py RUN [--pairs 5] [--output FOLDER] [--cold] [-- --method ema --decay 0.8]

Each pair runs `cat` of the shard files of all checkpoints to /dev/null, then `cp` of an output and a sync of the
copy, and `ckpt average RUN --all` right before or after, in alternating order, so that a noisy machine hits both. What comes
after `--` are further options of `ckpt average`. With `--cold` what is read is dropped from the page cache before every
measurement; without, it is read from there as far as it fits into memory.

The last lines give the median of the ratios, which is the figure to quote; times of single runs are not comparable between
machines. Needs free disk space for two outputs.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measure import Cost, ckpt, forget, timed
from merge_against_cp import SHARDS


def moved(sources: Sequence[Path], sample: Path, target: Path) -> float:
    """Seconds of reading the sources once, and of writing what the folder ``sample`` holds."""
    command = 'sample=$1 target=$2; shift 2; cat "$@" > /dev/null && cp -r "$sample" "$target" && sync "$target"/*'
    cost = timed(["bash", "-c", command, "moved", str(sample), str(target), *map(str, sources)])
    shutil.rmtree(target)
    return cost.seconds


def averaged(run: Path, target: Path, options: Sequence[str]) -> Cost:
    """The cost of an average; leaves the output."""
    return timed(ckpt("average", run, "--all", "-o", target, *options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="where to write; default: beside the run")
    parser.add_argument("--cold", action="store_true", help="drop the sources from the page cache before every measurement")
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options, more = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    run: Path = options.run.resolve()
    sources = sorted(run.rglob(SHARDS))
    if not sources:
        raise SystemExit(f"no {SHARDS} below {run}")
    total = sum(source.stat().st_size for source in sources)
    print(f"{len(sources)} shard files, {total / 1e9:.2f} GB; average {' '.join(['--all', *more])}")
    ratios, peaks, processor = [], [], []
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=options.output or run.parent) as folder:
        target, sample, copy = (Path(folder, name) for name in ("averaged", "sample", "copy"))
        # One run that does not count: its output is what is copied later, and the page cache is filled as far as it goes.
        averaged(run, sample, more)
        outputs = list(sample.glob("*"))
        size = sum(output.stat().st_size for output in outputs)
        for pair in range(options.pairs):
            reference = seconds = 0.0
            for measure in ("averaged", "moved") if pair % 2 == 0 else ("moved", "averaged"):
                if options.cold:
                    forget([*sources, *outputs])
                if measure == "moved":
                    reference = moved(sources, sample, copy)
                    continue
                cost = averaged(run, target, more)
                shutil.rmtree(target)
                seconds = cost.seconds
                processor.append(cost.cpu)
                peaks.append(cost.peak)
            ratios.append(seconds / reference)
            print(
                f"  average {seconds:.2f} s, cat + cp + sync {reference:.2f} s, ratio {ratios[-1]:.2f},"
                f" processor {processor[-1]:.1f} s, peak {peaks[-1] / 1e6:.0f} MB"
            )
    print(
        f"{total / 1e9:.2f} GB read, {size / 1e9:.2f} GB written: median ratio {statistics.median(ratios):.2f} (cat + cp + sync = 1),"
        f" median processor time {statistics.median(processor):.1f} s, peak memory {max(peaks) / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
