"""Telling a Megatron torch_dist checkpoint from other DCP folders: by ``common.pt`` (core 0.18 and older), or by its keys.

Megatron core 0.19 keeps everything in DCP: ``common_state/shard_0_1``, ``rng_state/shard_*``, ``optimizer.distributed.*`` (flat buckets
of parameters). Layers are stacked under one key without a number, vocabularies are padded, and QKV is fused per group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ckpt_cli.errors import CkptError, Unsupported
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small

COMMON = "common.pt"
BACKEND = "metadata.json"
"""Written last; names the backend of a step."""

MAX_BACKEND = 1 << 16
SIGNS = re.compile(
    r"(common_state|rng_state|rerun_state_machine_state)/shard_.*"
    r"|.*/shard_[0-9]+(\.(e_)?[0-9]+)*_[0-9]+(\.[0-9]+)*"
    r"|(chained_[0-9]+\.)?optimizer\.(distributed|state\.fp32_param)\..*"
    r"|(.*\.)?decoder\.layers\.(self_attention|cross_attention|mlp|input_layernorm|pre_mlp_layernorm)\..*",
    re.ASCII,
)
"""Objects that are cut over ranks; buckets of the distributed optimizer; layers under one key."""


def megatron_error(folder: Path | None = None) -> Unsupported:
    """The error for one."""
    text = "this is a Megatron torch_dist checkpoint, whose tensor names and layouts only Megatron knows"
    return Unsupported(text, path=folder, hint="convert it with Megatron's own tools or with mbridge")


def has_megatron_files(folder: Path, there: Folders) -> bool:
    """Whether files beside the metadata are Megatron's."""
    if there.is_there(folder / COMMON):
        return True
    if not there.is_file(folder / BACKEND):
        return False
    try:
        content = parse_json(read_small(folder / BACKEND, MAX_BACKEND), BACKEND)
    except CkptError:
        return False
    return isinstance(content, dict) and "sharded_backend" in content


def refuse_megatron(keys: Iterable[str]) -> None:
    """Raise Unsupported if keys of a DCP folder are such as only Megatron writes."""
    if any(SIGNS.fullmatch(key) for key in keys):
        raise megatron_error()
