"""What a folder lacks of the files that make the inputs of its model: tokenizer, and processors of images, sounds and videos."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckpt_cli.hub.beside.names import TOKENIZER_CONFIG
from ckpt_cli.hub.beside.processors import OF_VIDEOS, PREPROCESSOR, PROCESSOR, content_of
from ckpt_cli.hub.beside.tokenizers import TokenizerFiles, tokenizer_files
from ckpt_cli.hub.config import Config
from ckpt_cli.hub.loaded_with.needs import TOKENIZER, needs_of
from ckpt_cli.hub.loaded_with.read_by_processor import tokenizers_in_folders

CALLED = {
    "image_processor": "an image processor",
    "feature_extractor": "a feature extractor",
    "audio_processor": "an audio processor",
    "video_processor": "a video processor",
}


def tokenizer_of(files: Mapping[str, Path], config: Config) -> TokenizerFiles:
    """What there is of a tokenizer among files, by name."""
    return tokenizer_files(files.keys(), config, _said(files, TOKENIZER_CONFIG))


def lacks_tokenizer(files: Mapping[str, Path], config: Config) -> bool:
    """Whether a model that needs a tokenizer, as far as is known, has none, or none of its files that is a vocabulary."""
    needs = needs_of(config)
    if (needs is not None and TOKENIZER not in needs) or tokenizer_of(files, config).there:
        return False
    return not tokenizers_in_folders(files, config)


def lacking_processors(files: Mapping[str, Path], config: Config) -> list[str]:
    """What the class of a model needs to make its inputs, besides a tokenizer, and no file holds."""
    wanted = [kind for kind in CALLED if kind in (needs_of(config) or ())]
    if not wanted or PREPROCESSOR in files:
        return []
    # Newer versions of transformers keep all of them in one file, older ones only what the processor itself is set to.
    inside = _said(files, PROCESSOR)
    return [CALLED[kind] for kind in wanted if kind not in inside and not (kind == "video_processor" and OF_VIDEOS in files)]


def _said(files: Mapping[str, Path], name: str) -> Config:
    return content_of(files[name]) if name in files else {}
