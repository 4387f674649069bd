"""Header level of `verify` for what lies beside the weights: files that cannot be read, pointers of Git LFS, JSON that is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ckpt_cli.assets import ASSET_NAMES, ASSET_PATTERN, CONFIG
from ckpt_cli.errors import CkptError, CorruptFile
from ckpt_cli.files import files_in, read_small, size_of
from ckpt_cli.findings import unread
from ckpt_cli.report import Finding


def check_beside(folder: Path) -> Iterator[Finding]:
    """What a loader would stumble over: tokenizer, processor and the like. The config has checks of its own."""
    for path in files_in(folder, _is_asset):
        try:
            if path.suffix == ".json":
                _read_json(path)
            else:
                size_of(path)
        except CkptError as error:
            yield unread("damaged-side-file", error, path.name)


def _is_asset(name: str) -> bool:
    return name != CONFIG and (name in ASSET_NAMES or ASSET_PATTERN.fullmatch(name) is not None)


def _read_json(path: Path) -> None:
    """Raise CorruptFile for what no JSON parser takes. Keys that are there twice are left to the loader."""
    raw = read_small(path)
    try:
        json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise CorruptFile("the file is empty" if not raw else "the file is not valid JSON", path=path) from None
