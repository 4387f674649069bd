"""Indexes beside files of a set: which files one lists."""

from __future__ import annotations

import re
from pathlib import Path

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import Folders
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small

INDEX_NAME = re.compile(r"\.index(\.[^.]+)?\.json$")


def index_beside(path: Path, there: Folders) -> Path | None:
    """An index in the same folder that lists this file, and others with it."""
    for index in there.entries(path.parent):
        if INDEX_NAME.search(index.name):
            files = listed_files(index)
            if path.name in files and len(files) > 1:
                return index
    return None


def listed_files(index: Path) -> set[str]:
    """The names of the files that an index lists; none if it cannot be read."""
    try:
        content = parse_json(read_small(index), "the index")
    except CkptError:
        return set()
    mapping = content.get("weight_map") if isinstance(content, dict) else None
    return {file for file in mapping.values() if isinstance(file, str)} if isinstance(mapping, dict) else set()
