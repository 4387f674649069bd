"""Reading and changing config.json: only the words that must change are changed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt_cli.errors import CorruptFile, reading
from ckpt_cli.files.safetensors_file import parse_json
from ckpt_cli.files.source import read_small


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


def config_with(content: bytes | Path, changes: Mapping[str, Any]) -> bytes:
    """A config.json with other entries."""
    return (json.dumps({**read_config(content), **changes}, indent=2, ensure_ascii=False) + "\n").encode()


def config_with_dtype(path: Path, dtype: str) -> bytes | Path:
    """config.json with its dtype set to what was written (torch's name); the untouched path if it says so already.

    Only these words of the text are changed. Sub-configs of multimodal models that repeat the old dtype follow.
    """
    raw = read_small(path)
    with reading(path):
        config = _config_of(raw)
    text = raw.decode("utf-8-sig")
    keys = [key for key in ("dtype", "torch_dtype") if key in config]
    old = {config[key] for key in keys if isinstance(config[key], str)}
    if keys and old == {dtype} and all(isinstance(config[key], str) for key in keys):
        return path
    if not config:
        return config_with(b"{}", {_dtype_key(config): dtype})
    if not old:
        return text.replace("{", f'{{\n  "{_dtype_key(config)}": "{dtype}",', 1).encode() if not keys else path
    words = "|".join(re.escape(json.dumps(word)) for word in old)
    return re.sub(rf'("(?:torch_)?dtype"\s*:\s*)(?:{words})', rf'\g<1>"{dtype}"', text).encode()


def _dtype_key(config: Mapping[str, Any]) -> str:
    """The key that the config's transformers version knows: "dtype" since 4.56, "torch_dtype" before."""
    version = str(config.get("transformers_version", "0")).split(".")
    numbers = [int(part) for part in version[:2] if part.isascii() and part.isdecimal()]
    return "dtype" if numbers >= [4, 56] else "torch_dtype"
