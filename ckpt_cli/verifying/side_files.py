"""Files beside the weights, compared with those of the source: weights mean what their config and their tokenizer make of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ckpt_cli.drafting.draft import Draft
from ckpt_cli.errors import CkptError
from ckpt_cli.files.crc32 import crc_of_content
from ckpt_cli.files.folders import is_file, stays_inside
from ckpt_cli.files.manifest import Manifest
from ckpt_cli.files.source import Files
from ckpt_cli.hub.assets import CONFIG
from ckpt_cli.hub.config_text import read_config
from ckpt_cli.hub.settings import differences, settings_text
from ckpt_cli.hub.tokenizer_file import TOKENIZER, tokenizer_at
from ckpt_cli.names import few
from ckpt_cli.output.publish import model_files
from ckpt_cli.results.verify import Finding
from ckpt_cli.verifying.findings import finding


def different_side_files(folder: Path, part: Draft, made: Manifest | None, files: Files) -> Iterator[Finding]:
    """What files of an output say otherwise than those of the source. Files that cannot be read are found by other checks.

    ``made`` is the manifest if the output was merged from this source: then every file that the merge wrote is compared with what a merge
    writes now. Of another program's output only settings and the ids of tokens are, as each writes its files in its own way.
    """
    wanted = model_files(part.assets, part.plan) if made is not None else part.assets.files
    if CONFIG in wanted and is_file(folder / CONFIG):
        with contextlib.suppress(CkptError):
            yield from _config(folder / CONFIG, wanted[CONFIG], merged=made is not None)
    if made is None:
        tokenizer = part.assets.tokenizer
        if tokenizer is not None and tokenizer_at(folder / TOKENIZER)().gives_other_ids(tokenizer()):
            yield finding("other-side-file", "it gives other ids to tokens than that of the source", file=TOKENIZER)
        return
    for name in (name for name in made.side_files if name in wanted and name != CONFIG and stays_inside(name)):
        with contextlib.suppress(CkptError):
            if is_file(folder / name) and crc_of_content(folder / name, files) != crc_of_content(wanted[name], files):
                yield finding("other-side-file", "the source has another content", file=name)


def _config(config: Path, source: bytes | Path, *, merged: bool) -> Iterator[Finding]:
    """Settings in which a config.json differs from that of the source, and other entries if a merge wrote it."""
    entries = differences(read_config(config), read_config(source))
    settings = [entry for entry in entries if entry.is_setting]
    others = [entry.pair for entry in entries if not entry.is_setting]
    if settings:
        yield finding("other-settings", settings_text(settings, "source"), file=CONFIG)
    if others and merged:
        yield finding("other-side-file", f"entries differ from those of the source: {few(others)}", file=CONFIG)
