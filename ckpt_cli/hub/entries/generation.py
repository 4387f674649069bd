"""Settings for generation that a base has in its config.json, as older models do, and that an output of it has nowhere.

transformers takes them from generation_config.json, and from config.json only where there is none. Its version 5 takes them out of every
config that it loads, so that the config.json of a training has none of them, and only ``save_pretrained`` of a model writes the other file.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CkptError
from ckpt_cli.hub.config import Config, writes_texts
from ckpt_cli.hub.config_text import read_config
from ckpt_cli.names import few, printable

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"

DEFAULTS: Mapping[str, Any] = {
    "max_length": 20,
    "min_length": 0,
    "do_sample": False,
    "early_stopping": False,
    "num_beams": 1,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "num_return_sequences": 1,
    "remove_invalid_values": False,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "penalty_alpha": 0.0,
    "renormalize_logits": False,
} | dict.fromkeys(
    (
        *("max_new_tokens", "min_new_tokens", "max_time", "stop_strings", "min_p", "top_h", "guidance_scale"),
        *("bad_words_ids", "force_words_ids", "sequence_bias", "exponential_decay_length_penalty", "dola_layers"),
        *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "decoder_start_token_id"),
    )
)
"""What changes the texts that ``generate`` makes, and the values that it takes where nothing is said: those of
``GenerationConfig._get_default_generation_params`` of transformers 5.24, and of what transformers 4 has besides."""

DECODERS = ("decoder", "generator", "text_config")
"""Parts of a config that transformers looks into where the config itself says nothing (``GenerationConfig.from_model_config``)."""

OLD_WORD = "force_bos_token_to_be_generated"
"""What BART's first configs have for a ``forced_bos_token_id`` that is the ``bos_token_id``."""

SHOWN = 5


def lost_settings(base: Config, base_files: Mapping[str, Path], *, config: Config, files: Mapping[str, Path], where: str) -> str | None:
    """What the config.json of a base says about generation and an output does not, with what to do; None if nothing.

    What an output says otherwise is meant so, and so is a generation_config.json of its own, unless transformers made that of a config
    which has none of these settings. ``where`` are the files in words.
    """
    if GENERATION_CONFIG in base_files or CONFIG not in base_files or CONFIG not in files or not writes_texts(config):
        return None
    name, there = CONFIG, _said(config)
    if GENERATION_CONFIG in files:
        name, written = GENERATION_CONFIG, _read(files[GENERATION_CONFIG])
        if written.get("_from_model_config") is not True:
            return None
        there = {key for key, value in written.items() if value is not None}
    lacking = {key: value for key, value in _wanted(base) if key not in there}
    if not lacking:
        return None
    told = few([f"{key} {_shown(value)}" for key, value in lacking.items()], SHOWN)
    them = "it" if len(lacking) == 1 else "them"
    text = f"config.json of the base sets {told} for generate(), and no file here does, so that it makes other texts"
    return f"{text}: copy {them} from {base_files[CONFIG]} into {name} {where}"


def _wanted(base: Config) -> Iterator[tuple[str, Any]]:
    """The settings of a base that are not those which `generate` has anyway."""
    levels = _levels(base)
    for key, default in DEFAULTS.items():
        value = next((level[key] for level in levels if level.get(key) is not None), None)
        if key == "forced_bos_token_id" and value is None and base.get(OLD_WORD) is True:
            value = base.get("bos_token_id")
        if value is not None and value != default:
            yield key, value


def _said(config: Config) -> set[str]:
    said = {key for level in _levels(config) for key, value in level.items() if value is not None}
    return said | {"forced_bos_token_id"} if config.get(OLD_WORD) is True else said


def _levels(config: Config) -> list[Mapping[str, Any]]:
    return [config, *(config[part] for part in DECODERS if isinstance(config.get(part), Mapping))]


def _read(path: Path) -> Config:
    """What a file says; nothing if it cannot be read, of which others tell."""
    with contextlib.suppress(CkptError):
        return read_config(path)
    return {}


def _shown(value: object) -> str:
    text = printable(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 40 else f"{text[:37]}..."
