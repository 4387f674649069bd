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
from ckpt_cli.hub.assets import CONFIG, GENERATION_CONFIG, Assets, find_assets
from ckpt_cli.hub.beside.names import TOKENIZER_CONFIG
from ckpt_cli.hub.beside.processors import PREPROCESSOR
from ckpt_cli.hub.beside.tokenizers import has_vocabulary
from ckpt_cli.hub.config_text import read_config
from ckpt_cli.hub.contents.side_files import (
    MERGES,
    TEMPLATE,
    differing,
    has_template,
    is_needed_whole,
    other_code,
    processors_of,
    sampling,
)
from ckpt_cli.hub.contents.token_ids import contradicting
from ckpt_cli.hub.loaded_with.read_by_processor import names_read
from ckpt_cli.hub.settings import differences, settings_text
from ckpt_cli.hub.tokenizer import lost_end
from ckpt_cli.hub.tokenizer_file import TOKENIZER, tokenizer_at
from ckpt_cli.names import few
from ckpt_cli.output.publish import model_files
from ckpt_cli.results.verify import Finding
from ckpt_cli.verifying.findings import finding

SETTINGS = "settings of the tokenizer"
VIDEOS = "video_processor"
"""What older versions of transformers set up from the file for images."""


def different_side_files(folder: Path, part: Draft, made: Manifest | None, files: Files) -> Iterator[Finding]:
    """What files of an output say otherwise than those of the source. Files that cannot be read are found by other checks.

    ``made`` is the manifest if the output was merged from this source: then every file that the merge wrote is compared with what a merge
    writes now. Another program writes them in its own way: there the settings count, and what its files lack or say otherwise.
    """
    wanted = model_files(part.assets, part.plan) if made is not None else part.assets.files
    if CONFIG in wanted and is_file(folder / CONFIG):
        with contextlib.suppress(CkptError):
            yield from _config(folder / CONFIG, wanted[CONFIG], merged=made is not None)
    if made is None:
        yield from _as_another_program_writes(folder, part.assets)
        return
    for name in (name for name in made.side_files if name in wanted and name != CONFIG and stays_inside(name)):
        with contextlib.suppress(CkptError):
            if is_file(folder / name) and crc_of_content(folder / name, files) != crc_of_content(wanted[name], files):
                yield finding("other-side-file", "the source has another content", file=name)


def _as_another_program_writes(folder: Path, source: Assets) -> Iterator[Finding]:
    """What a folder that another program wrote lacks of the source's files, and where it says something else, in whichever form."""
    tokenizer = source.tokenizer
    if tokenizer is not None and tokenizer_at(folder / TOKENIZER)().gives_other_ids(tokenizer()):
        yield finding("other-side-file", "it gives other ids to tokens than that of the source", file=TOKENIZER)
    with contextlib.suppress(CkptError):
        assets = find_assets((folder,))
        # Where both have a tokenizer.json, that counts, and what older files say does not.
        other = contradicting(assets.files, source.files) if None in (tokenizer, assets.tokenizer) else None
        if other is not None:
            yield finding("other-side-file", "it gives other ids to tokens than that of the source", file=other)
        for name, what in _lost(assets, source):
            yield finding("other-side-file", f"the source has {what}, which {'are' if what == SETTINGS else 'is'} not here", file=name)
        if (end := lost_end(assets.files, assets.config, source.files)) is not None:
            text = f"the source has such a file, and without it texts do not end {end}"
            yield finding("other-side-file", text, file=GENERATION_CONFIG)
        for name, keys in differing(assets, "it", source, "the source"):
            if name in MERGES:
                yield finding("other-side-file", "it joins other tokens than that of the source", file=name)
            # Classes of transformers build the steps of a tokenizer anew, and save these: only its ids are compared.
            elif name.endswith(".json") and name != TOKENIZER:
                yield finding("other-side-file", f"it says otherwise than that of the source: {few(keys, 4)}", file=name)
            elif not name.endswith(".json") and has_template(source) and has_template(assets):
                yield finding("other-side-file", f"{name} of the source says otherwise{(keys and f': {few(keys, 4)}') or ''}")
        if keys := sampling(assets.files, source.files):
            yield finding("other-side-file", f"it samples texts otherwise than that of the source: {few(keys, 4)}", file=GENERATION_CONFIG)
        for name in other_code(assets.files, source.files):
            yield finding("other-side-file", "the source has other code", file=name)


def _lost(assets: Assets, source: Assets) -> Iterator[tuple[str, str]]:
    """The files of a source for which there is nothing in a folder, each with what it is."""
    files = assets.files
    if CONFIG in source.names and CONFIG not in files and not assets.broken:
        yield CONFIG, "a config"
    if has_vocabulary(source.files) and not has_vocabulary(files):
        yield next(name for name in sorted(source.files) if has_vocabulary([name])), "a tokenizer"
    elif TOKENIZER_CONFIG in source.files and TOKENIZER_CONFIG not in files:
        yield TOKENIZER_CONFIG, SETTINGS
    if has_template(source) and not has_template(assets):
        yield TEMPLATE, "a chat template"
    wanted, there = processors_of(source), processors_of(assets)
    read = names_read(source.processors, source.files)
    lost = {part for part in wanted if part not in there and not (part == VIDEOS and PREPROCESSOR in files)}
    yield from ((name, "a processor") for name in sorted({wanted[part] for part in lost}))
    yield from ((name, "such a file") for name in sorted(source.files.keys() - files.keys()) if is_needed_whole(name) or name in read)


def _config(config: Path, source: bytes | Path, *, merged: bool) -> Iterator[Finding]:
    """Settings in which a config.json differs from that of the source, and other entries if a merge wrote it."""
    entries = differences(read_config(config), read_config(source))
    settings = [entry for entry in entries if entry.is_setting]
    others = [entry.pair for entry in entries if not entry.is_setting]
    if settings:
        yield finding("other-settings", settings_text(settings, "source"), file=CONFIG)
    if others and merged:
        yield finding("other-side-file", f"entries differ from those of the source: {few(others)}", file=CONFIG)
