"""Checkpoints of every kind with one damaged file: refused with a reason, or read without it; nothing in it is ever run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.hostile.running import check, run_all, snapshot
from tests.payloads import calling, repacked

EVIL = calling("posix", "mkdir", "marker")

FORMATS: dict[str, tuple[str, str]] = {
    "DCP": ("dcp/2.13.0/fsdp2", ".metadata"),
    "items of DCP": ("dcp/2.13.0/fsdp2", "__0_0.distcp"),
    "rank files": ("torch-2.13.0/fsdp2", "model_world_size_4_rank_1.pt"),
    "ZeRO-1": ("deepspeed/z1-bf16-w2/run", "*optim_states.pt"),
    "ZeRO-3": ("deepspeed/z3-bf16-w2/run", "*model_states.pt"),
    "Megatron": ("megatron/llama-tp2/checkpoint", "common.pt"),
    "Megatron, torch": ("megatron/legacy-qwen2-te-tp2/checkpoint", "*.pt"),
    "torch_checkpointing": ("torch-checkpointing/fsdp-2/run/checkpoint/step-3", "metadata.pkl"),
    "items of torch_checkpointing": ("torch-checkpointing/fsdp-2/run/checkpoint/step-3", "model_0.pt"),
    "hub": ("layouts/plain-files/hub", "*.index.json"),
}
"""A folder of the unpacked archives, and the file in it that is damaged."""


READ = {f"torch_checkpointing: {damage}" for damage in ("gone", "pipe", "folder")}
"""Its files say of themselves where their parts lie, and are read as those of ranks."""


def evil(data: bytes) -> bytes:
    """The same object, and a payload before its end."""
    if data.startswith(b"PK"):
        try:
            return repacked(data, lambda name, old: old[:-1] + EVIL + b"0." if name.endswith("data.pkl") else old)
        except Exception:  # noqa: BLE001 - a chain of archives, of which the last is looked at
            return data[:100] + EVIL + data[100:]
    return data[:-1] + EVIL + b"0." if data[:1] == b"\x80" else EVIL + data


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "last byte gone": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "payload": lambda path: path.write_bytes(evil(path.read_bytes())),
    "payload alone": lambda path: path.write_bytes(b"\x80\x02" + EVIL + b"."),
    "HTML": lambda path: path.write_bytes(b"<!DOCTYPE html>\x1b[31m404"),
    "Git LFS": lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    "gone": lambda path: path.unlink(),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "link to itself": lambda path: (path.unlink(), path.symlink_to(path.name)),
}


def test_one_damaged_file_in_checkpoints_of_every_kind(data: Path, tmp_path: Path) -> None:
    places: dict[str, Path] = {}
    for kind, (source, pattern) in FORMATS.items():
        for damage, change in DAMAGES.items():
            folder = tmp_path / str(len(places))
            shutil.copytree(data / source, folder / "in")
            (folder / "writes").mkdir()
            change(min((folder / "in").rglob(pattern)))
            places[f"{kind}: {damage}"] = folder
    before = {name: snapshot(folder / "in") for name, folder in places.items()}
    outcomes = run_all(places, tmp_path)
    faults = []
    for name, folder in places.items():
        try:
            check(name, outcomes[name], folder)
            assert snapshot(folder / "in") == before[name], name
            merged, scanned = outcomes[name]["merge"], outcomes[name]["scan"]
            assert merged.code in ((0,) if name in READ else (0, 3, 4) if "payload" in name else (3, 4)), (name, merged)
            assert scanned.code == ("payload" in name), (name, scanned)
        except AssertionError as error:
            faults.append(f"{name}: {str(error)[:600]}")
    assert not faults, "\n".join(faults)
    assert len(places) == len(FORMATS) * len(DAMAGES)
