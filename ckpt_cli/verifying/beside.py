"""Header level of `verify` for files beside the weights: unreadable files, Git LFS pointers, invalid JSON.

Files that ckpt wrote have a checksum in its manifest.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt_cli.errors import CkptError
from ckpt_cli.files.folders import files_in, is_file, stays_inside
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.assets import CONFIG
from ckpt_cli.hub.beside.names import is_asset_name
from ckpt_cli.hub.text_assets import TEXTS, check_filled, check_text
from ckpt_cli.results.verify import Finding
from ckpt_cli.verifying.findings import finding, unread

OF_WEIGHTS = (".safetensors", ".pt", ".bin", ".pth")
"""Side files that hold weights: large, and only read with ``--full``."""

MAX_TEXT = 1 << 30


def check_beside(folder: Path) -> Iterator[Finding]:
    """Problems for loaders in tokenizer, processor and the like. The config has its own checks."""
    for path in files_in(folder, _is_asset):
        try:
            check_filled(path)
            if path.suffix in TEXTS:
                check_text(path)
        except CkptError as error:
            yield unread("damaged-side-file", error, path.name)


def _is_asset(name: str) -> bool:
    return name != CONFIG and is_asset_name(name)


def check_changed(folder: Path, checksums: Mapping[str, int]) -> Iterator[Finding]:
    """Files beside the weights that changed since they were written, by the CRC-32 in a manifest. Missing ones are found elsewhere."""
    for name, wanted in checksums.items():
        if name.endswith(OF_WEIGHTS) or not stays_inside(name) or not is_file(folder / name):
            continue
        with contextlib.suppress(CkptError):  # what cannot be read is found by other checks
            if zlib.crc32(read_small(folder / name, MAX_TEXT)) != wanted:
                yield finding("changed-side-file", "it changed since it was written", file=name)
