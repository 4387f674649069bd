"""What a folder lacks of the files that make the inputs of its model: tokenizer, and processors of images, sounds and videos."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.beside.names import TOKENIZER_CONFIG
from ckpt_cli.hub.beside.needs import TOKENIZER, needs_of
from ckpt_cli.hub.beside.tokenizers import TokenizerFiles, tokenizer_files
from ckpt_cli.hub.config import Config

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
OF_VIDEOS = "video_preprocessor_config.json"
CALLED = {
    "image_processor": "an image processor",
    "feature_extractor": "a feature extractor",
    "audio_processor": "an audio processor",
    "video_processor": "a video processor",
}


def tokenizer_of(files: Mapping[str, Path], config: Config) -> TokenizerFiles:
    """What there is of a tokenizer among files, by name."""
    return tokenizer_files(files.keys(), config, _content(files, TOKENIZER_CONFIG))


def lacks_tokenizer(files: Mapping[str, Path], config: Config) -> bool:
    """Whether a model that needs a tokenizer, as far as is known, has none, or none of its files that is a vocabulary."""
    needs = needs_of(config)
    return (needs is None or TOKENIZER in needs) and not tokenizer_of(files, config).there


def lacking_processors(files: Mapping[str, Path], config: Config) -> list[str]:
    """What the class of a model needs to make its inputs, besides a tokenizer, and no file holds."""
    wanted = [kind for kind in CALLED if kind in (needs_of(config) or ())]
    if not wanted or PREPROCESSOR in files:
        return []
    # Newer versions of transformers keep all of them in one file, older ones only what the processor itself is set to.
    inside = _content(files, PROCESSOR)
    return [CALLED[kind] for kind in wanted if kind not in inside and not (kind == "video_processor" and OF_VIDEOS in files)]


def _content(files: Mapping[str, Path], name: str) -> Config:
    content: Any = None
    if name in files:
        with contextlib.suppress(CkptError):  # what cannot be read is found elsewhere
            content = parse_json(read_small(files[name]))
    return content if isinstance(content, dict) else {}
