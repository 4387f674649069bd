"""Numbers that a processor and config.json both say, and with which a model cannot take what the processor makes if they differ.

Only where the class has no choice. Models that interpolate their positions (DINOv2, BLIP), or take images of all sizes (Swin, ConvNeXt,
Idefics), are not compared. The classes are those of transformers 5 whose embeddings refuse other sizes ("Input image size ... doesn't
match model"), and SigLIP's, which adds positions of a fixed number.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.hub.beside.processors import PREPROCESSOR, PROCESSOR
from ckpt_cli.hub.config import Config, levels, model_type
from ckpt_cli.hub.config_text import read_config

CODE = "processor-numbers"

OF_ONE_SIZE = frozenset({
    "vit", "deit", "ijepa", "vit_mae", "vit_msn", "clip_vision_model", "chinese_clip_vision_model", "altclip_vision_model",
    "clipseg_vision_model", "metaclip_2_vision_model", "siglip_vision_model",
})  # fmt: skip
"""Model types whose images have the size that the config says."""

PLAIN = re.compile(r"(CLIP|ChineseCLIP|ViT|DeiT|Siglip)(ImageProcessor|FeatureExtractor)\w*")
"""Processors that make one image of one; others cut it in tiles."""

OF_PATCHES = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size", "merge_size": "spatial_merge_size"}
"""What Qwen2-VL's processor calls numbers that ``vision_config`` has: it cuts images into patches, and the model multiplies these."""


def other_numbers(files: Mapping[str, Path], config: Config) -> Iterator[tuple[str, str]]:
    """(file name, text) for processors beside a model that make what it cannot take. What cannot be read is found elsewhere."""
    for name in (PREPROCESSOR, PROCESSOR):
        content: Any = None
        if name in files:
            with contextlib.suppress(CkptError):
                content = read_config(files[name])
        if not isinstance(content, Mapping):
            continue
        for said in (content, *(content.get(part) for part in ("image_processor", "feature_extractor"))):
            if isinstance(said, Mapping):
                yield from ((name, text) for text in (*_sounds(said, config), *_images(said, config), *_patches(said, config)))


def _kind(said: Mapping[str, Any]) -> str:
    named = said.get("image_processor_type") or said.get("feature_extractor_type")
    return named if isinstance(named, str) else ""


def _sounds(said: Mapping[str, Any], config: Config) -> Iterator[str]:
    key = {"WhisperFeatureExtractor": "feature_size", "ASTFeatureExtractor": "num_mel_bins"}.get(_kind(said))
    made = said.get(key) if key is not None else None
    wanted = next((level["num_mel_bins"] for level in levels(config) if type(level.get("num_mel_bins")) is int), None)
    if type(made) is int and wanted is not None and made != wanted:
        yield f"{key} is {made}, but config.json says num_mel_bins {wanted}: the model takes no sound with another number of bands"


def _images(said: Mapping[str, Any], config: Config) -> Iterator[str]:
    made = _size_made(said) if PLAIN.fullmatch(_kind(said)) else None
    towers = [level for level in levels(config) if model_type(level) in OF_ONE_SIZE]
    sizes = {size for level in towers if (size := _size(level.get("image_size"))) is not None}
    if made is not None and sizes and made not in sizes:
        wanted = " x ".join(map(str, min(sizes)))
        text = f"it makes images of {' x '.join(map(str, made))}, but config.json says {wanted}: the model takes no others"
        yield f"{text}, unless it is called with interpolate_pos_encoding"


def _size_made(said: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width of what an image processor makes; None if that depends on the image."""
    if said.get("do_center_crop"):
        return _size(said.get("crop_size"))
    return _size(said.get("size")) if said.get("do_resize", True) else None


def _size(said: object) -> tuple[int, int] | None:
    if isinstance(said, Mapping):
        said = [said.get("height"), said.get("width")]
    pair = said if isinstance(said, (list, tuple)) else (said, said)
    return (pair[0], pair[1]) if len(pair) == 2 and all(type(number) is int for number in pair) else None


def _patches(said: Mapping[str, Any], config: Config) -> Iterator[str]:
    vision = config.get("vision_config")
    if not _kind(said).startswith("Qwen2VLImageProcessor") or not isinstance(vision, Mapping):
        return
    for key, theirs in OF_PATCHES.items():
        made, wanted = said.get(key), vision.get(theirs)
        if type(made) is int and type(wanted) is int and made != wanted:
            yield f"{key} is {made}, but config.json says {theirs} {wanted}: the model takes no other patches"
