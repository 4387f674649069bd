"""Where config.json says that one process wrote, or is to run, a model: its file of rank 0 is then all of it.

TensorRT-LLM writes ``rank0.safetensors`` of a model of any size, and ``world_size`` in config.json, or in its ``mapping``.
"""

from __future__ import annotations

from pathlib import Path

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small

CONFIG, WORLD_SIZE = "config.json", "world_size"


def is_of_one_rank(folder: Path, there: Folders) -> bool:
    """Whether the config of a folder counts one rank, wherever it counts them."""
    if not there.is_file(folder / CONFIG):
        return False
    try:
        content = parse_json(read_small(folder / CONFIG))
    except CkptError:
        return False  # told by whoever needs it
    levels = [content, content.get("mapping")] if isinstance(content, dict) else []
    said = [level[WORLD_SIZE] for level in levels if isinstance(level, dict) and WORLD_SIZE in level]
    return bool(said) and all(type(size) is int and size == 1 for size in said)
