"""Telling a Megatron torch_dist step from other DCP folders: by its files, or by keys that only Megatron writes.

``metadata.json`` names the backend and is written last (Megatron core, dist_checkpointing/serialization.py). Beside it, core 0.18 and
older keep everything that is not sharded in ``common.pt``; since 0.19 it is the item ``common_state/shard_0_1``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ckpt_cli.errors import CkptError, MissingShard, Unsupported
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small

COMMON = "common.pt"
BACKEND = "metadata.json"
TORCH_DIST = "torch_dist"

MAX_BACKEND = 1 << 16
SIGNS = re.compile(
    r"(common_state|rng_state|rerun_state_machine_state)/shard_.*"
    r"|.*/shard_[0-9]+(\.(e_)?[0-9]+)*_[0-9]+(\.[0-9]+)*"
    r"|(chained_[0-9]+\.)?optimizer\.(distributed|state\.fp32_param)\..*"
    r"|(.*\.)?decoder\.layers\.(self_attention|cross_attention|mlp|input_layernorm|pre_mlp_layernorm)\..*",
    re.ASCII,
)
"""Objects that are cut over ranks; buckets of the distributed optimizer; layers under one key."""


def is_step(folder: Path, there: Folders) -> bool:
    """Whether files of a folder say that Megatron's dist_checkpointing wrote it."""
    return there.is_file(folder / COMMON) or backend_of(folder, there) is not None


def backend_of(folder: Path, there: Folders) -> str | None:
    """The backend that ``metadata.json`` names; None without one."""
    if not there.is_file(folder / BACKEND):
        return None
    try:
        content = parse_json(read_small(folder / BACKEND, MAX_BACKEND), BACKEND)
    except CkptError:
        return None
    named = content.get("sharded_backend") if isinstance(content, dict) else None
    return named if isinstance(named, str) else None


def trouble_of(folder: Path, there: Folders) -> CkptError | None:
    """Why a step cannot be read, as far as names tell."""
    if not there.is_file(folder / BACKEND):
        return unfinished(folder)
    backend = backend_of(folder, there)
    if backend is not None and backend != TORCH_DIST:
        return Unsupported(
            f"this is a Megatron checkpoint of the backend {backend[:40]}",
            path=folder,
            expected="the backend torch_dist",
            hint="load it with a Megatron core that has this backend (to 0.15), and save it as torch_dist",
        )
    return None


def unfinished(folder: Path | None = None) -> MissingShard:
    """The error for a step without ``metadata.json``."""
    return MissingShard(
        f"this is a Megatron torch_dist checkpoint without {BACKEND}, which is written last: the save did not finish",
        path=folder,
        expected=BACKEND if folder is None else str(folder / BACKEND),
        hint=f"if the save did finish, {BACKEND} was lost in copying: copy it too",
    )


def refuse_unfinished(keys: Iterable[str]) -> None:
    """Raise MissingShard if keys of a DCP folder that is no step of Megatron by its files are such as only Megatron writes."""
    if any(SIGNS.fullmatch(key) for key in keys):
        raise unfinished()
