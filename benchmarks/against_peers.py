"""Merge against the programs that people use today: wall time, processor time and peak memory, in pairs, with medians.

    python benchmarks/against_peers.py FOLDER [--peers PYTHON] [--billions 1.1] [--ranks 4] [--pairs 3]

Writes a checkpoint per format into FOLDER (`checkpoints.py`), and converts each with its peer and with ckpt right after each other, in
alternating order; the outputs are compared bit for bit. PYTHON is an interpreter with the peers (verl, accelerate, deepspeed, slime,
mergekit); those that are not installed are left out. Both sides write what they write by default where it is the same dtype: verl's
merger casts to bf16, so ckpt does too. No checkpoint is larger than `--most-gigabytes`; it is removed after its rows are measured.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from measure import Cost, ckpt, forget, in_turn, median, ratio, timed

HERE = Path(__file__).parent
BYTES = {"rank-files": 4, "dcp": 4, "zero-3": 12, "torch-dist": 2, "hub-shards": 4, "two-models": 8}
"""Of a parameter on the disk, by kind of `checkpoints.py`."""


@dataclass(frozen=True)
class Peer:
    """A program: what it reads (``kind`` of `checkpoints.py`, and where in it), how it is called, and what ckpt is asked instead."""

    name: str
    module: str
    kind: str
    place: str
    command: tuple[str, ...]
    own: tuple[str, ...] = ("merge", "{folder}")


@dataclass(frozen=True)
class Row:
    """A peer beside ckpt: medians of the costs of both sides (`measure.median`), ratios, and whether they wrote the same."""

    peer: str
    version: str
    parameters: int
    pairs: int
    theirs: dict[str, float]
    ours: dict[str, float]
    ours_unsynced: dict[str, float]
    times_durable: float
    times_unsynced: float
    tensors: str


PEERS = (
    Peer(
        "verl.model_merger",
        "verl",
        "rank-files",
        "global_step_100/actor",
        ("-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", "{source}", "--target_dir", "{target}"),
        ("merge", "{folder}", "--dtype", "bf16"),
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
        "consolidate_safetensors_files",
        "torch",
        "hub-shards",
        ".",
        (
            "-c",
            "import json, os, struct; from pathlib import Path; "
            "from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files as c; "
            "file = min(Path('{source}').glob('*.safetensors')).open('rb'); (size,) = struct.unpack('<Q', file.read(8)); "
            "names = [name for name in json.loads(file.read(size)) if name != '__metadata__']; os.makedirs('{target}'); "
            "c('{source}', '{target}', dict.fromkeys(names, 1), num_threads=os.cpu_count())",
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
    Peer(
        "slime convert_torch_dist_to_hf",
        "slime",
        "torch-dist",
        ".",
        (
            "-c",
            "import runpy, sys, slime; from pathlib import Path; "
            "sys.argv[1:] = ['--input-dir', '{source}/run/iter_0000100', '--output-dir', '{target}', '--origin-hf-dir', '{source}/hf']; "
            "runpy.run_path(str(Path(*slime.__path__).parent / 'tools' / 'convert_torch_dist_to_hf.py'), run_name='__main__')",
        ),
        ("merge", "{folder}/run", "--base", "{folder}/hf"),
    ),
    Peer(
        "mergekit linear",
        "mergekit",
        "two-models",
        ".",
        ("-m", "mergekit.scripts.run_yaml", "{source}/linear.yaml", "{target}"),
        ("average", "{folder}/a", "{folder}/b"),
    ),
)


def version_of(python: str, module: str, package: str = "") -> str | None:
    """The version of an installed module, whose package may have another name."""
    program = (
        f"import importlib.metadata as m, importlib.util as u; assert u.find_spec('{module}'); print(m.version('{package or module}'))"
    )
    found = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def write(kind: str, folder: Path, options: argparse.Namespace) -> int:
    """Write a checkpoint; its number of parameters.

    In a process of its own: the peak memory of a process is passed on to those that it starts.
    """
    billions = min(options.billions, options.most_gigabytes / BYTES[kind])
    sizes = ["--billions", str(billions), "--ranks", str(options.ranks), "--width", str(options.width)]
    subprocess.run([sys.executable, str(HERE / "checkpoints.py"), kind, str(folder), *sizes], check=True, capture_output=True)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.suffix in (".pt", ".distcp", ".safetensors"))
    return size // BYTES[kind]


def measure(peer: Peer, version: str, folder: Path, parameters: int, options: argparse.Namespace) -> Row:
    """Both sides in turn; the last output of each is compared."""
    outputs = {name: options.folder / name for name in ("theirs", "ours", "ours_unsynced")}
    names = {"folder": folder, "source": folder / peer.place, "target": outputs["theirs"]}
    own = [part.format(**names) for part in peer.own]
    commands = {
        "theirs": [options.peers, *(part.format(**names) for part in peer.command)],
        "ours": ckpt(*own, "-o", outputs["ours"]),
        "ours_unsynced": ckpt(*own, "-o", outputs["ours_unsynced"], synced=False),
    }

    def run(name: str) -> Cost:
        shutil.rmtree(outputs[name], ignore_errors=True)
        cost = timed(commands[name], outputs[name])
        # Three outputs and a peer that loads everything would fill the memory, and the next command would pay for the room it needs.
        forget([file for file in outputs[name].rglob("*") if file.is_file()])
        if name == "ours_unsynced":
            shutil.rmtree(outputs[name])
        return cost

    # The first run with a config asks transformers in a child process which tensors its class has, and keeps the answer.
    timed([*commands["ours"], "--dry-run"])
    costs = in_turn(options.pairs, {name: lambda name=name: run(name) for name in commands})
    compared = subprocess.run(
        [sys.executable, str(HERE / "same_tensors.py"), str(outputs["ours"]), str(outputs["theirs"])],
        capture_output=True,
        text=True,
        check=True,
    )
    for output in outputs.values():
        shutil.rmtree(output, ignore_errors=True)
    return Row(
        peer=peer.name,
        version=version,
        parameters=parameters,
        pairs=options.pairs,
        **{name: median(found) for name, found in costs.items()},
        times_durable=ratio(costs["ours"], costs["theirs"], "durable"),
        times_unsynced=ratio(costs["ours_unsynced"], costs["theirs"], "seconds"),
        tensors=compared.stdout.strip(),
    )


def installed(options: argparse.Namespace) -> dict[Peer, str]:
    """The peers that can be measured, of those that were asked for, and their versions."""
    asked = [peer for peer in PEERS if options.peer in (None, peer.name)]
    versions = {peer: version_of(options.peers, peer.module) for peer in asked}
    return {peer: version for peer, version in versions.items() if version is not None}


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """A row per installed peer; a checkpoint is there only while its peers are measured."""
    found = installed(options)
    for kind in BYTES:
        versions = {peer: version for peer, version in found.items() if peer.kind == kind}
        if not versions:
            continue
        folder = options.folder / kind
        shutil.rmtree(folder, ignore_errors=True)
        parameters = write(kind, folder, options)
        for peer, version in versions.items():
            yield measure(peer, version, folder, parameters, options)
        shutil.rmtree(folder)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that `report.py` has too."""
    parser.add_argument("folder", type=Path, help="where checkpoints and outputs are written, and removed again")
    parser.add_argument("--peers", default=sys.executable, help="a Python with the peers; default: this one")
    parser.add_argument("--peer", choices=[peer.name for peer in PEERS], help="only this one")
    parser.add_argument("--billions", type=float, default=1.1)
    parser.add_argument(
        "--most-gigabytes", type=float, default=5.0, help="of a checkpoint on the disk: those of larger formats have fewer parameters"
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048, help="of the model, a multiple of 128")
    parser.add_argument("--pairs", type=int, default=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for row in rows(options):
        sides = (f"{side['durable']:8.1f} s{side['peak'] / 1e9:8.2f} GB" for side in (row.theirs, row.ours))
        print(f"{row.peer:32}{'   ckpt'.join(sides)}   {row.times_durable:5.1f} times as fast   tensors: {row.tensors}", flush=True)
        print(f"{'':32}{asdict(row)}", file=sys.stderr)


if __name__ == "__main__":
    main()
