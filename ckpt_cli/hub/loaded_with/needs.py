"""What a model is loaded with besides its weights, as transformers has it: ``loaded_with.json``, made by `compile.py` beside this file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from ckpt_cli.hub.beside.model_config import is_of_robot
from ckpt_cli.hub.classes.rules import knows
from ckpt_cli.hub.config import Config, architecture

FILE = Path(__file__).with_name("loaded_with.json")
TOKENIZER = "tokenizer"
TIMM = ("architecture", "num_classes")
"""The entries of a config of timm, whose models classify images."""


def needs_of(config: Config) -> frozenset[str] | None:
    """What makes the inputs of a model: a tokenizer, an image processor, ...; None if the class is not known.

    Code of a model's own may read anything, so that nothing is known of it.
    """
    kind, model_type = architecture(config), config.get("model_type")
    if kind is None and is_of_robot(config):
        return frozenset()
    if kind is None and (isinstance(config.get("_class_name"), str) or all(key in config for key in TIMM)):
        return frozenset()  # a part of a pipeline of diffusers, which has its tokenizer in a folder beside it, or of timm
    if kind is None or not isinstance(model_type, str) or config.get("auto_map"):
        return None
    listed = _needs().get(f"{model_type}/{kind}")
    if listed is not None:
        return listed
    return frozenset({TOKENIZER}) if knows(model_type, kind) else None


@cache
def table() -> dict[str, Any]:
    """The shipped table."""
    content: dict[str, Any] = json.loads(FILE.read_text())
    return content


@cache
def _needs() -> dict[str, frozenset[str]]:
    return {name: frozenset(filter(None, kinds.split("+"))) for kinds, names in table()["needs"].items() for name in names}
