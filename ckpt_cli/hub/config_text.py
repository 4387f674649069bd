"""Reading and changing config.json: only the words that must change are changed."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.dtypes import BY_TORCH
from ckpt_cli.errors import CorruptFile, reading
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small
from ckpt_cli.hub.config import Config

DTYPES = ("dtype", "torch_dtype")
"""Where a config names the dtype of its model; newer versions of transformers write the first."""

WHOLE = ""
"""The key of the whole model in a dict of dtypes."""


def read_config(content: bytes | Path) -> Mapping[str, Any]:
    """A config.json, or what is to be written as one, as a dict. Raises CorruptFile."""
    if isinstance(content, bytes):
        return _config_of(content)
    with reading(content):
        return _config_of(read_small(content))


def _config_of(raw: bytes) -> dict[str, Any]:
    config = parse_json(raw, "the config")
    if not isinstance(config, dict):
        raise CorruptFile("the config is not a JSON object")
    return config


def config_with(content: bytes | Path, changes: Mapping[str, Any], without: Collection[str] = ()) -> bytes:
    """A config.json with other entries, and without some."""
    entries = {key: value for key, value in {**read_config(content), **changes}.items() if key not in without}
    return (json.dumps(entries, indent=2, ensure_ascii=False) + "\n").encode()


def config_with_dtype(path: Path, dtype: str, *, only: bool) -> bytes | Path:
    """config.json with its dtype set to what was written (torch's name); the untouched path if it says so already.

    Only these words of the text are changed. Sub-configs of multimodal models that repeat the old dtype follow. A dict of dtypes, of which
    transformers 5 takes the one of the whole for all parts, becomes this dtype if it is the ``only`` one that was written.
    """
    raw = read_small(path)
    with reading(path):
        config = _config_of(raw)
    text = raw.decode("utf-8-sig")
    said = [config[key] for key in DTYPES if key in config]
    held = [value.get(WHOLE) if isinstance(value, dict) else value for value in said]
    old = {word for word in held if isinstance(word, str)}
    parts = any(isinstance(value, dict) and any(word != dtype for word in value.values()) for value in said)
    if said and all(word == dtype for word in held) and not (only and parts):
        return path
    if not config:
        return config_with(b"{}", {_dtype_key(config): dtype})
    if not said:
        return text.replace("{", f'{{\n  "{_dtype_key(config)}": "{dtype}",', 1).encode()

    def of_parts(found: re.Match[str]) -> str:
        listed = json.loads(found[2])
        return found[1] + json.dumps(dtype if only else {**listed, WHOLE: dtype})

    if any(isinstance(value, dict) for value in said):
        text = re.sub(r'("(?:torch_)?dtype"\s*:\s*)(\{[^{}]*\})', of_parts, text)
    elif not old:
        return path
    words = "|".join(re.escape(json.dumps(word)) for word in old)
    return (re.sub(rf'("(?:torch_)?dtype"\s*:\s*)(?:{words})', rf'\g<1>"{dtype}"', text) if old else text).encode()


def with_known_dtype(config: Config) -> Config:
    """The config as it is written, for whoever asks its class: without words for a dtype that torch does not have.

    No class is built of such a config ("auto", "torch.float32"), and an output has the dtype of its weights there.
    """
    odd = {word for key in DTYPES if isinstance(word := config.get(key), str) and word not in BY_TORCH}
    return _without(config, odd) if odd else config


def _without(config: Config, odd: Collection[str]) -> dict[str, Any]:
    return {
        key: _without(value, odd) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in config.items()
        if not (key in DTYPES and isinstance(value, str) and value in odd)
    }


def _dtype_key(config: Mapping[str, Any]) -> str:
    """The key that the config's transformers version knows: "dtype" since 4.56, "torch_dtype" before."""
    version = str(config.get("transformers_version", "0")).split(".")
    numbers = [int(part) for part in version[:2] if part.isascii() and part.isdecimal()]
    return "dtype" if numbers >= [4, 56] else "torch_dtype"
