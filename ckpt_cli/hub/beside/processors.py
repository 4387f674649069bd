"""The files of processors of images, sounds and videos: one for all of them, or one for each, as older versions of transformers do."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.config import Config

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
OF_VIDEOS = "video_preprocessor_config.json"

PARTS: Mapping[str, tuple[str, ...]] = {
    # Of videos too, where no file of their own is there.
    PREPROCESSOR: ("image_processor", "feature_extractor", "audio_processor", "video_processor"),
    OF_VIDEOS: ("video_processor",),
    "image_processor.json": ("image_processor",),
    "feature_extractor.json": ("feature_extractor",),
    "audio_tokenizer_config.json": ("audio_tokenizer",),
}
"""Files of one processor, each with the names that it has in `PROCESSOR`, which loaders ask first."""

NAMES = frozenset({*PARTS, PROCESSOR})
KINDS = frozenset(
    {"image_processor_type", "feature_extractor_type", "video_processor_type", "processor_class", "auto_map", "transformers_version"}
)
"""Entries that say what reads the others, which versions call differently."""


def contradicted(name: str, path: Path, nearer: Mapping[str, Path]) -> dict[str, str]:
    """Which processors a file sets otherwise than other files, of a nearer place, do; each with the nearer file.

    Loaders take one of the two, by their names and the version.
    """
    own = _set_by(name, path)
    found: dict[str, str] = {}
    for other in sorted(NAMES & nearer.keys()):
        if other == name:
            continue
        theirs = _set_by(other, nearer[other])
        found |= {part: other for part in own if part in theirs and _differ(own[part], theirs[part])}
    return found


def settings_beside(path: Path, parts: Mapping[str, str]) -> list[str]:
    """What a `PROCESSOR` sets besides some of the processors in it."""
    content = content_of(path)
    known = {part for parts_of in PARTS.values() for part in parts_of}
    kept = {part for part in known if any(part in PARTS[other] for other in parts.values() if other in PARTS)}
    return sorted(key for key, value in content.items() if value is not None and key not in kept | KINDS and key not in parts)


def content_of(path: Path) -> Config:
    """The content of a JSON object, nothing for what cannot be read: that is found elsewhere."""
    content: Any = None
    with contextlib.suppress(CkptError):
        content = parse_json(read_small(path))
    return content if isinstance(content, dict) else {}


def _set_by(name: str, path: Path) -> dict[str, Config]:
    """The settings of processors in a file."""
    content = content_of(path)
    if name != PROCESSOR:
        return dict.fromkeys(PARTS[name], content)
    known = {part for parts in PARTS.values() for part in parts}
    return {part: value for part, value in content.items() if part in known and isinstance(value, dict)}


def _differ(one: Config, other: Config) -> bool:
    """Whether two say anything else; what one leaves out, and the other sets to nothing, is the same."""
    return any(one.get(key) != other.get(key) for key in (one.keys() | other.keys()) - KINDS)
