"""All benchmarks in one run: docs/performance.json and the tables of docs/performance.md.

    python benchmarks/report.py FOLDER [--peers PYTHON] [--sizes 1.1:3,4.4:3,16:1] [--only copies,peers,growth]
    python benchmarks/report.py --render      # docs/performance.md from docs/performance.json alone

FOLDER is scratch space; what is written there is removed again, and a size that does not fit into it nearly three times is left out.
Parts that `--only` leaves out keep the rows of the last run. `--tiny` measures small things, to see that all works; give `--output` then.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import against_peers
import growth
import merge_against_cp
from performance_page import page

DOCS = Path(__file__).parent.parent / "docs"
PARTS = ("copies", "peers", "growth")
PACKAGES = {"unshard": "ckpt_cli"} | {name: name for name in ("numpy", "torch", "transformers", "safetensors")}


def machine(folder: Path) -> dict[str, Any]:
    """Processor, memory, file system and versions; numbers in bytes."""
    folder = folder.resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    _, system = max((mount for mount in mounts if folder.is_relative_to(mount[0])), key=lambda mount: len(mount[0]))
    cpu = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": cpu[0] if cpu else platform.machine(),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "file_system": system,
        "python": platform.python_version(),
        "versions": {package: against_peers.version_of(sys.executable, module, package) for package, module in PACKAGES.items()},
    }


def copies(options: argparse.Namespace) -> Iterator[merge_against_cp.Row]:
    """Rows per size: all dtypes from the page cache, and the smallest size from the disk too."""
    for number, (gigabytes, pairs) in enumerate(options.sizes):
        if shutil.disk_usage(options.folder).free < 2.8e9 * gigabytes:
            print(f"{gigabytes} GB: no space", file=sys.stderr)
            continue
        source = options.folder / "rank-files"
        shutil.rmtree(source, ignore_errors=True)
        wanted = argparse.Namespace(**{**vars(options), "billions": gigabytes / 4, "most_gigabytes": gigabytes})
        against_peers.write("rank-files", source, wanted)
        for cold in (False, True) if number == 0 else (False,):
            for dtype in merge_against_cp.DTYPES:
                yield merge_against_cp.compare(source, options.folder, dtype, pairs, cold=cold)
        shutil.rmtree(source)


def measured(part: str, options: argparse.Namespace, stored: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A part after each of its rows, with when it ran and how busy the machine was; rows of peers that are not measured stay."""
    before = round(os.getloadavg()[0], 1)
    names = [peer.name for peer in against_peers.PEERS]
    again = {peer.name for peer in against_peers.installed(options)} if part == "peers" else set()
    rows = [row for row in stored.get("rows", ()) if part == "peers" and row["peer"] not in again]
    found: Iterator[Any] = {
        "copies": lambda: copies(options),
        "peers": lambda: against_peers.rows(options),
        "growth": lambda: growth.rows(options.folder, *options.growth),
    }[part]()
    for row in found:
        print(part, row, file=sys.stderr, flush=True)
        rows.append(asdict(row))
        rows.sort(key=lambda row: names.index(row["peer"]) if part == "peers" else 0)
        yield {"when": time.strftime("%Y-%m-%d", time.gmtime()), "load": [before, round(os.getloadavg()[0], 1)], "rows": rows}


def sizes(text: str) -> list[tuple[float, int]]:
    """`4.4:3` is 4.4 GB in three pairs."""
    return [(float(size), int(pairs)) for size, pairs in (part.split(":") for part in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    against_peers.add_options(parser)
    parser.add_argument("--sizes", type=sizes, default="1.1:3,4.4:3,16:1", help="gigabytes and pairs for cp")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure, by commas")
    parser.add_argument("--output", type=Path, default=DOCS, help="where performance.json and performance.md are; default: docs")
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(["--render", "."] if sys.argv[1:] == ["--render"] else None)
    stored = options.output / "performance.json"
    report: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    options.growth = ()
    if options.tiny:
        options.billions, options.width, options.pairs, options.sizes = 0.002, 128, 1, [(0.008, 1)]
        options.growth = ((100, 200, 400), ((2, 50), (4, 50), (8, 50)))
    if not options.render:
        options.folder.mkdir(parents=True, exist_ok=True)
        options.output.mkdir(parents=True, exist_ok=True)
        for part in options.only.split(","):
            report["machine"] = machine(options.folder)
            for so_far in measured(part, options, report.get(part, {})):
                report[part] = so_far
                stored.write_text(json.dumps(report, indent=1) + "\n")
    (options.output / "performance.md").write_text(page(report))


if __name__ == "__main__":
    main()
